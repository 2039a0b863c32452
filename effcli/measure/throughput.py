"""`ThroughputMeter`: rows, tokens and seconds of training alone, counted from outside the engine."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from effcli.measure.record import Throughput
from effcli.ranks.group import sums, world_size

if TYPE_CHECKING:
    import torch


class ThroughputMeter:
    """Counts what passes through the model in training mode, and times the stretches between `start` and `pause`.

    Only closed stretches count: half a window before a failure, and what an engine does after its last update, are
    not the time of any update. Rows are the first dimension of the model's main input; tokens are those that the
    attention mask keeps, or all positions without one. The sum of the mask stays on its device until `result`, so
    that counting never waits for the GPU. The hook sits on the whole model, whose forward runs once per micro-batch
    also under gradient checkpointing, which runs only the layers inside again. `before_s` are the seconds that a
    resumed run trained before, None where they are not known.

    Of several processes each counts its own rows and tokens, which `rows_since_last` adds up over all; the seconds are
    those of each, which make every update together.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        clock: Callable[[], float] = time.perf_counter,
        *,
        before_s: float | None = 0.0,
    ) -> None:
        self._clock = clock
        self._before_s = before_s
        self._started_s: float | None = None
        self._seconds = 0.0
        self._rows = _Count()
        self._tokens = _Count()
        self._rows_read = self._left_out = 0
        self._to_count: int | None = None
        self._of_all: tuple[int, int] | None = None
        self._handle = model.register_forward_pre_hook(self._before_forward, with_kwargs=True)

    def start(self, num_batches: int | None = None) -> None:
        """Begin a stretch of training; nothing when one is going on.

        Of the micro-batches in it the first `num_batches` count, None for all: a process may make a last one without
        any rows of its own.
        """
        if self._started_s is None:
            self._to_count = num_batches
            self._started_s = self._clock()

    def pause(self) -> None:
        """Close the stretch, and with it the rows and tokens counted in it; nothing when none is going on."""
        if self._started_s is not None:
            self._seconds += self._clock() - self._started_s
            self._started_s = None
            self._rows.close()
            self._tokens.close()

    def leave_out(self) -> None:
        """End a stretch as `pause` does, that of one update, without counting it: it was slowed down."""
        if self._started_s is not None:
            self._started_s = None
            self._left_out += 1
            self._rows.drop()
            self._tokens.drop()

    @property
    def training_s(self) -> float | None:
        """Return the seconds of the closed stretches and of `before_s`; None where those are not known."""
        return None if self._before_s is None else self._before_s + self._seconds

    def rows_since_last(self) -> int:
        """Return the rows counted since the last call: those of one update when called once per update.

        Collective: of several processes they are those of all, which call it after the same stretch.
        """
        rows = int(self._rows.total)
        if world_size() > 1:
            in_all = sums([rows, int(self._rows.closed), int(self._tokens.closed)])
            rows, *closed = map(int, in_all)
            self._of_all = (closed[0], closed[1])
        rows, self._rows_read = rows - self._rows_read, rows
        return rows

    def result(self, num_updates: int) -> Throughput | None:
        """Return the averages over the closed stretches; None without any.

        `num_updates` were made in these and in those that were left out. Rows and tokens of several processes are those
        up to the last call of `rows_since_last`.
        """
        num_updates -= self._left_out
        if not num_updates or not self._seconds:
            return None
        rows, tokens = self._of_all or (int(self._rows.closed), int(self._tokens.closed))
        return Throughput(
            updates_per_second=num_updates / self._seconds,
            samples_per_second=rows / self._seconds,
            tokens_per_second=tokens / self._seconds,
        )

    def detach(self) -> None:
        """Take the hook off the model."""
        self._handle.remove()

    def _before_forward(self, model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not model.training or self._to_count == 0:
            return
        if self._to_count is not None:
            self._to_count -= 1
        main = args[0] if args else kwargs.get("input_ids", next(iter(kwargs.values()), None))
        if main is None:
            return
        mask = kwargs.get("attention_mask")
        self._rows.add(main.shape[0])
        self._tokens.add(mask.sum() if mask is not None else main.shape[:2].numel())


class _Count:
    """A sum of which a part is closed; holds a tensor when tensors were added."""

    def __init__(self) -> None:
        self.closed: int | torch.Tensor = 0
        self.total: int | torch.Tensor = 0
        self._dropped: int | torch.Tensor = 0

    def add(self, amount: int | torch.Tensor) -> None:
        self.total = self.total + amount

    def close(self) -> None:
        """Count what was added since the last `close` or `drop`."""
        self.closed = self.total - self._dropped

    def drop(self) -> None:
        """Leave out what was added since then."""
        self._dropped = self.total - self.closed
