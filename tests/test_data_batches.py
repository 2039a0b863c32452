"""Batches: every row once an epoch, the same order everywhere, right labels, and no draw from the global generator."""

from __future__ import annotations

import math
import random
from typing import Any, Literal

import numpy as np
import pytest
import torch
from datasets import Dataset

from effcli.data.batches import Collator, EpochBatchSampler, EpochLoader, eval_loader, train_loader

COLLATE = Collator(0, "right", "causal-lm")


def row(*ids: int, **more: Any) -> dict[str, Any]:
    return {"input_ids": list(ids), "attention_mask": [1] * len(ids), **more}


def numbered_rows(num_rows: int) -> Dataset:
    return Dataset.from_list([row(index, index) for index in range(num_rows)])


def training(num_rows: int = 10, *, num_workers: int = 0) -> EpochLoader:
    return train_loader(numbered_rows(num_rows), COLLATE, batch_size=3, seed=1, num_workers=num_workers)


def order_of(loader: Any) -> list[list[int]]:
    return [batch["input_ids"][:, 0].tolist() for batch in loader]


@pytest.mark.parametrize("num_rows", [1, 2, 3, 7, 100])
@pytest.mark.parametrize("batch_size", [1, 3, 8])
def test_each_epoch_holds_every_row_once(num_rows: int, batch_size: int) -> None:
    sampler = EpochBatchSampler(num_rows, batch_size, 5)
    batches = list(sampler)
    assert sorted(index for batch in batches for index in batch) == list(range(num_rows))
    assert len(batches) == len(sampler) == math.ceil(num_rows / batch_size)
    assert all(len(batch) == batch_size for batch in batches[:-1])


def test_the_order_depends_on_seed_and_epoch_alone() -> None:
    first, again = EpochBatchSampler(50, 4, 7), EpochBatchSampler(50, 4, 7)
    torch.manual_seed(99)
    assert list(first) == list(again) == list(first)
    again.set_epoch(1)
    assert list(first) != list(again)
    assert list(first) != list(EpochBatchSampler(50, 4, 8))
    first.set_epoch(1)
    assert list(first) == list(again)


def test_seed_and_epoch_are_not_interchangeable_and_large_seeds_differ() -> None:
    orders = set()
    for seed in (0, 1, 2, 2**32 - 1):
        for epoch in (0, 1, 2):
            sampler = EpochBatchSampler(30, 30, seed)
            sampler.set_epoch(epoch)
            orders.add(tuple(next(iter(sampler))))
    assert len(orders) == 12


@pytest.mark.parametrize("skip", [0, 1, 3, 4])
def test_skipping_gives_the_rest_of_the_same_order(skip: int) -> None:
    sampler = EpochBatchSampler(10, 3, 7)
    sampler.set_epoch(2)
    whole = list(sampler)
    sampler.skip_next(skip * 3)
    sampler.set_epoch(2)  # accelerate sets it once more before it iterates
    assert list(sampler) == whole[skip:]
    assert len(sampler) == 4
    assert list(sampler) == whole


def test_the_loader_follows_the_epoch_and_counts_whole_epochs() -> None:
    loader = training()
    whole = order_of(loader)
    assert sorted(index for batch in whole for index in batch) == list(range(10))
    loader.set_epoch(1)
    assert order_of(loader) != whole
    loader.set_epoch(0)
    loader.skip_next(2 * loader.batch_sampler.batch_size)
    assert order_of(loader) == whole[2:]
    assert len(loader) == 4


def test_workers_do_not_change_the_order() -> None:
    assert order_of(training(num_workers=1)) == order_of(training())


def test_evaluation_keeps_the_order_of_the_data() -> None:
    loader = eval_loader(numbered_rows(7), COLLATE, batch_size=3, num_workers=0)
    assert order_of(loader) == [[0, 1, 2], [3, 4, 5], [6]]


def test_iterating_leaves_the_global_generators_alone() -> None:
    before = (torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate())
    order_of(training())
    order_of(eval_loader(numbered_rows(7), COLLATE, batch_size=3, num_workers=0))
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1:] == (np.random.get_state()[1].tolist(), random.getstate())


@pytest.mark.parametrize(
    ("side", "ids", "mask"),
    [
        ("right", [[5, 6, 7], [8, 0, 0]], [[1, 1, 1], [1, 0, 0]]),
        ("left", [[5, 6, 7], [0, 0, 8]], [[1, 1, 1], [0, 0, 1]]),
    ],
)
def test_rows_are_padded_to_the_longest_of_the_batch(
    side: Literal["left", "right"], ids: list[list[int]], mask: list[list[int]]
) -> None:
    rows = [row(5, 6, 7, labels=1, token_type_ids=[0, 1, 1]), row(8, labels=0, token_type_ids=[0])]
    batch = Collator(0, side, "classification")(rows)
    assert batch["input_ids"].tolist() == ids
    assert batch["attention_mask"].tolist() == mask
    assert batch["token_type_ids"].shape == (2, 3)
    assert (batch["labels"].tolist(), batch["labels"].dtype) == ([1, 0], torch.int64)
    assert all(batch[name].dtype == torch.int64 for name in batch)


def test_scores_are_float32() -> None:
    labels = Collator(0, "right", "regression")([row(1, labels=0.5), row(2, labels=2.0)])["labels"]
    assert (labels.tolist(), labels.dtype) == ([0.5, 2.0], torch.float32)


@pytest.mark.parametrize(
    ("side", "labels"),
    [
        ("right", [[-100, 9, 6, 9], [-100, 9, -100, -100]]),
        ("left", [[-100, 9, 6, 9], [-100, -100, -100, 9]]),
    ],
)
def test_predicted_tokens_are_all_but_the_first_also_where_padding_is_the_end_token(
    side: Literal["left", "right"], labels: list[list[int]]
) -> None:
    batch = Collator(9, side, "causal-lm")([row(9, 9, 6, 9), row(5, 9)])
    assert batch["labels"].tolist() == labels


def test_labels_count_the_tokens_that_the_loss_of_transformers_averages() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(vocab_size=12, n_embd=8, n_layer=1, n_head=1, n_positions=8, bos_token_id=9, eos_token_id=9)
    model = GPT2LMHeadModel(config).eval()
    rows = [row(1, 2, 3, 4, 5), row(6, 7)]
    batch = Collator(9, "right", "causal-lm")(rows)
    with torch.no_grad():
        loss = model(**batch).loss
        logits = [model(torch.tensor([each["input_ids"]])).logits.log_softmax(-1)[0] for each in rows]
    nll = [-logits[i][t - 1, r["input_ids"][t]] for i, r in enumerate(rows) for t in range(1, len(r["input_ids"]))]
    assert int((batch["labels"] != -100).sum()) == len(nll) == 5
    torch.testing.assert_close(loss, torch.stack(nll).mean())
