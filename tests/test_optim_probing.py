"""State of any optimizer class, sized by stepping it on stand-ins: what its own instance holds after a real step."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from effcli.errors import UsageError
from effcli.measure.optimizer_size import OptimizerSize, inspect_optimizer
from effcli.memory.state import StateSummary, predict_state
from effcli.models.build import parameter_infos
from effcli.optim.by_path import probe as probing
from effcli.optim.by_path.stand_ins import LARGEST, stand_ins
from effcli.optim.groups import decay_groups
from effcli.optim.hyper import resolve_hyper
from effcli.optim.registry import find
from effcli.spec import OptimSpec
from effcli.units import Basis, ParamInfo, Placement
from tests.tiny_models import set_gradients, tiny_distilbert

TINY_DISTILBERT_STATE = {
    "torch.optim:AdamW": 1_115_824,
    "torch.optim:SGD": 0,
    "torch.optim:Adafactor": 19_280,
    "transformers.optimization:Adafactor": 19_280,
    "bitsandbytes.optim:Adam": 8 * 139_458,
    "torchao.optim:AdamW8bit": 324_480,
}
"""Class -> bytes on the tiny DistilBERT, known from elsewhere."""
OTHERS = (
    "schedulefree:AdamWScheduleFree",
    "galore_torch:GaLoreAdamW",
    "pytorch_optimizer:CAME",
    "pytorch_optimizer:Lamb",  # views of one tensor with a number for each parameter
    "pytorch_optimizer:MADGRAD",  # a counter that belongs to the whole optimizer
    "pytorch_optimizer:Shampoo",
)
HERE = "tests.test_optim_probing"


def both(path: str, model: torch.nn.Module, spec: OptimSpec | None = None) -> tuple[StateSummary, OptimizerSize]:
    """Return the probed state of a class on a model, and what its own instance holds after one step."""
    pytest.importorskip(path.partition(".")[0].partition(":")[0])
    entry = find(path)
    hyper = resolve_hyper(entry, spec or OptimSpec())
    predicted = predict_state(entry, parameter_infos(model), hyper)
    set_gradients(model)
    optimizer = entry.build(decay_groups(model, 0.01), hyper)
    with torch.compiler.set_stance("force_eager"):  # compiling torchao's step takes tens of seconds
        optimizer.step()
    return predicted, inspect_optimizer(optimizer)


@pytest.mark.parametrize("path", [*TINY_DISTILBERT_STATE, *OTHERS])
def test_the_probed_state_of_a_small_model_is_the_real_one_key_by_key(path: str) -> None:
    quiet = OptimSpec(args={"no_deprecation_warning": True}) if "galore" in path else None
    predicted, measured = both(path, tiny_distilbert(), quiet)
    assert predicted.basis is Basis.PROBED
    assert predicted.tensors == measured.tensors
    assert predicted.state_bytes == measured.state_bytes == TINY_DISTILBERT_STATE.get(path, measured.state_bytes)
    assert predicted.state_elements == measured.state_elements


@pytest.mark.parametrize(
    "path", ["torch.optim:AdamW", "transformers.optimization:Adafactor", "torchao.optim:AdamW8bit"]
)
def test_half_precision_weights_are_probed_in_their_dtype(path: str) -> None:
    predicted, measured = both(path, tiny_distilbert().bfloat16())
    assert predicted.tensors == measured.tensors


def test_code_tables_of_8_bit_states_are_known_to_be_shared() -> None:
    predicted, measured = both("bitsandbytes.optim:AdEMAMix8bit", tiny_distilbert())
    assert predicted.tensors == measured.tensors
    predicted, measured = both("bitsandbytes.optim:Adam8bit", tiny_distilbert(), OptimSpec(args={"min_8bit_size": 64}))
    assert predicted.tensors == measured.tensors
    assert predicted.by_parameter == measured.by_parameter
    assert predicted.shared_bytes == 2048
    assert predicted.num_quantised > 15  # so many with upstream's 4,096


class Large(torch.nn.Module):
    """Parameters that all need a stand-in, none of them a multiple of the blocks of 256."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        for index, shape in enumerate([(2301, 1411), (LARGEST + 1030,), (40, 210, 200)]):
            param = torch.nn.Parameter(0.02 * torch.randn(shape).to(dtype))
            assert param.numel() > LARGEST
            self.register_parameter(f"p{index}", param)


