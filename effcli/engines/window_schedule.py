"""Which rows each update of a run takes, as numbers of rows used: pure arithmetic, the same for every engine."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """Where a run stands at an update boundary: `rows` rows of epoch `epoch` (from 0) are used.

    At the end of an epoch it is the start of the next one, so `rows` is below the number of rows.
    """

    update: int = 0
    epoch: int = 0
    rows: int = 0


START = Position()
"""Where a run stands before its first update."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowSchedule:
    """How the rows of each epoch are cut into windows of `batch_size` x `accum` x `world_size` rows.

    Each of `world_size` processes takes `batch_size` rows of a micro-batch, as evenly as the last one of an epoch
    allows, so that all make the same number of micro-batches.

    The windows are cut from `origin` on: the start of the run, or where a resumed run changed the size of its window.
    There the rest of the epoch is cut anew, so that each of its rows is still used once.
    """

    num_rows: int
    batch_size: int
    accum: int
    world_size: int = 1
    origin: Position = START

    @property
    def window(self) -> int:
        """Return the rows of a whole window, over all processes."""
        return self.batch_size * self.accum * self.world_size

    @property
    def updates_per_epoch(self) -> int:
        """Return the updates of a whole epoch, ceil(rows / window)."""
        return -(-self.num_rows // self.window)

    @property
    def offset(self) -> int:
        """Return what an update's number lacks to that in a run which had this window from its start.

        It may be negative, and is 0 in a run that never changed its window.
        """
        left = -(-(self.num_rows - self.origin.rows) // self.window)
        return (self.origin.epoch + 1) * self.updates_per_epoch - left - self.origin.update

    def position(self, update: int) -> Position:
        """Return where the run stands after `update` updates, not before the origin."""
        epoch, done = divmod(update + self.offset, self.updates_per_epoch)
        if epoch > self.origin.epoch:
            return Position(update=update, epoch=epoch, rows=done * self.window)
        rows = self.origin.rows + (update - self.origin.update) * self.window
        return Position(update=update, epoch=epoch, rows=rows)

    def epochs(self, update: int) -> float:
        """Return the epochs done after so many updates: in an epoch that was cut anew the share of its rows."""
        position = self.position(update)
        if self.origin.rows and position.epoch == self.origin.epoch:
            return position.epoch + position.rows / self.num_rows
        return (update + self.offset) / self.updates_per_epoch

    def ends_epoch(self, update: int) -> bool:
        """Return whether the update is the last of its epoch."""
        return (update + self.offset) % self.updates_per_epoch == 0

    def micro_batches_left(self, update: int) -> int:
        """Return the micro-batches from here to the end of the epoch, which are as many for each process."""
        return -(-(self.num_rows - self.position(update).rows) // (self.batch_size * self.world_size))

    def total_updates(self, epochs: int) -> int:
        """Return the updates of a run of that many epochs, those before the origin included."""
        return epochs * self.updates_per_epoch - self.offset
