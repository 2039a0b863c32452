"""What an optimizer update allocates: the traced tapes against the CPU allocator's own record of real updates."""

from __future__ import annotations

import warnings
from dataclasses import replace
from itertools import accumulate
from typing import Any

import pytest
import torch
from transformers import DistilBertConfig, DistilBertForSequenceClassification, PreTrainedModel

from effcli.errors import UsageError
from effcli.memory.state import StateSummary, predict_state
from effcli.memory.tape import Alloc, Free, StepTape, StepTapes
from effcli.models.build import parameter_infos
from effcli.optim.groups import decay_groups
from effcli.optim.hyper import default_hyper
from effcli.optim.implementation import with_implementation
from effcli.optim.registry import entries, find, require
from effcli.trace import step_recorder
from effcli.trace.by_shape import ByShape
from effcli.trace.cpu import CpuKernels
from effcli.trace.cuda import CudaKernels
from effcli.trace.optimizer import trace_update
from effcli.trace.step_tapes import STATE
from effcli.units import Basis, Category, ParamInfo, Placement
from tests.profiled import profiled_peak
from tests.tiny_models import tiny_distilbert

DECAY = 0.01
SCALARS = 64
"""Bytes of numbers that a kernel wraps into tensors, and that a loop holds on to."""
TABLES = 2048
"""Code tables of bitsandbytes: on a CPU they exist since the optimizer was made, not since its first step."""
WORK_ARRAY = 16_000
"""What LAPACK asks for beside the copy of a matrix whose singular values it finds."""


def traced(
    name: str, params: tuple[ParamInfo, ...], device: str = "cpu", *, decay: float = DECAY, **hyper: Any
) -> StepTapes:
    entry = find(name)
    resolved = {**default_hyper(entry), **hyper}
    kernels = CpuKernels() if device == "cpu" else CudaKernels()
    return trace_update(entry, params, resolved, decay, device=device, max_grad_norm=1.0, kernels=kernels)


def peak(tape: StepTape) -> int:
    """Return the highest sum of what the tape allocated, less what it freed of that, in bytes."""
    sizes = {event.block: event.num_bytes for event in tape.events if isinstance(event, Alloc)}
    live: set[int] = set()
    changes = []
    for event in tape.events:
        if isinstance(event, Alloc):
            live.add(event.block)
            changes.append(event.num_bytes)
        elif isinstance(event, Free) and event.block in live:
            live.remove(event.block)
            changes.append(-sizes[event.block])
    return max(accumulate(changes, initial=0))


def measured(
    name: str, model: PreTrainedModel, *, decay: float = DECAY, updates: int = 2, **hyper: Any
) -> tuple[int, int]:
    """Return the profiled peaks of clip and step in the first and the last of some real updates, in bytes."""
    entry = find(name)
    require(entry)
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optimizer = entry.build(decay_groups(model, decay), {**default_hyper(entry), **hyper})

        def update() -> None:
            torch.nn.utils.clip_grad_norm_(list(model.parameters()), 1.0)
            optimizer.step()

        peaks = []
        for number in range(updates):
            for parameter in model.parameters():
                parameter.grad = torch.randn_like(parameter) * 0.01
            if number in (0, updates - 1):
                peaks.append(profiled_peak(update))
            else:
                update()
    return peaks[0], peaks[-1]


def small_distilbert() -> PreTrainedModel:
    """Return a classifier of 5.3 million parameters."""
    return DistilBertForSequenceClassification(
        DistilBertConfig(vocab_size=8000, dim=256, n_layers=4, n_heads=4, hidden_dim=1024, max_position_embeddings=64)
    )


def assert_agreement(
    model: PreTrainedModel, name: str, *, updates: int = 2, decay: float = DECAY, **hyper: Any
) -> None:
    """Compare predicted with measured peaks of a first and of a later update."""
    tapes = traced(name, parameter_infos(model), decay=decay, **hyper)
    first, later = measured(name, model, updates=updates, decay=decay, **hyper)
    assert peak(tapes.first) == pytest.approx(first, abs=WORK_ARRAY if name == "galore-adamw" else TABLES + SCALARS)
    assert peak(tapes.later) == pytest.approx(later, abs=SCALARS)


