"""The processes of a run as the system knows them, and which of them are gone. No torch."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A process of the run: its rank, its machine, and its number there."""

    rank: int
    host: str
    process: int


_members: tuple[Member, ...] = ()


def myself(rank: int) -> Member:
    """Return this process."""
    return Member(rank=rank, host=_host(), process=os.getpid())


def keep(members: Iterable[Member]) -> None:
    """Remember who takes part; nobody does once the run is over."""
    global _members
    _members = tuple(members)


def members() -> tuple[Member, ...]:
    """Return who takes part, in the order of the ranks; none before they have met."""
    return _members


def gone(*, wait_s: float = 0.0) -> tuple[Member, ...]:
    """Return the processes of this machine that have ended; waits up to `wait_s` seconds for one.

    A connection breaks a moment before the system counts its process as ended.
    """
    end_s = time.monotonic() + wait_s
    while True:
        here = _host()
        found = tuple(member for member in _members if member.host == here and not _is_running(member.process))
        if found or time.monotonic() >= end_s:
            return found
        time.sleep(0.05)


def _host() -> str:
    """Return what tells machines, and containers with process numbers of their own, from each other."""
    try:
        numbering = os.readlink("/proc/self/ns/pid")
    except OSError:  # not Linux
        numbering = ""
    return f"{platform.node()} {numbering}".strip()


def _is_running(process: int) -> bool:
    """Return whether a process runs; one that has ended and that nobody has asked about yet does not."""
    try:
        if Path("/proc/self/stat").exists():
            return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
        os.kill(process, 0)
    except PermissionError:
        return True
    except OSError:
        return False
    return True
