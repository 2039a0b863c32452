"""How much of the machine's processors others took in the meantime: what makes times of runs hard to compare."""

from __future__ import annotations

import os
from typing import NamedTuple


class ProcessorTimes(NamedTuple):
    """Seconds of all processors together: those there were, those in which they worked, and those that they worked for
    this process and for children of it that have ended."""

    total_s: float
    busy_s: float
    own_s: float


def read_processor_times() -> ProcessorTimes:
    """Return the times by now."""
    import psutil  # takes longer than all else that starts a comparison

    times = psutil.cpu_times()
    # On Linux guests' times are in the user's as well (proc(5)); a system may lack any of these three.
    guests_s = getattr(times, "guest", 0.0) + getattr(times, "guest_nice", 0.0)
    idle_s = times.idle + getattr(times, "iowait", 0.0)
    total_s = sum(times) - guests_s
    own = os.times()
    return ProcessorTimes(
        total_s=total_s,
        busy_s=total_s - idle_s,
        own_s=own.user + own.system + own.children_user + own.children_system,
    )


def others_share(before: ProcessorTimes, after: ProcessorTimes) -> float | None:
    """Return the share of the processors' time between two readings in which they worked for others.

    None where no time has passed.
    """
    if after.total_s <= before.total_s:
        return None
    others_s = (after.busy_s - before.busy_s) - (after.own_s - before.own_s)
    return min(1.0, max(0.0, others_s / (after.total_s - before.total_s)))