FAST = (
    *("adamw", "sgd-momentum", "adafactor-torch", "muon", "adafactor", "schedulefree-adamw", "galore-adamw", "came"),
    *("adam8bit", "ademamix8bit", "adamw8bit-ao"),
)
"""One optimizer of every kind; the others are their kin."""


def on_a_cpu(names: Any) -> list[Any]:
    return [name for name in names if "cpu" in find(name).devices]


@pytest.mark.parametrize("name", on_a_cpu(FAST))
def test_the_traced_peak_of_a_step_is_that_of_the_cpu_allocator(name: str) -> None:
    assert_agreement(tiny_distilbert(), name, **({"rank": 32} if name == "galore-adamw" else {}))


@pytest.mark.slow
@pytest.mark.parametrize("name", on_a_cpu(entry.name for entry in entries()))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_traced_peak_agrees_for_every_optimizer_and_a_larger_model(name: str, dtype: torch.dtype) -> None:
    assert_agreement(small_distilbert().to(dtype), name, updates=7 if name == "radam" else 2)


@pytest.mark.parametrize("name", ["stable-adamw", "adam8bit"])
def test_weights_in_bfloat16_agree_too(name: str) -> None:
    assert_agreement(tiny_distilbert().to(torch.bfloat16), name)


@pytest.mark.parametrize("name", ["adamw", "adagrad"])
@pytest.mark.parametrize("implementation", ["foreach", "fused"])
def test_an_implementation_that_was_asked_for_agrees_too(name: str, implementation: str) -> None:
    assert_agreement(tiny_distilbert(), name, implementation=implementation)


def test_decay_that_is_added_to_the_gradient_costs_what_it_does() -> None:
    assert_agreement(tiny_distilbert(), "sgd", decay=0.0)
    params = parameter_infos(tiny_distilbert())
    assert peak(traced("sgd", params).later) > peak(traced("sgd", params, decay=0.0).later)


def test_a_later_update_of_radam_is_a_rectified_one() -> None:
    assert_agreement(tiny_distilbert(), "radam", updates=7)


PARAMS = parameter_infos(tiny_distilbert())
WEIGHTS = sum(param.num_bytes for param in PARAMS)


def test_on_cuda_torch_steps_by_foreach_as_it_does_on_a_cpu_when_asked() -> None:
    on_cuda, asked = traced("adamw", PARAMS, "cuda"), traced("adamw", PARAMS, implementation="foreach")
    assert peak(asked.first) - peak(on_cuda.first) == 4 * 16  # the decayed tensors' steps, which stay on the host
    assert peak(on_cuda.later) == pytest.approx(peak(asked.later), abs=SCALARS)
    kinds = {event.kind for event in on_cuda.later.events if isinstance(event, Alloc)}
    assert {step_recorder.CLIPPING, step_recorder.FOREACH} <= kinds


def test_fused_needs_nothing_where_foreach_takes_as_much_as_the_weights() -> None:
    foreach, fused = (
        traced("adamw", PARAMS, "cuda", implementation=implementation) for implementation in ("foreach", "fused")
    )
    assert peak(foreach.later) == pytest.approx(WEIGHTS, rel=0.02)
    assert peak(fused.later) < 1000


def test_torchs_adafactor_loops_on_cuda_too() -> None:
    assert peak(traced("adafactor-torch", PARAMS, "cuda").later) < WEIGHTS


