"""Adafactor: factor sizes, learning-rate options that exclude each other, and the rate it really uses."""

from __future__ import annotations

import pytest
import torch

from effcli.errors import UsageError
from effcli.measure.optimizer_size import compute_optimizer_size
from effcli.memory.state import predict_state
from effcli.models.build import parameter_infos
from effcli.optim.learning_rate import OwnRateSchedule, current_lr
from effcli.optim.registry import find, resolve_hyper
from effcli.spec import OptimSpec
from tests.tiny_models import stepped

FIVE = {(64, 32): 384, (32,): 128, (8, 16, 32): 1_536, (1, 32): 132, (4, 3, 3, 3): 288}


def five_shapes() -> torch.nn.Module:
    return torch.nn.ParameterList(torch.nn.Parameter(torch.randn(shape)) for shape in FIVE)


@pytest.mark.parametrize("name", ["adafactor", "adafactor-torch"])
def test_five_shapes_take_the_published_bytes(name: str) -> None:
    model, entry, spec = five_shapes(), find(name), OptimSpec(name=name)
    optimizer = stepped(entry, model, spec)
    predicted = predict_state(entry, parameter_infos(model), resolve_hyper(entry, spec))
    assert list(predicted.by_parameter.values()) == [factors + 4 for factors in FIVE.values()]
    assert predicted.state_bytes == 2_488
    assert compute_optimizer_size(optimizer.state.values())[0] * 2**20 == 2_488


def test_a_first_moment_brings_the_full_size_back() -> None:
    model, entry, spec = five_shapes(), find("adafactor"), OptimSpec(name="adafactor", beta1=0.9)
    optimizer = stepped(entry, model, spec)
    assert predict_state(entry, parameter_infos(model), resolve_hyper(entry, spec)).state_bytes == 27_752
    assert compute_optimizer_size(optimizer.state.values())[0] * 2**20 == 27_752


def test_the_default_is_a_fixed_rate_that_a_given_one_replaces() -> None:
    entry = find("adafactor")
    for spec, lr in ((OptimSpec(), entry.defaults["lr"]), (OptimSpec(lr=1e-3), 1e-3)):
        hyper = resolve_hyper(entry, spec)
        assert entry.schedule(hyper) == "any"
        assert not hyper["scale_parameter"]
        optimizer = stepped(entry, five_shapes(), spec)
        assert current_lr(optimizer) == lr > 0


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (OptimSpec(lr=1e-3, args={"relative_step": True}), "--lr 0.001 and relative_step=true exclude each other"),
        (OptimSpec(args={"lr": "1e-3", "relative_step": "yes"}), "exclude each other"),
        (OptimSpec(args={"warmup_init": True}), "relative_step=true"),
        (OptimSpec(args={"lr": "none"}), "'lr'"),
    ],
)
def test_options_that_contradict_each_other_are_refused_before_anything_is_built(spec: OptimSpec, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        resolve_hyper(find("adafactor"), spec)


def test_relative_steps_scale_by_the_weight_unless_told_otherwise() -> None:
    entry = find("adafactor")
    hyper = resolve_hyper(entry, OptimSpec(args={"relative_step": "true"}))
    assert (hyper["lr"], hyper["scale_parameter"], entry.schedule(hyper)) == (None, True, "own")
    hyper = resolve_hyper(entry, OptimSpec(args={"relative_step": True, "scale_parameter": False}))
    assert hyper["scale_parameter"] is False
    assert all(e.schedule(resolve_hyper(e, OptimSpec())) == "any" for e in (find("adamw"), find("sgd")))


def test_relative_steps_report_the_rate_that_moved_the_weight() -> None:
    model = torch.nn.ParameterDict({"weight": torch.nn.Parameter(torch.full((4, 4), 0.5))})
    entry = find("adafactor")
    hyper = resolve_hyper(entry, OptimSpec(weight_decay=0.0, args={"relative_step": True}))
    optimizer = entry.build([{"params": [model["weight"]], "names": ["weight"], "weight_decay": 0.0}], hyper)
    schedule = OwnRateSchedule(optimizer)
    assert current_lr(optimizer) == pytest.approx(0.01 * 0.5)
    for _ in range(3):
        before = model["weight"][0, 0].item()
        model["weight"].grad = torch.full((4, 4), 3.0)
        optimizer.step()
        moved = before - model["weight"][0, 0].item()
        assert current_lr(optimizer) == pytest.approx(moved, rel=1e-4)
        model["weight"].grad = None
        schedule.step()
        assert schedule.get_last_lr() == [pytest.approx(moved, rel=1e-4)]


def test_a_warm_start_of_relative_steps_has_a_rate_that_is_neither_none_nor_zero() -> None:
    spec = OptimSpec(args={"relative_step": True, "warmup_init": True})
    optimizer = stepped(find("adafactor"), torch.nn.ParameterList([torch.nn.Parameter(torch.zeros(3))]), spec)
    assert 0 < current_lr(optimizer) < 1e-6


def test_the_rate_is_read_through_a_wrapper() -> None:
    class Wrapper:
        def __init__(self, optimizer: torch.optim.Optimizer) -> None:
            self.optimizer = optimizer

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.25)
    assert current_lr(Wrapper(optimizer)) == 0.25
