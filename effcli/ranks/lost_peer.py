"""What is said where an exchange failed because another process is gone, or stands still."""

from __future__ import annotations

from effcli.errors import EffcliError, TrainingFailedError
from effcli.ranks.launch import TIMEOUT, timeout_s
from effcli.ranks.members import gone
from effcli.ranks.voice import LostPeerError, reason_of_another
from effcli.units import count

GO_ON = "; checkpoints are intact, start the same command with --resume to go on"
_STANDS_STILL = ("Timed out waiting", "wait timeout")
_MOMENT_S = 1.0


def lost_peer(error: BaseException, where: str, *, hint: str = "") -> EffcliError:
    """Return the error to raise in place of what an exchange raised; `where` begins its text, `hint` ends it.

    A process that could still say why it ends is believed.
    """
    reason = reason_of_another()
    if reason is not None:
        return reason.as_error()
    if any(text in str(error) for text in _STANDS_STILL) and not gone():
        limit = count(int(timeout_s()), "second")
        return TrainingFailedError(
            f"{where}: another process has not answered for {limit}, the limit ({TIMEOUT}){hint}"
        )
    ended = gone(wait_s=_MOMENT_S)
    named = ", ".join(f"rank {member.rank} (process {member.process})" for member in ended)
    who = f"{named} has" if len(ended) == 1 else f"{named} have" if ended else "another process of the run has"
    return LostPeerError(f"{where}: {who} ended without a word, as when killed{hint}")
