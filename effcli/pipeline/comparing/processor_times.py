"""How much of the machine's processors others took in the meantime: what makes times of runs hard to compare."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

STATISTICS = Path("/proc/stat")
"""Linux: its first line has ticks since the start of all processors: user, nice, system, idle, iowait (proc(5))."""
_IDLE, _IOWAIT, _GUEST = 3, 4, 8


class ProcessorTimes(NamedTuple):
    """Seconds of all processors together: those there were, those in which they worked, and those that they worked for
    this process and for children of it that have ended."""

    total_s: float
    busy_s: float
    own_s: float


def read_processor_times(statistics: Path = STATISTICS) -> ProcessorTimes | None:
    """Return the times by now; None where the system does not tell them."""
    try:
        name, *ticks = statistics.read_text().split("\n", 1)[0].split()
        counts = [int(tick) for tick in ticks[:_GUEST]]  # guests' are in user's as well
        per_second = os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, AttributeError):
        return None
    if name != "cpu" or len(counts) <= _IOWAIT:
        return None
    own = os.times()
    return ProcessorTimes(
        total_s=sum(counts) / per_second,
        busy_s=(sum(counts) - counts[_IDLE] - counts[_IOWAIT]) / per_second,
        own_s=own.user + own.system + own.children_user + own.children_system,
    )


def others_share(before: ProcessorTimes | None, after: ProcessorTimes | None) -> float | None:
    """Return the share of the processors' time between two readings in which they worked for others."""
    if before is None or after is None or after.total_s <= before.total_s:
        return None
    others_s = (after.busy_s - before.busy_s) - (after.own_s - before.own_s)
    return min(1.0, max(0.0, others_s / (after.total_s - before.total_s)))
