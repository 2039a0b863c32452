"""Which process of a run tells of an error: the first that meets one, so that there is one message. No torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from effcli.errors import UsageError
from effcli.ranks.launch import ALONE, Launch, read_launch

if TYPE_CHECKING:
    from torch.distributed import Store

_TOLD, _ENDED = "effcli/told", "effcli/ended"
"""Keys of the store that the processes found each other by."""

_store: Store | None = None


def use_store(store: Any) -> None:
    """Let this store decide from now on, also after the process group is left."""
    global _store
    _store = store


def may_tell() -> bool:
    """Return whether this process is the one to tell of what ends the run; at most one of a run is.

    Before the processes have found each other all come to the same errors, and rank 0 tells.
    """
    launch = _launch()
    if not launch.has_many:
        return True
    if _store is None:
        return launch.is_main
    mine = str(launch.rank).encode()
    try:
        return bool(_store.compare_set(_TOLD, "", mine.decode()) == mine)
    except Exception:  # the process that held the store is gone, and torch raises whatever its socket does
        return True


def told_by() -> str:
    """Return how a message names the process that it is of; empty for rank 0."""
    launch = _launch()
    return "" if launch.is_main else f"rank {launch.rank}: "


def end(launch: Launch, *, wait_s: float) -> None:
    """Say that rank 0 has written what it has to write; another process waits for that, so that none ends before."""
    if _store is None:
        return
    from datetime import timedelta

    try:
        if launch.is_main:
            _store.set(_ENDED, "1")
        else:
            _store.wait([_ENDED], timedelta(seconds=wait_s))
    except Exception:  # as in `may_tell`, and where the wait was in vain
        return


def _launch() -> Launch:
    try:
        return read_launch()
    except UsageError:
        return ALONE
