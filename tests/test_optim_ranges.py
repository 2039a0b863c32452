"""Ranges of hyperparameters: what upstream refuses, or what makes no sense, is refused before anything is built."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from effcli.errors import UsageError
from effcli.optim.entry import OptimizerEntry
from effcli.optim.registry import default_hyper, entries, find, resolve_hyper
from effcli.spec import OptimSpec

REFUSED_UPSTREAM = [
    ("adam", "beta1", 1.0, "at least 0 and below 1"),
    ("nadam", "momentum_decay", -1, "at least 0"),
    ("rmsprop", "alpha", -1, "at least 0 and below 1"),
    ("rmsprop", "momentum", -0.1, "at least 0 and below 1"),
    ("adadelta", "rho", 1.5, "between 0 and 1"),
    ("adagrad", "lr_decay", -1, "at least 0"),
    ("adagrad", "initial_accumulator_value", -1, "at least 0"),
    ("adafactor-torch", "d", 0.5, "at least 1"),
    ("adafactor-torch", "beta2_decay", 0.1, "at most 0"),
    ("adafactor-torch", "eps2", -1, "at least 0"),
    ("rprop", "etaminus", 1, "above 0 and below 1"),
    ("rprop", "etaplus", 1, "above 1"),
    ("came", "beta3", 1.5, "at least 0 and below 1"),
    ("ademamix8bit", "beta3", 1, "at least 0 and below 1"),
]
"""Entry, hyperparameter, value that upstream's constructor refuses, what ours says is allowed."""
SENSELESS = [
    ("rmsprop", "alpha", 1, "at least 0 and below 1"),
    ("sgd", "dampening", 2, "between 0 and 1"),
    ("asgd", "lambd", -1, "at least 0"),
    ("asgd", "alpha", -1, "at least 0"),
    ("asgd", "t0", -1, "at least 0"),
    ("rprop", "step_size_max", 0, "above 0"),
    ("muon", "adjust_lr_fn", "adamw", "match_rms_adamw or original"),
    ("muon", "ns_steps", 100, "between 1 and 99"),
    ("adafactor", "clip_threshold", 0, "above 0"),
    ("adafactor", "decay_rate", 0.8, "at most 0"),
    ("galore-adamw", "rank", 0, "at least 1"),
    ("galore-adamw", "update_proj_gap", 0, "at least 1"),
    ("galore-adamw", "scale", 0, "above 0"),
    ("galore-adamw", "proj_type", "up", "std or reverse_std or left or right or full"),
    ("adamw8bit-ao", "block_size", 0, "at least 1"),
    ("adamw4bit", "block_size", 3, "a multiple of 2"),
    ("adamw4bit", "block_size", -2, "a multiple of 2"),
    ("schedulefree-adamw", "beta1", 0.0, "above 0 and below 1"),
    ("schedulefree-sgd", "momentum", 0.0, "above 0 and below 1"),
    ("schedulefree-sgd", "warmup_steps", -1, "at least 0"),
    ("prodigy", "d0", 0, "above 0"),
    ("prodigy", "d_coef", 0, "above 0"),
    ("came", "clip_threshold", 0, "above 0"),
]


@pytest.mark.parametrize(("name", "argument", "value", "allowed"), [*REFUSED_UPSTREAM, *SENSELESS])
def test_a_value_out_of_range_is_refused_in_one_line(name: str, argument: str, value: Any, allowed: str) -> None:
    with pytest.raises(UsageError) as error:
        resolve_hyper(find(name), OptimSpec(name=name, args={argument: value}))
    assert str(error.value).startswith(f"optimizer argument '{argument}' of '{name}' must be {allowed}")
    assert str(error.value).endswith(f", got {value}")


@pytest.mark.parametrize(("name", "argument", "value", "allowed"), REFUSED_UPSTREAM)
def test_upstream_refuses_it_later(name: str, argument: str, value: Any, allowed: str) -> None:
    group = {"params": [torch.nn.Parameter(torch.ones(64, 64))], "weight_decay": 0.0}
    with pytest.raises(ValueError, match=r"(?i)invalid|must be|should be|range"):
        find(name).build([group], {**default_hyper(find(name)), argument: value})


@pytest.mark.parametrize("entry", entries(), ids=lambda entry: entry.name)
def test_a_range_is_for_a_hyperparameter_of_the_entry_and_holds_its_default(entry: OptimizerEntry) -> None:
    assert set(entry.ranges) <= set(entry.defaults)
    for name, allowed in entry.ranges.items():
        assert entry.defaults[name] is None or allowed.accepts(entry.defaults[name]), name


def test_step_sizes_of_rprop_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(UsageError, match="step_size_min at most step_size_max"):
        resolve_hyper(find("rprop"), OptimSpec(args={"step_size_min": 2, "step_size_max": 1}))
