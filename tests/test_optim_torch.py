"""torch's own optimizers: what their hyperparameters do."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from effcli.errors import UsageError
from effcli.optim.registry import find, resolve_hyper
from effcli.pipeline.resolve import resolve_spec
from effcli.spec import OptimSpec
from tests.commands import TINY_DISTILBERT, csv_file, effcli, model_folder

LR = 1e-3


def one_weight(name: str, spec: OptimSpec, *, decay: float = 0.0) -> tuple[torch.nn.Parameter, torch.optim.Optimizer]:
    """Return a weight of four ones and its optimizer."""
    param = torch.nn.Parameter(torch.ones(4))
    groups = [{"params": [param], "names": ["w"], "hidden": [True], "weight_decay": decay}]
    return param, find(name).build(groups, resolve_hyper(find(name), spec))


def moves(name: str, spec: OptimSpec, gradients: list[float], *, decay: float = 0.0) -> list[float]:
    """Return how far each gradient in turn moves a weight of one."""
    param, optimizer = one_weight(name, spec, decay=decay)
    moved = []
    for gradient in gradients:
        before = param[0].item()
        param.grad = torch.full_like(param, gradient)
        optimizer.step()
        moved.append(before - param[0].item())
    return moved


@pytest.mark.parametrize(
    ("name", "args", "options"),
    [
        ("adam", {"amsgrad": True}, {"amsgrad": True}),
        ("nadam", {"momentum_decay": 0.1}, {"momentum_decay": 0.1, "decoupled_weight_decay": False}),
        ("radam", {"decoupled_weight_decay": True}, {"decoupled_weight_decay": True}),
        ("adamax", {"eps": 1e-6}, {"eps": 1e-6, "betas": (0.9, 0.999)}),
        ("adagrad", {"lr_decay": 0.1, "initial_accumulator_value": 1}, {"lr_decay": 0.1}),
        ("rmsprop", {"alpha": 0.5, "momentum": 0.3, "centered": True}, {"alpha": 0.5, "momentum": 0.3}),
        ("adadelta", {"rho": 0.5, "eps": 1e-3}, {"rho": 0.5, "eps": 1e-3}),
        ("asgd", {"lambd": 0.1, "alpha": 0.5, "t0": 10}, {"lambd": 0.1, "alpha": 0.5, "t0": 10.0}),
        ("rprop", {"etaminus": 0.4, "etaplus": 1.5}, {"etas": (0.4, 1.5), "step_sizes": (1e-6, 50.0)}),
        ("rprop", {"step_size_min": 0, "step_size_max": 1}, {"etas": (0.5, 1.2), "step_sizes": (0.0, 1.0)}),
        ("sgd", {"momentum": 0.5, "nesterov": True}, {"momentum": 0.5, "dampening": 0.0, "nesterov": True}),
    ],
)
def test_a_given_hyperparameter_reaches_the_real_class(
    name: str, args: dict[str, Any], options: Mapping[str, Any]
) -> None:
    _, optimizer = one_weight(name, OptimSpec(name=name, lr=LR, args=args))
    assert {key: optimizer.param_groups[0][key] for key in ("lr", *options)} == {"lr": LR, **options}


def test_first_updates_have_the_size_that_the_help_on_the_learning_rate_says() -> None:
    assert moves("adagrad", OptimSpec(lr=LR), [5.0] * 4) == pytest.approx([LR, LR / 2**0.5, LR / 3**0.5, LR / 2], 1e-3)
    assert moves("rmsprop", OptimSpec(lr=LR), [5.0])[0] == pytest.approx(10 * LR, 1e-3)
    assert moves("rprop", OptimSpec(lr=LR), [5.0, 3.0, -1.0, -1.0]) == pytest.approx([LR, 1.2 * LR, 0, -0.6 * LR], 1e-3)
    assert moves("adadelta", OptimSpec(lr=2.0), [5.0])[0] == pytest.approx(2 * (1e-6 / 0.1) ** 0.5, 1e-3)


def test_averaged_sgd_follows_a_schedule_one_update_late_and_leaves_its_average_beside_the_weights() -> None:
    param, optimizer = one_weight("asgd", OptimSpec(lr=LR, args={"lambd": 0, "t0": 0}))
    values = []
    for lr in (LR, 0.0, LR, LR):
        optimizer.param_groups[0]["lr"] = lr
        param.grad = torch.ones_like(param)
        optimizer.step()
        values.append(param[0].item())
    assert values == pytest.approx([1 - LR, 1 - 2 * LR, 1 - 2 * LR, 1 - 3 * LR], abs=1e-6)
    assert values[2] > optimizer.state[param]["ax"][0].item() > values[3]


def test_adagrad_has_its_state_before_the_first_step_and_without_a_gradient() -> None:
    param, optimizer = one_weight("adagrad", OptimSpec())
    assert set(optimizer.state[param]) == {"step", "sum"}


def test_decay_is_added_to_the_gradient_by_adam_and_shrinks_the_weight_in_adamw() -> None:
    # With gradients far above the decay, Adam's normalisation swallows a decay that is part of the gradient.
    assert moves("adam", OptimSpec(lr=LR), [100.0], decay=0.5)[0] == pytest.approx(LR, 1e-3)
    assert moves("adamw", OptimSpec(lr=LR), [100.0], decay=0.5)[0] == pytest.approx(1.5 * LR, 1e-3)
    plain, decoupled = (
        moves("nadam", OptimSpec(lr=LR, args={"decoupled_weight_decay": value}), [100.0], decay=0.5)
        for value in (False, True)
    )
    assert decoupled[0] - plain[0] == pytest.approx(0.5 * LR, 1e-2)


def test_rprop_has_no_decay_whatever_the_groups_say() -> None:
    assert moves("rprop", OptimSpec(lr=LR), [1.0, 1.0], decay=0.9) == moves("rprop", OptimSpec(lr=LR), [1.0, 1.0])
    with pytest.raises(UsageError, match="'rprop' has no weight decay"):
        resolve_hyper(find("rprop"), OptimSpec(name="rprop", weight_decay=0.1))


def test_a_run_with_rprop_claims_no_decay_and_bears_no_schedule(tmp_path: Path) -> None:
    arguments = (
        "train", "--model", model_folder(tmp_path / "tiny_distilbert", TINY_DISTILBERT),
        "--data", csv_file(tmp_path / "rows.csv"), "--optim", "rprop", "--max-steps", 2, "--json",
    )  # fmt: skip
    record = effcli(*arguments, "--out", tmp_path / "run").record
    assert [group["weight_decay"] for group in record["groups"]] == [0, 0]
    assert [line["lr"] for line in record["history"]] == [5e-5, 5e-5]
    assert record["measured"]["optimizer_state_bytes"] == record["optimizer"]["state_bytes"] == 1_115_824
    refused = effcli(*arguments, "--scheduler", "cosine", "--out", tmp_path / "other")
    assert "'rprop' sets its own learning rate" in refused.error


def test_the_demonstration_gives_rprop_neither_a_warm_up_nor_the_rate_of_adamw() -> None:
    spec = resolve_spec({"optim": {"name": "rprop"}})
    assert (spec.loop.warmup_ratio, spec.optim.lr) == (0.0, None)
    assert resolve_spec({"optim": {"name": "muon"}}).loop.warmup_ratio > 0
