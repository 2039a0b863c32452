"""Batches in an order that depends on seed and epoch alone, so that every engine sees the same ones."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch.utils.data import DataLoader, Sampler

from effcli.data.order import beginning_with, epoch_order, longest_rows
from effcli.data.workers import leave_stopping_to_the_run

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

    from effcli.data.columns import Objective, Problem

DecoderInputs = Callable[[torch.Tensor], torch.Tensor]
"""Labels (rows, tokens) with -100 on padding -> the ids that the decoder reads, of the same shape."""
Collate = Callable[[Any], dict[str, torch.Tensor]]
"""Rows -> a batch, as a `Collator` makes it."""
IGNORED = -100
"""Label that the loss leaves out; the convention of torch's cross-entropy and of transformers."""
IGNORED_SCORE = math.nan
"""Score that the loss leaves out: no data has it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Which part of each batch a process takes: that of `rank` among `world_size`."""

    rank: int = 0
    world_size: int = 1

    def of(self, rows: torch.Tensor) -> list[int]:
        """Return this process's rows of a batch for all, as evenly as they divide; none where there are too few."""
        first, end = (len(rows) * rank // self.world_size for rank in (self.rank, self.rank + 1))
        return [int(row) for row in rows[first:end]]


WHOLE = Part()
"""All rows, of a run of one process."""


class EpochBatchSampler(Sampler[list[int]]):
    """Batches of row numbers in a new random order each epoch; the last batch may be short.

    Of several processes each takes its part of a batch of `batch_size` rows for each, so that all make as many batches;
    in a last one of fewer rows than processes some have none. The order comes from a generator of its own, so iterating
    leaves the global one alone. `len()` is always the number of batches of a whole epoch, also when some are skipped.
    Epoch and skip are set apart, because accelerate sets the epoch again whenever it starts to iterate. The first epoch
    begins with the rows of `first`, in their order.
    """

    def __init__(
        self, num_rows: int, batch_size: int, seed: int, first: torch.Tensor | None = None, part: Part = WHOLE
    ) -> None:
        self.num_rows = num_rows
        self.batch_size = batch_size
        self.seed = seed
        self.first = first
        self.part = part
        self.epoch = 0
        self.skip = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch (from 0) whose order comes next."""
        self.epoch = epoch

    def skip_next(self, num_rows: int) -> None:
        """Leave the first `num_rows` out of the next iteration, and of that one alone."""
        self.skip = num_rows

    def order(self, epoch: int) -> torch.Tensor:
        """Return the row numbers in the order of an epoch, int64 of shape (num_rows,)."""
        order = epoch_order(self.num_rows, self.seed, epoch)
        return order if self.first is None or epoch else beginning_with(self.first, order)

    def __len__(self) -> int:
        return -(-self.num_rows // self._rows_for_all)

    def __iter__(self) -> Iterator[list[int]]:
        order = self.order(self.epoch)
        skip, self.skip = self.skip, 0
        for start in range(skip, self.num_rows, self._rows_for_all):
            yield self.part.of(order[start : start + self._rows_for_all])

    @property
    def _rows_for_all(self) -> int:
        return self.batch_size * self.part.world_size


class InOrder(EpochBatchSampler):
    """The same without shuffling, for evaluation."""

    def __init__(self, num_rows: int, batch_size: int, part: Part = WHOLE) -> None:
        super().__init__(num_rows, batch_size, seed=0, part=part)

    def order(self, epoch: int) -> torch.Tensor:
        """Return the row numbers as they are."""
        return torch.arange(self.num_rows)


@dataclass(frozen=True, slots=True)
class Collator:
    """Rows to tensors of shape (rows, longest row); `labels` as the loss wants them.

    Classes are int64 and scores float32, of shape (rows,). Of a language model they are the input ids, -100 on
    padding and on each row's first token, which nothing predicts: the others count the predicted tokens. In seq2seq
    they are the ids of the target, -100 on padding, which is always on the right; `decoder_input_ids` of the same shape
    are what `decoder_inputs` makes of them.

    Of no rows `stand_in` makes a batch that teaches nothing, since all its labels are ignored: a process that has none
    still computes, as its exchanges with the others need.
    """

    pad_token_id: int
    padding_side: Literal["left", "right"]
    objective: Objective
    decoder_inputs: DecoderInputs | None = None
    stand_in: Mapping[str, Any] | None = None

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        if not rows:
            assert self.stand_in is not None
            batch = self([self.stand_in])
            return {**batch, "labels": torch.full_like(batch["labels"], ignored_label(batch["labels"]))}
        side = self.padding_side
        batch = {"input_ids": _padded(rows, "input_ids", self.pad_token_id, side)}
        batch["attention_mask"] = _padded(rows, "attention_mask", 0, side)
        if "token_type_ids" in rows[0]:
            batch["token_type_ids"] = _padded(rows, "token_type_ids", 0, side)
        if self.objective == "causal-lm":
            batch["labels"] = next_token_labels(batch["input_ids"], batch["attention_mask"])
        elif self.objective == "seq2seq":
            assert self.decoder_inputs is not None
            batch["labels"] = _padded(rows, "labels", IGNORED, "right")
            # Of a copy: FSMT's code puts the padding id in place of -100 in what it is given (transformers 5.24).
            batch["decoder_input_ids"] = self.decoder_inputs(batch["labels"].clone())
        else:
            dtype = torch.float32 if self.objective == "regression" else torch.int64
            batch["labels"] = torch.tensor([row["labels"] for row in rows], dtype=dtype)
        return batch


def ignored_label(labels: torch.Tensor) -> float:
    """Return what marks a label of this kind as one that the loss leaves out."""
    return IGNORED_SCORE if labels.is_floating_point() else IGNORED


def _padded(rows: Sequence[Mapping[str, Any]], key: str, filler: int, side: Literal["left", "right"]) -> torch.Tensor:
    width = max(len(row[key]) for row in rows)
    padded = torch.full((len(rows), width), filler, dtype=torch.int64)
    for index, row in enumerate(rows):
        values = torch.tensor(row[key], dtype=torch.int64)
        start = width - len(values) if side == "left" else 0
        padded[index, start : start + len(values)] = values
    return padded


def next_token_labels(input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
    """Return `input_ids` with -100 on padding and on each row's first token; both of shape (rows, length).

    The mask says what padding is, never the id: the padding token may be the end-of-text token.
    """
    is_first = attention_mask.cumsum(dim=1) == 1
    return input_ids.masked_fill((attention_mask == 0) | is_first, IGNORED)


class EpochLoader(DataLoader[Any]):
    """Training batches; `set_epoch` chooses the order, `skip_next` where it starts."""

    batch_sampler: EpochBatchSampler

    def set_epoch(self, epoch: int) -> None:
        """See `EpochBatchSampler.set_epoch`."""
        self.batch_sampler.set_epoch(epoch)

    def skip_next(self, num_rows: int) -> None:
        """See `EpochBatchSampler.skip_next`."""
        self.batch_sampler.skip_next(num_rows)


def collator(
    problem: Problem,
    tokenizer: PreTrainedTokenizerBase,
    padding_side: Literal["left", "right"],
    decoder_inputs: DecoderInputs | None = None,
    stand_in: Mapping[str, Any] | None = None,
) -> Collator:
    """Return what makes batches of a problem's rows; `decoder_inputs` are needed in seq2seq, `stand_in` among several
    processes.

    The side is that of the model; the tokenizer's own is for generation.
    """
    return Collator(int(tokenizer.pad_token_id), padding_side, problem.objective, decoder_inputs, stand_in)


def train_loader(
    rows: Dataset,
    collate: Collate,
    *,
    batch_size: int,
    seed: int,
    num_workers: int,
    num_longest_first: int = 0,
    part: Part = WHOLE,
) -> EpochLoader:
    """Return the loader of the training rows; iterating it draws nothing from the global random generator.

    The first epoch begins with the `num_longest_first` longest rows.
    """
    first = longest_rows(rows, num_longest_first) if num_longest_first else None
    sampler = EpochBatchSampler(len(rows), batch_size, seed, first, part)
    return EpochLoader(rows, batch_sampler=sampler, collate_fn=collate, **_worker_options(num_workers, seed))


def eval_loader(
    rows: Dataset, collate: Collator, *, batch_size: int, num_workers: int, part: Part = WHOLE
) -> DataLoader[Any]:
    """Return the loader of the evaluation rows, in the order of the data."""
    sampler = InOrder(len(rows), batch_size, part)
    return DataLoader(rows, batch_sampler=sampler, collate_fn=collate, **_worker_options(num_workers, 0))


def _worker_options(num_workers: int, seed: int) -> dict[str, Any]:
    if num_workers:
        # The tokenizers library warns on every fork after it was used, unless told; workers do not tokenise.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    return {
        "num_workers": num_workers,
        "generator": torch.Generator().manual_seed(seed),
        "worker_init_fn": leave_stopping_to_the_run,
    }