class Steps(torch.optim.Optimizer):
    """What the classes below have in common: they allocate at the first step and leave the weights alone."""

    def __init__(self, params: object, lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: Callable[[], float] | None = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                self.allocate(param, self.state[param])

    def allocate(self, param: torch.Tensor, state: dict[str, object]) -> None:
        raise NotImplementedError


class LongAxis(Steps):
    """Keeps one square for each axis of at most 1,400: no law in the shape."""

    def allocate(self, param: torch.Tensor, state: dict[str, object]) -> None:
        state["squares"] = [param.new_zeros(size, size) for size in param.shape if size <= 1400]


class ReadsFirst(Steps):
    """Reads a value before it allocates a factor, blocks and a constant, so that it tells nothing without data."""

    def allocate(self, param: torch.Tensor, state: dict[str, object]) -> None:
        assert float(param.grad.sum()) != 0
        state["rows"] = param.new_zeros(param.shape[:-1])
        state["absmax"] = param.new_zeros(math.ceil(param.numel() / 256))
        state["moment"] = torch.zeros_like(param, dtype=torch.float16)
        state["three"] = torch.zeros(3, dtype=torch.float64)


class ReadsSquares(Steps):
    """Reads a value first and grows with the square of the last axis."""

    def allocate(self, param: torch.Tensor, state: dict[str, object]) -> None:
        assert float(param.grad.sum()) != 0
        state["square"] = torch.zeros(param.shape[-1], param.shape[-1], dtype=torch.uint8)


class Fickle(Steps):
    """Keeps as many elements as there are large gradients."""

    def allocate(self, param: torch.Tensor, state: dict[str, object]) -> None:
        state["large"] = param.grad[param.grad > 1]


class Huge(Steps):
    """Keeps a square for a vector."""

    def allocate(self, param: torch.Tensor, state: dict[str, object]) -> None:
        state["square"] = param.new_zeros(param.numel(), param.numel())


class OnHost(Steps):
    """Keeps one state beside the weight and one on the host."""

    def allocate(self, param: torch.Tensor, state: dict[str, object]) -> None:
        state["near"], state["far"], state["step"] = torch.zeros_like(param), torch.zeros(param.shape), 1


@pytest.mark.parametrize(
    "path",
    [
        "torch.optim:AdamW",
        "torch.optim:Adafactor",
        "bitsandbytes.optim:AdamW8bit",
        "torchao.optim:AdamW4bit",
        "transformers.optimization:Adafactor",
        "pytorch_optimizer:CAME",
        "pytorch_optimizer:AdaGC",  # reads a value before all is allocated
        f"{HERE}:LongAxis",
        f"{HERE}:ReadsFirst",
    ],
)
def test_the_probed_state_of_large_parameters_is_the_real_one_to_the_byte(path: str) -> None:
    predicted, measured = both(path, Large())
    assert predicted.tensors == measured.tensors
    assert predicted.state_elements == measured.state_elements


def test_a_state_that_follows_no_law_is_probed_at_the_real_size_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = torch.nn.Module()
    model.p = torch.nn.Parameter(torch.randn(700, 2400))
    predicted, measured = both(f"{HERE}:ReadsSquares", model)
    assert predicted.tensors == measured.tensors
    assert predicted.state_bytes == 2400**2

    monkeypatch.setattr(probing, "_LARGEST_REAL", LARGEST)
    with pytest.raises(UsageError, match=r"ReadsSquares' cannot be sized for float32 weights 700 x 2401: .*too large"):
        probe(f"{HERE}:ReadsSquares", (700, 2401))


def probe(path: str, shape: tuple[int, ...], spec: OptimSpec | None = None, dtype: str = "float32") -> StateSummary:
    entry = find(path)
    return predict_state(
        entry, [ParamInfo(name="w", shape=shape, dtype=dtype)], resolve_hyper(entry, spec or OptimSpec())
    )


def test_a_state_that_depends_on_values_is_refused() -> None:
    with pytest.raises(UsageError, match="64 x 64: its state differs between two parameters"):
        probe(f"{HERE}:Fickle", (64, 64))


def test_a_parameter_too_large_for_any_memory_is_sized() -> None:
    assert probe("torch.optim:AdamW", (200_000, 100_000)).state_bytes == 8 * 2 * 10**10 + 4
    eight = probe("bitsandbytes.optim:AdEMAMix8bit", (200_000, 100_000))
    assert eight.state_bytes == 3 * (2 * 10**10 + 4 * (2 * 10**10 // 256)) + 2 * 1024
    assert probe("torch.optim:Adafactor", (200_000, 100_000), dtype="bfloat16").state_bytes == 2 * 300_000 + 4


def test_a_state_too_large_for_any_memory_is_sized_without_a_real_step() -> None:
    assert probe(f"{HERE}:Huge", (10**6,)).state_bytes == 4 * 10**12


def test_what_lies_on_the_host_is_found_out() -> None:
    adamw = probe("torch.optim:AdamW", (10,))
    assert adamw.placements == {Placement.HOST: 4, Placement.DEVICE: 80}
    assert probe(f"{HERE}:OnHost", (10,)).placements == {Placement.HOST: 40, Placement.DEVICE: 40}
    assert probe(f"{HERE}:OnHost", (2000, 1000)).placements == {Placement.HOST: 8 * 10**6, Placement.DEVICE: 8 * 10**6}


def test_stand_ins_are_small_and_keep_what_block_laws_depend_on() -> None:
    for shape in [
        (28_996, 768),
        (1301, 1411),
        (1025, 1024),
        (2, 700_001),
        (LARGEST + 1030,),
        (64, 4096, 14_336),
        (1024, 1024, 3, 3),
    ]:
        small = stand_ins(shape)
        for one in (*small.corners(), small.third):
            assert all(length <= whole for length, whole in zip(one, shape, strict=True))
            assert math.prod(one) % 256 == math.prod(shape) % 256
            assert 65_536 < math.prod(one) < 6_000_000
        assert len(small.corners()) <= 2 ** len(shape)
        assert small.first != shape


def test_probing_disturbs_no_random_numbers_and_says_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    probe("torch.optim:Rprop", (33, 7))
    assert torch.equal(torch.get_rng_state(), before)
    assert capfd.readouterr() == ("", "")


def test_a_parameter_that_the_class_refuses_is_an_error_before_the_model_is_trained() -> None:
    with pytest.raises(UsageError, match="Muon only supports 2D parameters"):
        probe("torch.optim:Muon", (64,))
    assert probe("torch.optim:Muon", (64, 32)).state_bytes == 4 * 64 * 32
