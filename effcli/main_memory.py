"""The machine's main memory, as far as this process may have it. No torch."""

from __future__ import annotations

import sys
from pathlib import Path

_GROUP = Path("/sys/fs/cgroup")
GROUP_LIMITS = (_GROUP / "memory.max", _GROUP / "memory" / "memory.limit_in_bytes")
"""Where Linux says what a container may have, in version 2 and version 1 of control groups."""


def available_to_process() -> int | None:
    """Return the bytes of main memory that the system can give this process now; None if unknown.

    In a Linux container the control group may allow less than the machine has, and `ulimit -v` less than that.
    """
    amounts = (_available_to_system(), _left_in_group(), _left_of_address_space())
    return min((amount for amount in amounts if amount is not None), default=None)


def _available_to_system() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)


def _left_in_group() -> int | None:
    try:
        limit = (_GROUP / "memory.max").read_text().strip()
        used = int((_GROUP / "memory.current").read_text())
    except (OSError, ValueError):
        return None
    return None if limit == "max" else max(0, int(limit) - used)


def _left_of_address_space() -> int | None:
    if sys.platform != "linux":
        return None
    import resource  # not on Windows

    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    return None if limit == resource.RLIM_INFINITY else max(0, limit - used)


def group_limit(total_bytes: int) -> int | None:
    """Return the bytes that this process's control group may have; None where that is no less than the machine has."""
    for path in GROUP_LIMITS:
        try:
            limit = int(path.read_text())
        except (OSError, ValueError):  # not there, or "max"
            continue
        return limit if limit < total_bytes else None
    return None
