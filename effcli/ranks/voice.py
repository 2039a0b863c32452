"""Which process of a run tells of an error, so that there is one message. No torch.

Rank 0 tells whatever ended the run, also what ended it in another process, which leaves the reason in the store that
the processes found each other by. Another process tells only where rank 0 is gone, or does not come to it.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from effcli.errors import EffcliError, InterruptedRunError, TrainingFailedError, UsageError, kind_and_line
from effcli.ranks.launch import ALONE, Launch, read_launch
from effcli.ranks.members import gone, members
from effcli.ranks.store import find_store, is_of_launcher

if TYPE_CHECKING:
    from torch.distributed import Store

LAST_WORDS_S = 10.0
"""Seconds that a process which ends waits for rank 0 to write its record: a launcher stops all when one has ended."""
INTERRUPTED = "interrupted; what was saved before is intact"

_REASON, _TOLD, _ENDED = "reason", "told", "ended"
"""Keys of the store: why the run ends, which process tells of it, and that rank 0 has done its part, and spoken."""
FIRST_RUN = "effcli/0"
"""Prefix of the keys of the first run of a launch."""
_STEP_S = 0.05
_COMMON_S = 1.0
"""Seconds within which a launcher has stopped the others after one has ended: torchrun looks each 0.1 s (2.13)."""

_store: Store | None = None
_ends_badly = _main_tells = False


class PeerFailedError(TrainingFailedError):
    """Another process of the run failed, and said why; ends with its exit code."""

    def __init__(self, message: str, *, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class LostPeerError(TrainingFailedError):
    """Another process of the run is gone without a word. No reason of its own: each process sees it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reason:
    """Why a process ended the run; `by_signal` where it was told to."""

    rank: int
    text: str
    exit_code: int
    by_signal: bool

    def as_error(self) -> EffcliError:
        """Return what the other processes raise."""
        text = self.text if self.text.startswith("rank ") else f"rank {self.rank}: {self.text}"
        if self.by_signal:
            return InterruptedRunError(text, signal_number=self.exit_code - 128)
        return PeerFailedError(text, exit_code=self.exit_code)


def use_store(store: Any) -> None:
    """Let this store decide from now on, also after the process group is left."""
    global _store, _ends_badly, _main_tells
    _store, _ends_badly, _main_tells = store, False, False


def leave_reason(error: BaseException) -> None:
    """Leave the reason why this process ends for the others, unless one of them has left one.

    To be called before the group is left: whoever notices that then finds the reason.
    """
    global _ends_badly
    _ends_badly = True
    if _store is None or isinstance(error, LostPeerError):
        return
    reason = {"rank": _launch().rank, **_ending(error)}
    try:
        _store.compare_set(_REASON, "", json.dumps(reason))
    except Exception:  # the process that held the store is gone, and torch raises whatever its socket does
        return


def _ending(error: BaseException) -> dict[str, Any]:
    """Return text, exit code, and whether a signal asked for it."""
    if isinstance(error, EffcliError):
        return {
            "text": str(error),
            "exit_code": error.exit_code,
            "by_signal": isinstance(error, InterruptedRunError),
        }
    if isinstance(error, SystemExit | KeyboardInterrupt):
        code = error.code if isinstance(error, SystemExit) and isinstance(error.code, int) else 130
        return {"text": INTERRUPTED, "exit_code": code, "by_signal": code > 128}
    return {"text": kind_and_line(error), "exit_code": 1, "by_signal": False}


def reason_of_another() -> Reason | None:
    """Return why another process ended the run, None where none has said so."""
    try:
        if _store is None or not _store.check([_REASON]):
            return None
        reason = Reason(**json.loads(_store.get(_REASON)))
    except Exception:  # as in `leave_reason`
        return None
    return None if reason.rank == _launch().rank else reason


def is_ending() -> bool:
    """Return whether the run ends badly and this process is about to say so: a signal then has nothing to add."""
    return _ends_badly


def is_main() -> bool:
    """Return whether this is rank 0, or the only process."""
    return _launch().is_main


def has_met_others() -> bool:
    """Return whether this process has met others, or left word for them."""
    return _store is not None


def may_tell(text: str, exit_code: int) -> bool:
    """Return whether this process is the one to tell of an error that ends it; at most one of a run is."""
    launch = _launch()
    if not launch.has_many:
        return True
    if _store is None and (launch.is_main or not _left_word(launch, text, exit_code)):
        return True
    return not _main_tells and _claims(launch)


def _claims(launch: Launch) -> bool:
    """Return whether no other process has said that it tells; says so for this one."""
    mine = str(launch.rank)
    try:
        assert _store is not None
        return bool(_store.compare_set(_TOLD, "", mine) == mine.encode())
    except Exception:  # as in `leave_reason`
        dead = {member.rank for member in gone()}
        return launch.rank == min((member.rank for member in members() if member.rank not in dead), default=launch.rank)


def _left_word(launch: Launch, text: str, exit_code: int) -> bool:
    """Return whether rank 0 can be told of an error that came before the processes have met.

    As a rule all come to that error: rank 0 tells, and the launcher stops this process while it waits here.
    """
    global _ends_badly
    time.sleep(_COMMON_S)
    if is_of_launcher():
        try:
            from torch.distributed import PrefixStore

            use_store(PrefixStore(FIRST_RUN, find_store(launch, wait_s=LAST_WORDS_S)))
        except EffcliError:
            return False
        leave_reason(PeerFailedError(text, exit_code=exit_code))
        _ends_badly = False  # the launcher may still stop it
        end(launch)
        return True
    time.sleep(LAST_WORDS_S)
    return False


def with_rank(text: str) -> str:
    """Return a message that names the process that it is of; unchanged for rank 0, and where it does already."""
    launch = _launch()
    return text if launch.is_main or text.startswith("rank ") else f"rank {launch.rank}: {text}"


def end(launch: Launch) -> None:
    """Say that rank 0 has written what it has to write; another process waits for that, so that none ends before."""
    global _main_tells
    if _store is None:
        return
    try:
        if launch.is_main:
            _store.set(_ENDED, "told" if _ends_badly and _claims(launch) else "fine")
            return
        end_s = time.monotonic() + LAST_WORDS_S
        is_over = False
        while not _store.check([_ENDED]):  # `wait` would say on stderr that it was in vain
            if is_over:
                return
            time.sleep(_STEP_S)
            is_over = time.monotonic() >= end_s or any(member.rank == 0 for member in gone())  # and look once more
        _main_tells = _store.get(_ENDED) == b"told"
    except Exception:  # as in `leave_reason`
        return


def _launch() -> Launch:
    try:
        return read_launch()
    except UsageError:
        return ALONE
