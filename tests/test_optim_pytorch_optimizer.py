"""Optimizers of pytorch_optimizer: the updates of the upstream class, its state, and runs that stop and go on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import pytorch_optimizer
import torch

from effcli.optim.hyper import resolve_hyper
from effcli.optim.registry import find
from effcli.spec import OptimSpec
from tests.stopped_runs import check_that_a_stop_changes_nothing
from tests.tiny_models import measured, tiny_distilbert

pytestmark = pytest.mark.usefixtures("without_plan")

SHAPES = ((40, 24), (24,), (), (3, 5, 7))
# Name, arguments of ours, class and arguments of upstream.
SAME: list[tuple[str, dict[str, Any], str, dict[str, Any]]] = [
    ("lion", {"beta1": 0.8, "beta2": 0.9}, "Lion", {"betas": (0.8, 0.9)}),
    (
        "stable-adamw",
        {"beta1": 0.8, "beta2": 0.9, "eps": 1e-3, "kahan_sum": False},
        "StableAdamW",
        {"betas": (0.8, 0.9), "eps": 1e-3, "kahan_sum": False},
    ),
    (
        "came",
        {"beta1": 0.8, "beta2": 0.9, "beta3": 0.95, "eps": 1e-10, "eps2": 1e-8, "clip_threshold": 0.5},
        "CAME",
        {"betas": (0.8, 0.9, 0.95), "eps1": 1e-10, "eps2": 1e-8, "clip_threshold": 0.5},
    ),
    (
        "adan",
        {"beta1": 0.8, "beta2": 0.9, "beta3": 0.95, "eps": 1e-3},
        "Adan",
        {"betas": (0.8, 0.9, 0.95), "eps": 1e-3},
    ),
    ("adabelief", {"beta1": 0.8, "beta2": 0.9, "eps": 1e-8}, "AdaBelief", {"betas": (0.8, 0.9), "eps": 1e-8}),
    (
        "prodigy",
        {"beta1": 0.8, "beta2": 0.9, "eps": 1e-3, "d0": 1e-4, "d_coef": 0.5, "bias_correction": True,
         "safeguard_warmup": True},
        "Prodigy",
        {"betas": (0.8, 0.9), "eps": 1e-3, "d0": 1e-4, "d_coef": 0.5, "bias_correction": True,
         "safeguard_warmup": True},
    ),
]  # fmt: skip


def parameters(dtype: torch.dtype) -> list[torch.nn.Parameter]:
    torch.manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape).to(dtype)) for shape in SHAPES]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("name", "ours", "class_name", "theirs"), SAME, ids=[row[0] for row in SAME])
def test_updates_are_those_of_upstream_with_the_same_hyperparameters(
    name: str, ours: dict[str, Any], class_name: str, theirs: dict[str, Any], dtype: torch.dtype
) -> None:
    mine, other = parameters(dtype), parameters(dtype)
    hyper = resolve_hyper(find(name), OptimSpec(name=name, args={"lr": 0.01, **ours}))
    optimizer = find(name).build([{"params": mine, "weight_decay": 0.1}], hyper)
    upstream = getattr(pytorch_optimizer, class_name)(other, lr=0.01, weight_decay=0.1, **theirs)
    for _ in range(4):
        for one, another in zip(mine, other, strict=True):
            one.grad = torch.randn_like(one)
            another.grad = one.grad.clone()
        optimizer.step()
        upstream.step()
    for one, another, first in zip(mine, other, parameters(dtype), strict=True):
        assert torch.equal(one, another)
        assert not torch.equal(one, first) or dtype is torch.bfloat16
        assert one.isfinite().all()


@pytest.mark.parametrize(
    ("name", "state_bytes"),
    # 139,458 parameters in 40 tensors, 16 of them matrices with 3,178 rows and columns together.
    [("lion", 557_832), ("stable-adamw", 1_115_664), ("adan", 2_231_328), ("prodigy", 2_231_328), ("came", 589_824)],
)
def test_tiny_distilbert_takes_what_the_upstream_class_was_found_to_allocate(name: str, state_bytes: int) -> None:
    assert measured(find(name), tiny_distilbert(), OptimSpec(name=name)).state_bytes == state_bytes


@pytest.mark.parametrize(
    ("engine", "optim", "precision"),
    [("pytorch", "stable-adamw", "bf16-pure"), ("accelerate", "came", "fp32"), ("trainer", "prodigy", "fp32")],
)
def test_a_resumed_run_ends_as_the_uninterrupted_one(engine: str, optim: str, precision: str, tmp_path: Path) -> None:
    check_that_a_stop_changes_nothing(tmp_path, {"name": optim}, engine=engine, precision=precision)
