"""Every registry entry: the state predicted from shapes is the state that the real class allocates, key by key."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from effcli.measure.optimizer_size import inspect_optimizer
from effcli.memory.state import predict_state
from effcli.optim.entry import OptimizerEntry
from effcli.optim.hyper import resolve_hyper
from effcli.optim.overrides import hyper_for
from effcli.optim.registry import entries
from effcli.spec import OptimSpec
from tests.tiny_models import infos, stepped

SHAPES = [(1,), (), (4095,), (4096,), (4097,), (63, 64), (64, 64), (65, 64), (1, 32), (8, 16, 32), (4, 3, 3, 3)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
VARIANTS = [
    ("adamw", OptimSpec(args={"amsgrad": True})),
    ("sgd", OptimSpec(args={"momentum": 0.9})),
    ("sgd-momentum", OptimSpec(args={"nesterov": True})),
    ("adafactor", OptimSpec(beta1=0.9)),
    ("adafactor", OptimSpec(beta1=0.0)),
    ("adafactor", OptimSpec(args={"relative_step": True})),
    ("adam8bit", OptimSpec(min_8bit_size=1)),
    ("adam8bit", OptimSpec(min_8bit_size=100_000)),
    ("adamw8bit", OptimSpec(keep_32bit=("matrix_5", "*_3"))),
]


class AwkwardModel(torch.nn.Module):
    """Parameters of every awkward shape, one of them under two names, one frozen."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        for index, shape in enumerate(SHAPES):
            self.register_parameter(f"matrix_{index}", torch.nn.Parameter(torch.randn(shape).to(dtype)))
        self.tied = self.matrix_6
        self.frozen = torch.nn.Parameter(torch.randn(70, 70).to(dtype), requires_grad=False)


def own_state_bytes(optimizer: torch.optim.Optimizer, param: torch.Tensor) -> dict[str, tuple[int, int]]:
    """Return (elements, bytes) by key for one parameter, in the plainest way; the code tables belong to nobody."""
    return {
        key: (value.numel(), value.numel() * value.element_size()) if isinstance(value, torch.Tensor) else (1, 0)
        for key, value in optimizer.state.get(param, {}).items()
        if not key.startswith("qmap")
    }


def check(entry: OptimizerEntry, spec: OptimSpec, model: torch.nn.Module) -> None:
    hyper = resolve_hyper(entry, spec)
    optimizer = stepped(entry, model, spec)
    for _ in range(2):  # a later update allocates nothing more
        predicted, measured = predict_state(entry, infos(model), hyper), inspect_optimizer(optimizer)
        assert predicted.tensors == measured.tensors
        assert predicted.state_bytes == measured.state_bytes
        assert predicted.state_elements == measured.state_elements
        assert {name: b for name, b in predicted.by_parameter.items() if b} == {
            name: b for name, b in measured.by_parameter.items() if b
        }
        assert predicted.shared_bytes == measured.shared_bytes
        assert sum(predicted.by_parameter.values()) + predicted.shared_bytes == predicted.state_bytes
        assert sum(predicted.placements.values()) == predicted.state_bytes
        optimizer.step()
    for info, param in zip(infos(model), model.parameters(), strict=True):
        layout = entry.state_layout(info, hyper_for(info.name, hyper)) if info.trainable else ()
        own = own_state_bytes(optimizer, param)
        assert {t.key: t.num_bytes for t in layout if not t.shared} == {key: size for key, (_, size) in own.items()}
        assert all(t.num_elements in (0, own[t.key][0]) for t in layout if not t.shared)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("entry", entries(), ids=lambda entry: entry.name)
def test_predicted_state_is_the_measured_state_for_every_awkward_shape(
    entry: OptimizerEntry, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    check(entry, OptimSpec(name=entry.name), AwkwardModel(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("name", "spec"), VARIANTS, ids=lambda value: value if isinstance(value, str) else "")
def test_predicted_state_is_the_measured_state_for_every_option_that_changes_it(
    name: str, spec: OptimSpec, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    entry = next(entry for entry in entries() if entry.name == name)
    check(entry, spec, AwkwardModel(dtype))


@settings(max_examples=10, deadline=None, derandomize=True)
@given(
    shape=st.lists(st.integers(1, 70), max_size=3).filter(lambda sides: math.prod(sides) <= 40_000),
    dtype=st.sampled_from(DTYPES),
)
def test_predicted_state_is_the_measured_state_for_any_shape(shape: list[int], dtype: torch.dtype) -> None:
    for entry in entries():
        model = torch.nn.Module()
        model.weight = torch.nn.Parameter(torch.ones(shape, dtype=dtype))
        check(entry, OptimSpec(name=entry.name), model)


@pytest.mark.parametrize("entry", entries(), ids=lambda entry: entry.name)
def test_a_step_moves_the_weights_and_a_frozen_one_stays(entry: OptimizerEntry) -> None:
    torch.manual_seed(0)
    model = AwkwardModel(torch.float32)
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    stepped(entry, model, OptimSpec(name=entry.name))
    for name, param in model.named_parameters():
        assert torch.equal(param, before[name]) is (name == "frozen"), name


@pytest.mark.parametrize("entry", entries(), ids=lambda entry: entry.name)
def test_state_round_trips_through_a_state_dict_at_the_same_size(entry: OptimizerEntry) -> None:
    torch.manual_seed(0)
    model = AwkwardModel(torch.float32)
    spec = OptimSpec(name=entry.name)
    optimizer, fresh = stepped(entry, model, spec), stepped(entry, model, spec)
    fresh.load_state_dict(optimizer.state_dict())
    assert inspect_optimizer(fresh).tensors == inspect_optimizer(optimizer).tensors
