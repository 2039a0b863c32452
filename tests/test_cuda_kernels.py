"""What CUDA kernels allocate: which is chosen, what it keeps, what it takes for the time of its call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F  # noqa: N812
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from effcli.memory.allocator import PlainAllocator
from effcli.memory.compose import resident, updates
from effcli.memory.replay import replay
from effcli.memory.tape import Alloc, MicroTape
from effcli.trace.cuda import CudaKernels
from effcli.trace.cuda_attention import backend_for
from effcli.trace.cuda_functions import CudaFunctions
from effcli.trace.fake import fake_tensors, make_fake
from effcli.trace.kinds import DROPOUT
from effcli.trace.micro import trace_micro
from effcli.units import ParamInfo, Phase

AMPERE, TURING, HOPPER, ADA = (8, 0), (7, 5), (9, 0), (8, 9)
HALF, BFLOAT, FLOAT = torch.float16, torch.bfloat16, torch.float32


class Calls(torch.nn.Module):
    """A module around one function of its weight and the batch."""

    def __init__(self, function: Callable[..., Any], *shape: int, dtype: torch.dtype = FLOAT) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(shape, dtype=dtype))
        self.function = function

    def forward(self, **batch: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.function(self.weight, **batch)
        return result


def traced(model: torch.nn.Module, capability: tuple[int, int] = AMPERE, **batch: torch.Size) -> MicroTape:
    """Return the tape of one micro-batch whose loss is the sum of what the model returns; the batch holds ids."""
    with fake_tensors()():
        make_fake(model)
        return trace_micro(
            model,
            {name: torch.zeros(shape, dtype=torch.int64) for name, shape in batch.items()},
            forward=lambda model, batch: model(**batch),
            loss=lambda output, batch: output.sum(),
            kernels=CudaKernels(capability=capability),
        )


def sizes(tape: MicroTape) -> list[int]:
    return [event.num_bytes for event in tape.events if isinstance(event, Alloc)]


def heads(dtype: torch.dtype, *, length: int = 128, size: int = 64, number: int = 4) -> torch.Tensor:
    return torch.empty(2, length, number, size, dtype=dtype, device="meta", requires_grad=True).transpose(1, 2)


@pytest.mark.parametrize(
    ("capability", "dtype", "asked", "backend"),
    [
        (AMPERE, BFLOAT, {}, "flash"),
        (AMPERE, HALF, {"mask": True}, "efficient"),
        (AMPERE, FLOAT, {}, "efficient"),
        (AMPERE, BFLOAT, {"size": 320}, "efficient"),
        (AMPERE, BFLOAT, {"size": 30}, "flash"),
        (AMPERE, FLOAT, {"size": 30}, "math"),
        (AMPERE, torch.float64, {}, "math"),
        (AMPERE, BFLOAT, {"shared": 2}, "flash"),
        (AMPERE, FLOAT, {"shared": 2}, "math"),
        (TURING, HALF, {}, "efficient"),
        (TURING, BFLOAT, {}, "math"),
        (ADA, BFLOAT, {"size": 208}, "efficient"),
        (AMPERE, BFLOAT, {"size": 208}, "flash"),
        (HOPPER, BFLOAT, {}, "cudnn"),
        (HOPPER, BFLOAT, {"mask": True}, "cudnn"),
        (HOPPER, FLOAT, {}, "efficient"),
    ],
)
def test_attention_takes_the_kernel_that_torch_chooses(
    capability: tuple[int, int], dtype: torch.dtype, asked: dict[str, int], backend: str
) -> None:
    size = asked.get("size", 64)
    query, key = heads(dtype, size=size), heads(dtype, size=size, number=asked.get("shared", 4))
    mask = torch.empty(2, 1, 128, 128, dtype=dtype, device="meta") if asked.get("mask") else None

    chosen = backend_for(capability, query, key, key, mask, enable_gqa="shared" in asked)

    assert chosen == backend


def test_a_dropout_mask_takes_one_byte_an_element() -> None:
    tape = traced(Calls(lambda weight: F.dropout(weight, 0.1, True), 1000))

    masks = [event.num_bytes for event in tape.events if isinstance(event, Alloc) and event.kind == DROPOUT]

    assert masks == [1000]


def test_dropout_that_is_off_takes_nothing() -> None:
    off = traced(Calls(lambda weight: F.dropout(weight, 0.1, False) * 1.0, 1000))
    without = traced(Calls(lambda weight: weight * 1.0, 1000))

    assert sizes(off) == sizes(without)


def test_flash_keeps_an_output_and_a_number_a_query_but_no_scores() -> None:
    def attend(weight: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(*(weight.transpose(1, 2) for _ in range(3))).transpose(1, 2)

    made = sizes(traced(Calls(attend, 2, 384, 4, 64, dtype=BFLOAT)))

    assert 2 * 4 * 384 * 4 in made  # logsumexp
    assert 2 * 4 * 384 * 384 * 2 not in made
    # Backward: float32 sums of the queries' gradients, twice the query in bytes.
    assert 2 * (2 * 384 * 4 * 64) * 2 in made


@pytest.mark.parametrize(("capability", "copied"), [(AMPERE, True), (TURING, False)])
def test_only_the_efficient_kernel_returns_what_a_later_reshape_takes_without_a_copy(
    capability: tuple[int, int], copied: bool
) -> None:
    def attend(weight: torch.Tensor) -> torch.Tensor:
        # The query lies head by head, and flash answers in the same layout.
        output = F.scaled_dot_product_attention(weight, weight, weight).transpose(1, 2)
        return output.reshape(2, 100, 4 * 64)

    model = Calls(attend, 2, 4, 100, 64, dtype=HALF)
    tape = traced(model, capability)

    forward = tape.events[: next(place for place, event in enumerate(tape.events) if event[0] == Phase.BACKWARD)]
    as_large = [event for event in forward if isinstance(event, Alloc) and event.num_bytes == 2 * 4 * 100 * 64 * 2]
    assert len(as_large) == (2 if copied else 1)


def test_a_mask_for_the_efficient_kernel_has_rows_of_a_multiple_of_eight() -> None:
    def attend(weight: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        query = weight.transpose(1, 2)
        return F.scaled_dot_product_attention(query, query, query, attn_mask=mask[:, None] > 0)

    made = sizes(traced(Calls(attend, 2, 33, 4, 64, dtype=HALF), mask=torch.Size((2, 33, 33))))

    assert 2 * 33 * 40 * 2 in made
    assert 2 * 33 * 33 * 2 in made  # the mask in the query's dtype, before it is padded


@pytest.mark.parametrize(("dtype", "num_float32"), [(HALF, 1), (BFLOAT, 2)])
def test_softmax_to_float32_copies_bfloat16_alone(dtype: torch.dtype, num_float32: int) -> None:
    tape = traced(Calls(lambda weight: F.softmax(weight, -1, dtype=FLOAT), 16, 64, dtype=dtype))

    backward = next(place for place, event in enumerate(tape.events) if event[0] == Phase.BACKWARD)
    made = [event.num_bytes for event in tape.events[:backward] if isinstance(event, Alloc)]

    assert made.count(16 * 64 * 4) == num_float32


def test_the_gradient_of_softmax_takes_a_product_as_large_as_itself() -> None:
    made = sizes(traced(Calls(lambda weight: F.softmax(weight, -1), 16, 64)))

    assert made.count(16 * 64 * 4) == 3  # output, gradient, and the product of the two for the time of the call


def test_attention_with_all_scores_holds_them_three_times_while_it_looks_for_rows_without_a_number() -> None:
    def attend(weight: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(weight, weight, weight)

    made = sizes(traced(Calls(attend, 2, 4, 100, 64, dtype=BFLOAT), TURING))
    scores = 2 * 4 * 100 * 100

    # Scores, two softmaxes, and backward the gradients of two and the product that softmax takes: all in float32.
    assert made.count(scores * 4) == 6
    assert made.count(scores) == 1


def test_blas_copies_the_expanded_gradient_of_a_sum() -> None:
    def linear(weight: torch.Tensor) -> torch.Tensor:
        return F.linear(weight[:48], weight[48:])

    made = sizes(traced(Calls(linear, 48 + 80, 32)))

    assert made.count(48 * 80 * 4) == 3  # the output, and a copy of its gradient for each operand


def test_a_long_embedding_sorts_its_ids_and_adds_in_float32() -> None:
    short = sizes(
        traced(Calls(lambda weight, ids: F.embedding(ids, weight), 50, 8, dtype=HALF), ids=torch.Size((3072,)))
    )
    long = sizes(
        traced(Calls(lambda weight, ids: F.embedding(ids, weight), 50, 8, dtype=HALF), ids=torch.Size((4096,)))
    )

    assert 3072 * 8 * 4 not in short
    assert 4096 * 8 * 4 in long
    assert long.count(4096 * 8) == 7  # the batch's own ids and six arrays of the sort


@pytest.mark.parametrize(("capability", "num_bytes"), [(AMPERE, 8_519_680), (TURING, 8_519_680), (HOPPER, 33_554_432)])
def test_cublas_keeps_a_workspace_for_each_of_two_threads(capability: tuple[int, int], num_bytes: int) -> None:
    lasting = CudaKernels(capability=capability).lasting_bytes()

    assert lasting == {Phase.FORWARD: (num_bytes,), Phase.BACKWARD: (num_bytes,)}


@pytest.mark.parametrize(
    ("function", "dtype"),
    [
        (lambda x: F.layer_norm(x, (8,)), FLOAT),
        (lambda x: F.rms_norm(x, (8,)), FLOAT),
        (lambda x: x.softmax(-1), FLOAT),
        (lambda x: torch.log_softmax(x, -1), FLOAT),
        (lambda x: x.sum(-1), FLOAT),
        (lambda x: x.cumsum(0), FLOAT),
        (lambda x: x**2, FLOAT),
        (lambda x: x.norm(), FLOAT),
        (lambda x: torch.rsqrt(x), FLOAT),
        (lambda x: F.cross_entropy(x, torch.zeros(8, dtype=torch.int64)), FLOAT),
        (lambda x: F.mse_loss(x, x), FLOAT),
        (lambda x: x @ x, BFLOAT),
        (lambda x: F.linear(x.float(), x.float()), BFLOAT),
        (lambda x: F.scaled_dot_product_attention(*[x.float()[None, None]] * 3), BFLOAT),
        (lambda x: F.gelu(x), BFLOAT),
        (lambda x: x + x, BFLOAT),
        (lambda x: torch.mv(x.float(), x[0].float()), BFLOAT),
    ],
)
def test_autocast_gives_each_function_the_precision_that_it_has_on_cuda(
    function: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype
) -> None:
    with fake_tensors()(), CudaFunctions(AMPERE), torch.autocast("cpu", dtype=BFLOAT):
        assert function(torch.zeros(8, 8, dtype=BFLOAT)).dtype is dtype


def test_what_is_recomputed_in_the_backward_pass_makes_the_same_choices() -> None:
    def recomputed(weight: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = checkpoint(lambda x: F.dropout(x * 2.0, 0.1, True), weight, use_reentrant=False)
        return result

    tape = traced(Calls(recomputed, 1000))

    assert sizes(tape).count(1000) == 2


def test_choices_end_with_the_mode_even_after_an_error() -> None:
    with pytest.raises(RuntimeError), CudaFunctions(AMPERE):
        raise RuntimeError
    with torch.profiler.profile(activities=[ProfilerActivity.CPU]) as profiled:
        F.dropout(torch.ones(8), 0.5, True)

    assert not any("native_dropout" in event.name for event in profiled.events())


def test_a_table_used_twice_has_its_gradients_added_as_the_engine_adds_them() -> None:
    ids = torch.zeros(2, 3, dtype=torch.int64)

    def tied(weight: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return F.linear(F.embedding(ids, weight).sin(), weight)

    weight = torch.nn.Parameter(torch.ones(1000, 8))
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        tied(weight, ids).sum().backward()
    taken = [event.nbytes() for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]

    assert sizes(traced(Calls(tied, 1000, 8), ids=ids.shape)).count(32000) == taken.count(32000) == 3


def test_cross_entropy_that_adds_to_a_gradient_takes_five_times_its_logits() -> None:
    rows, classes = 512, 1000
    tape = traced(Calls(F.cross_entropy, rows, classes), target=torch.Size((rows,)))
    weights = resident([ParamInfo(name="weight", shape=(rows, classes))], {})

    peak = replay(list(updates(weights, tape, [None], accum=2)), PlainAllocator()).peak.total_bytes

    # Logits, log-probabilities, two gradients on the way, and the sum of the micro-batch before; BLAS is not used.
    assert peak - 2 * 8_519_680 - rows * 8 == pytest.approx(5 * rows * classes * 4, abs=64)
