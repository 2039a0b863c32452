"""`OutOfMemoryFacts`: where a run ran out of memory, and what would fit."""

from __future__ import annotations

from effcli.facts import Fact
from effcli.measure.device_record import Doing, OthersFacts
from effcli.memory.plan import Change, PhaseBytes


class BatchSizes(Fact):
    """The sizes that a run had when memory ran out; `eval_batch` rows are evaluated at once."""

    micro: int
    accum: int
    eval_batch: int


class OutOfMemoryFacts(Fact):
    """One time that memory ran out: where, what was planned there, what was measured by then, and what would fit.

    `doing` is the part of the run; `update` the one that was being made or was evaluated, 0 before the first; `rows`
    and `tokens` the shape of the batch, None where none was in the model. `planned` is the phase of the plan's peak at
    that shape, None where nothing is planned. `changes` and `largest_batch_size` are held against `budget_bytes`.
    `available_bytes` are those of the device after the failure, `others` what other processes held of it then, None on
    a CPU. `next_sizes` are those that the run began again with.
    """

    device: str
    doing: Doing
    update: int
    sizes: BatchSizes
    rows: int | None
    tokens: int | None
    planned: PhaseBytes | None = None
    planned_phase: str | None = None
    peak_allocated_bytes: int | None
    peak_reserved_bytes: int | None
    peak_rss_bytes: int
    available_bytes: int | None
    others: OthersFacts | None = None
    budget_bytes: int | None = None
    changes: tuple[Change, ...] = ()
    largest_batch_size: int | None = None
    advice: str = ""
    next_sizes: BatchSizes | None = None
    error: str
