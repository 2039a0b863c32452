"""Which update of a run is profiled: worked out from the order of the rows before training. Imports numpy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch

    from effcli.data.batches import EpochBatchSampler
    from effcli.engines.window_schedule import WindowSchedule

_NUM_EPOCHS = 20
"""How many epochs are searched: the longest row is in each of them."""
_COLD_STEPS = 5
"""RAdam corrects its steps from the sixth on (torch 2.13), which takes memory that the first ones do not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """A micro-batch of a run: its rows, the tokens of its longest one and of its longest target, and whether rows are
    filled up."""

    rows: int
    tokens: int
    target_tokens: int | None
    padded: bool

    @property
    def size(self) -> int:
        """Return the tokens of rows and targets, padding included."""
        return self.rows * (self.tokens + (self.target_tokens or 0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """The micro-batches of update number `update`; `following` is the one after them, None where the epoch ends.

    `example` are the numbers of the rows of the one that it was chosen for. Of several processes these are the batches
    of this one; where it has no rows, the batch is its stand-in, one row that teaches nothing.
    """

    update: int
    batches: tuple[MicroBatch, ...]
    following: MicroBatch | None
    example: tuple[int, ...]

    @property
    def largest_later(self) -> MicroBatch:
        """Return the largest micro-batch after the first, during which gradients live; without any, the first."""
        return max(self.batches[1:] or self.batches, key=lambda batch: batch.size)


def choose_window(
    sampler: EpochBatchSampler,
    lengths: Sequence[np.ndarray[Any, Any]],
    schedule: WindowSchedule,
    *,
    start_update: int,
    total_updates: int,
    num_cold: int = 1,
) -> Window | None:
    """Return the update with the largest micro-batch, of those after the first `num_cold` that this process makes.

    Of equally large ones, a micro-batch with others before it in its window comes first, since gradients live then;
    after that one past the first steps of the run, and then the earliest. `lengths` are the tokens of each row, in
    seq2seq those of its target too. None where there is no other update. At most the first epochs of many are
    searched.

    Of several processes a micro-batch is as large as the largest part of it, so that all choose the same update.
    """
    best: tuple[int, _Epoch, int] | None = None
    first = start_update + num_cold
    for epoch in _epochs(sampler, lengths, schedule, start_update, total_updates=total_updates, first=first):
        if not len(preferences := epoch.preferences()):
            continue
        place = int(preferences.argmax())
        if best is None or preferences[place] > best[0]:
            best = (int(preferences[place]), epoch, place + epoch.first_place)
        if best[0] >= _most(lengths, schedule):
            break
    return None if best is None else best[1].window(best[2])


def batch_bytes(batches: Sequence[MicroBatch], example: Mapping[str, torch.Tensor]) -> int:
    """Return the bytes of the tensors of micro-batches, which are named and typed as those of an example.

    Each is of shape (rows,), (rows, tokens), or in seq2seq (rows, tokens of the target): those of the loss's labels and
    what the decoder reads.
    """
    total = 0
    for name, tensor in example.items():
        for batch in batches:
            length = batch.target_tokens if name in ("labels", "decoder_input_ids") else None
            width = 1 if tensor.dim() == 1 else length or batch.tokens
            total += batch.rows * width * tensor.element_size()
    return total


@dataclass(frozen=True, slots=True, kw_only=True)
class _Epoch:
    """The micro-batches of an epoch that are left: the rows, and arrays with one number for each micro-batch.

    `first_update` is the number of the first of its updates; micro-batches before `first_place` are not to be chosen.
    Arrays other than `largest`, the size of the largest part of any process, are of this process alone.
    """

    order: np.ndarray[Any, Any]
    begins: np.ndarray[Any, Any]
    ends: np.ndarray[Any, Any]
    first_update: int
    first_place: int
    accum: int
    rows: np.ndarray[Any, Any]
    longest: tuple[np.ndarray[Any, Any], ...]
    shortest: np.ndarray[Any, Any]
    largest: np.ndarray[Any, Any]
    num_batches: int

    def preferences(self) -> np.ndarray[Any, Any]:
        """Return how much each is preferred: four times its size, 2 for gradients that live, 1 for a late step."""
        places = np.arange(len(self.rows))
        is_late = self.first_update + places // self.accum > _COLD_STEPS
        preferences: np.ndarray[Any, Any] = 4 * self.largest + 2 * (places % self.accum > 0) + is_late
        return preferences[self.first_place : self.num_batches]

    def window(self, place: int) -> Window:
        """Return the window with the micro-batch at a place."""
        number = place // self.accum
        begin, end = number * self.accum, min((number + 1) * self.accum, len(self.rows))
        return Window(
            update=self.first_update + number,
            batches=tuple(self._batch(index) for index in range(begin, end)),
            following=self._batch(end) if end < len(self.rows) else None,
            example=tuple(int(row) for row in self.order[self.begins[place] : self.ends[place]]),
        )

    def _batch(self, place: int) -> MicroBatch:
        tokens, *targets = (int(longest[place]) for longest in self.longest)
        return MicroBatch(
            rows=int(self.rows[place]),
            tokens=tokens,
            target_tokens=targets[0] if targets else None,
            padded=int(self.shortest[place]) < tokens,
        )


def _epochs(
    sampler: EpochBatchSampler,
    lengths: Sequence[np.ndarray[Any, Any]],
    schedule: WindowSchedule,
    start_update: int,
    *,
    total_updates: int,
    first: int,
) -> Iterator[_Epoch]:
    """Yield what is left of the epochs, as far as updates are made of it; those up to number `first` are not chosen."""
    update, own = start_update, sampler.part.rank
    for _ in range(_NUM_EPOCHS):
        if update >= total_updates:
            return
        position = schedule.position(update)
        order = sampler.order(position.epoch).numpy()[position.rows :]
        begins = _begins(len(order), schedule)
        ends = np.append(begins.ravel()[1:], len(order)).reshape(begins.shape)
        none = begins == ends
        rows = np.where(none, 1, ends - begins)
        longest = tuple(
            np.where(none, length[0], np.maximum.reduceat(length[order], begins.ravel()).reshape(begins.shape))
            for length in lengths
        )
        shortest = np.minimum.reduceat(lengths[0][order], begins.ravel()).reshape(begins.shape)
        yield _Epoch(
            order=order,
            begins=begins[:, own],
            ends=ends[:, own],
            first_update=update + 1,
            first_place=schedule.accum * max(0, first - update),
            accum=schedule.accum,
            rows=rows[:, own],
            longest=tuple(tokens[:, own] for tokens in longest),
            shortest=np.where(none, lengths[0][0], shortest)[:, own],
            largest=(rows * sum(longest)).max(axis=1),
            num_batches=(total_updates - update) * schedule.accum,
        )
        update += -(-len(begins) // schedule.accum)


def _begins(num_rows: int, schedule: WindowSchedule) -> np.ndarray[Any, Any]:
    """Return where the part of each micro-batch begins that each process takes, of shape (micro-batches, processes).

    The parts are those of `Part.of`; the last process always has a row.
    """
    starts = np.arange(0, num_rows, schedule.batch_size * schedule.world_size)
    sizes: np.ndarray[Any, Any] = np.diff(np.append(starts, num_rows))
    ranks = np.arange(schedule.world_size)
    begins: np.ndarray[Any, Any] = starts[:, None] + sizes[:, None] * ranks // schedule.world_size
    return begins


def _most(lengths: Sequence[np.ndarray[Any, Any]], schedule: WindowSchedule) -> int:
    """Return a rank that no micro-batch exceeds: full, its rows and targets as long as the longest."""
    rows = min(schedule.batch_size, schedule.num_rows)
    return 4 * rows * sum(int(length.max()) for length in lengths) + 2 * (schedule.accum > 1) + 1
