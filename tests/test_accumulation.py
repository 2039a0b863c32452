"""The accumulation contract: a window of micro-batches is one big batch, whatever the head, the engine, the sizes.

The big batch is made here, by the model's own loss, plain autograd, and torch's own clipping and optimizers.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence

from effcli.data.batches import EpochBatchSampler
from effcli.errors import TrainingFailedError
from tests.heads import HEADS, PAD, rows, tiny_model
from tests.jobs import ENGINES, Outcome, run_job

NUM_ROWS = 11
SIZES = ((2, 4), (3, 2), (1, 5), (4, 2))
"""Batch and accumulation: last windows of 2 + 1, 3 + 2, 1 and 3 rows."""
CLIPS = (0.05, 0.0)
"""A norm that every update exceeds, and no clipping."""
EPOCHS = 2
SGD_RATE, ADAM_RATE = 0.1, 1e-3


def whole_batch(task: str, made: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Return rows as the model's own code reads them: its loss shifts the labels, or makes the decoder's inputs."""

    def padded(key: str, filler: int) -> torch.Tensor:
        return pad_sequence([torch.tensor(row[key]) for row in made], batch_first=True, padding_value=filler)

    batch = {"input_ids": padded("input_ids", PAD), "attention_mask": padded("attention_mask", 0)}
    if task in ("classification", "regression"):
        return {**batch, "labels": torch.tensor([row["labels"] for row in made])}
    return {**batch, "labels": padded("input_ids" if task == "causal-lm" else "labels", -100)}


def windows_in_order(num_rows: int, size: int, epochs: int) -> Iterator[list[int]]:
    sampler = EpochBatchSampler(num_rows, size, 42)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        yield from sampler


def big_batches(
    task: str, family: str, window: int, *, max_grad_norm: float, adaptive: bool = False
) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """Return losses, gradient norms and final weights of a hand-written loop over whole windows."""
    model, made = tiny_model(task, family=family), rows(NUM_ROWS, task)
    model.train()
    parameters = list(model.parameters())
    kind, rate = (torch.optim.AdamW, ADAM_RATE) if adaptive else (torch.optim.SGD, SGD_RATE)
    optimizer = kind(parameters, lr=rate, weight_decay=0.0)
    order = list(windows_in_order(NUM_ROWS, window, EPOCHS))
    losses, norms = [], []
    for number, indices in enumerate(order):
        optimizer.param_groups[0]["lr"] = rate * (1 - number / len(order))
        loss = model(**whole_batch(task, [made[index] for index in indices])).loss
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(parameters, max_grad_norm or math.inf).item())
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms, model.state_dict()


def small_batches(
    engine: str, task: str, family: str, size: tuple[int, int], *, max_grad_norm: float, adaptive: bool = False
) -> Outcome:
    def make_optimizer(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        parameters = [parameter for group in groups for parameter in group["params"]]
        if adaptive:
            return torch.optim.AdamW(parameters, lr=ADAM_RATE, weight_decay=0.0)
        return torch.optim.SGD(parameters, lr=SGD_RATE)

    batch_size, accum = size
    return run_job(
        engine, task, family=family, num_rows=NUM_ROWS, batch_size=batch_size, accum=accum, epochs=EPOCHS,
        max_grad_norm=max_grad_norm, make_optimizer=make_optimizer,
    )  # fmt: skip


def check(engine: str, head: tuple[str, str], size: tuple[int, int], max_grad_norm: float) -> None:
    losses, norms, weights = big_batches(*head, size[0] * size[1], max_grad_norm=max_grad_norm)
    outcome = small_batches(engine, *head, size, max_grad_norm=max_grad_norm)
    assert outcome.losses == pytest.approx(losses, rel=1e-6)
    assert outcome.grad_norms == pytest.approx(norms, rel=1e-6)
    assert largest_difference(outcome, weights) < 1e-6
    assert min(norms) > max_grad_norm, "the clipping must be felt in every update"


def largest_difference(outcome: Outcome, weights: dict[str, torch.Tensor]) -> float:
    assert outcome.weights.keys() == weights.keys()
    return max((outcome.weights[name] - weights[name]).abs().max().item() for name in weights)


# Every head in the bare loop and in one of the other engines, in turn; sizes and clipping go round as well.
SOME = [
    (engine, head, SIZES[(number + 2 * place) % len(SIZES)], CLIPS[(number + place) % len(CLIPS)])
    for number, head in enumerate(HEADS)
    for place, engine in enumerate(ENGINES)
    if place == 0 or (number + place) % 2
]
ALL = [(engine, head, size, clip) for head in HEADS for engine in ENGINES for size in SIZES for clip in CLIPS]


@pytest.mark.parametrize(("engine", "head", "size", "clip"), SOME)
def test_a_window_is_one_big_batch(engine: str, head: tuple[str, str], size: tuple[int, int], clip: float) -> None:
    check(engine, head, size, clip)


@pytest.mark.slow
@pytest.mark.parametrize(("engine", "head", "size", "clip"), [case for case in ALL if case not in SOME])
def test_a_window_is_one_big_batch_over_the_whole_grid(
    engine: str, head: tuple[str, str], size: tuple[int, int], clip: float
) -> None:
    check(engine, head, size, clip)


@pytest.mark.parametrize(
    ("engine", "head"),
    [
        pytest.param(engine, head, marks=() if engine == "pytorch" and number % 2 else pytest.mark.slow)
        for number, head in enumerate(HEADS)
        for engine in ENGINES
    ],
)
def test_adaptive_steps_stay_within_a_hundredth_of_their_length(engine: str, head: tuple[str, str]) -> None:
    losses, norms, weights = big_batches(*head, 8, max_grad_norm=1.0, adaptive=True)
    outcome = small_batches(engine, *head, (2, 4), max_grad_norm=1.0, adaptive=True)
    assert outcome.losses == pytest.approx(losses, rel=1e-5)
    assert outcome.grad_norms == pytest.approx(norms, rel=1e-4)
    assert largest_difference(outcome, weights) <= 0.01 * ADAM_RATE * len(losses)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("task", ["classification", "seq2seq"])
def test_a_micro_batch_without_a_label_adds_nothing(task: str, engine: str) -> None:
    made = rows(4, task)
    for row in made[:2]:
        row["labels"] = -100 if task == "classification" else [-100, -100]
    oracle = tiny_model(task)
    loss = oracle(**whole_batch(task, made)).loss
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(oracle.parameters(), math.inf).item()
    outcome = run_job(engine, task, num_rows=4, batch_size=1, accum=4, made_rows=made, max_grad_norm=0.0)
    assert outcome.losses == pytest.approx([loss.item()], rel=1e-6)
    assert outcome.grad_norms == pytest.approx([norm], rel=1e-6)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_window_without_a_label_stops_the_run_before_its_step(engine: str) -> None:
    model, made = tiny_model("classification"), rows(4, "classification")
    before = copy.deepcopy(model.state_dict())
    for row in made:
        row["labels"] = -100
    with pytest.raises(TrainingFailedError, match="nothing to learn from in a window of 2 micro-batches"):
        run_job(engine, "classification", num_rows=4, batch_size=2, accum=2, made_rows=made, model=model)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("engine", ENGINES)
def test_a_score_that_looks_like_the_mark_of_ignored_labels_counts(engine: str) -> None:
    made = rows(4, "regression")
    made[1]["labels"] = -100.0
    loss = tiny_model("regression")(**whole_batch("regression", made)).loss.item()
    outcome = run_job(engine, "regression", num_rows=4, batch_size=1, accum=4, made_rows=made)
    assert outcome.losses == pytest.approx([loss], rel=1e-6)