FEW = (*PARAMS[:6], *PARAMS[-2:], ParamInfo(name="large", shape=(512, 256)))
"""Embeddings, a norm, a layer's first matrices, the head, and one that paged optimizers page."""


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("entry", entries(), ids=lambda entry: entry.name)
def test_tapes_free_every_gradient_and_leave_the_state_that_the_law_says(entry: Any, device: str) -> None:
    tapes = traced(entry.name, FEW, device)
    sizes: dict[int, tuple[int, str]] = {}
    ends = []
    for tape in (tapes.built, tapes.first, tapes.later, tapes.later):
        gradients = {*tape.gradients.values()}
        for event in tape.events:
            if isinstance(event, Alloc):
                assert event.block not in sizes
                sizes[event.block] = (event.num_bytes, event.category)
            elif event.block in gradients:
                gradients.remove(event.block)
            else:
                del sizes[event.block]
        assert not gradients
        ends.append(dict(sizes))
    assert ends[1] == ends[2] == ends[3]
    state = sum(num_bytes for num_bytes, category in ends[1].values() if category == Category.OPTIMIZER_STATE)
    assert state == on_device(predict_state(entry, FEW, default_hyper(entry)), device)
    assert all(category != Category.GRADIENTS for _, category in ends[1].values())
    assert tapes.basis is (Basis.ASSUMED if entry.step_workspace else Basis.TRACED)


def on_device(state: StateSummary, device: str) -> int:
    if device == "cpu":
        return state.state_bytes
    return state.placements.get(Placement.DEVICE, 0)


def test_adagrads_sums_exist_since_it_was_made() -> None:
    tapes = traced("adagrad", PARAMS, "cuda")
    assert sum(event.num_bytes for event in tapes.built.events if isinstance(event, Alloc)) == WEIGHTS
    assert all(event.category != Category.OPTIMIZER_STATE for event in tapes.first.events if isinstance(event, Alloc))


def test_paged_state_is_on_no_tape_of_a_gpu_and_is_named() -> None:
    tapes = traced("paged-adamw32bit", FEW, "cuda")
    in_torch = {event.source for event in tapes.first.events if isinstance(event, Alloc) and event.kind == STATE}
    assert in_torch == {param.name for param in FEW if param.num_elements < 100_000}
    assert tapes.notes == (
        "paged-adamw32bit: 1.00 MiB of its state lie in paged (managed) memory, outside torch's allocator.",
    )


def test_an_optimizer_without_the_implementation_is_refused() -> None:
    for name, words in (("muon", "none that could be chosen"), ("radam", "auto or foreach or for-loop")):
        with pytest.raises(UsageError, match=words):
            with_implementation(find(name), default_hyper(find(name)), "fused")


class ReadsValues(torch.optim.SGD):
    """Keeps what depends on the gradients' values, so that it cannot step without them."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["signs"] = torch.zeros_like(parameter)
                parameter.grad[parameter.grad.nonzero(as_tuple=True)].sign()


def test_a_class_that_needs_values_is_replaced_by_its_state_and_says_so() -> None:
    tapes = traced(f"{__name__}:ReadsValues", FEW, lr=0.1)
    assert tapes.basis is Basis.ASSUMED
    assert "what a step takes beside its state is left out" in tapes.notes[0]
    state = sum(size_of(event) for event in tapes.first.events if getattr(event, "category", "") == "optimizer_state")
    assert state == sum(param.num_bytes for param in FEW)


def test_what_kernels_of_another_library_take_is_said_to_be_left_out() -> None:
    tapes = traced("bitsandbytes.optim:Adam8bit", FEW, "cuda")
    assert tapes.basis is Basis.ASSUMED
    assert "bitsandbytes::optimizer_update_8bit_blockwise" in tapes.notes[0]


@pytest.mark.parametrize("name", ["adamw", "adafactor", "came", "muon", "galore-adamw", "rprop"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_answers_by_shape_change_no_tape(name: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    by_shape = traced(name, FEW, device, **({"rank": 32} if name == "galore-adamw" else {}))
    monkeypatch.setattr(ByShape, "answer", lambda self, func, args, kwargs: func(*args, **kwargs))
    run = traced(name, FEW, device, **({"rank": 32} if name == "galore-adamw" else {}))
    assert by_shape == run


def test_a_frozen_parameter_takes_no_part() -> None:
    frozen = replace(FEW[0], trainable=False)
    tapes = traced("adamw", (frozen, *FEW[1:]))
    assert frozen.name not in tapes.first.gradients
    assert not any(name.startswith(frozen.name) for name in tapes.first.state)


def size_of(event: Alloc | Free) -> int:
    return event.num_bytes if isinstance(event, Alloc) else 0
