"""Evaluation: the mean over items, whatever the batches, and what training reports for the same rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from effcli.data.batches import EpochBatchSampler
from effcli.engines.base import EvalResult
from effcli.engines.evaluate import evaluate
from effcli.engines.window import WindowLoss
from tests.heads import HEADS, rows, tiny_model
from tests.jobs import ENGINES, collator, run_job


def evaluated(task: str, model: torch.nn.Module, made: list[dict[str, Any]], batch_size: int) -> EvalResult:
    loader = DataLoader(made, batch_size=batch_size, collate_fn=collator(task, model))
    return evaluate(model, loader, WindowLoss(task), device=torch.device("cpu"), precision="fp32")


def items_in(task: str, row: dict[str, Any]) -> int:
    """Return what counts of a row: its tokens but the first, those of its target, or the row itself."""
    if task == "causal-lm":
        return len(row["input_ids"]) - 1
    return len(row["labels"]) if task == "seq2seq" else 1


def mean_over_items(task: str, model: torch.nn.Module, made: list[dict[str, Any]]) -> float:
    """Return the mean loss per item, each row scored alone and unpadded by the model's own loss."""
    total = 0.0
    model.eval()
    for row in made:
        batch = {key: torch.tensor([value]) for key, value in row.items()}
        labels = batch.setdefault("labels", batch["input_ids"])
        with torch.no_grad():
            total += model(**batch | {"labels": labels}).loss.item() * items_in(task, row)
    return total / sum(items_in(task, row) for row in made)


@pytest.mark.parametrize("batch_size", [1, 4])
@pytest.mark.parametrize("head", HEADS)
def test_the_evaluation_loss_is_the_mean_over_items_whatever_the_batch_size(
    head: tuple[str, str], batch_size: int
) -> None:
    task, family = head
    model, made = tiny_model(task, family=family), rows(11, task)
    assert evaluated(task, model, made, batch_size).loss == pytest.approx(mean_over_items(task, model, made), rel=1e-6)


@pytest.mark.parametrize("head", HEADS)
def test_averaging_batch_means_would_be_noticed(head: tuple[str, str]) -> None:
    task, family = head
    model, made = tiny_model(task, family=family), rows(11, task)
    parts = [mean_over_items(task, model, made[start : start + 3]) for start in range(0, 11, 3)]
    assert abs(sum(parts) / len(parts) / mean_over_items(task, model, made) - 1) > 1e-4


# The rule is one for all engines: each task meets every accumulation, and every engine, but not all pairs of them.
AT_RATE_ZERO = [
    pytest.param(task, engine, accum, marks=() if (number + place + step) % 3 == 0 else pytest.mark.slow)
    for number, task in enumerate(["classification", "regression", "causal-lm", "seq2seq"])
    for place, engine in enumerate(ENGINES)
    for step, accum in enumerate([1, 2, 4])
]


@pytest.mark.parametrize(("task", "engine", "accum"), AT_RATE_ZERO)
def test_the_training_loss_at_rate_zero_is_the_evaluation_loss(task: str, engine: str, accum: int) -> None:
    made = rows(8, task)
    outcome = run_job(
        engine, task, num_rows=8, batch_size=2, accum=accum, made_rows=made,
        make_optimizer=lambda groups: torch.optim.SGD(groups, lr=0.0),
    )  # fmt: skip
    windows = EpochBatchSampler(8, 2 * accum, 42)
    items = [sum(items_in(task, made[index]) for index in window) for window in windows]
    training = sum(loss * count for loss, count in zip(outcome.losses, items, strict=True)) / sum(items)
    assert training == pytest.approx(evaluated(task, outcome.model, made, 3).loss, rel=1e-6)


@pytest.mark.parametrize("task", ["causal-lm", "seq2seq"])
def test_perplexity_is_that_of_the_mean_over_tokens(task: str) -> None:
    model, made = tiny_model(task), rows(5, task)
    mean = torch.tensor(mean_over_items(task, model, made), dtype=torch.float64)
    assert evaluated(task, model, made, 2).perplexity == pytest.approx(mean.exp().item(), rel=1e-5)


def test_evaluation_leaves_the_model_in_its_mode() -> None:
    model = tiny_model("seq2seq", dropout=0.5)
    for mode in (True, False):
        model.train(mode)
        first, second = (evaluated("seq2seq", model, rows(3, "seq2seq"), 2).loss for _ in range(2))
        assert first == second
        assert model.training is mode
