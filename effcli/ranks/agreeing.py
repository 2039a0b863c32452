"""What fails in one process of a run fails in all, before any of them waits for the others in an exchange. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from effcli.errors import EffcliError, TrainingFailedError, WriteError, kind_and_line
from effcli.ranks.group import gathered


@contextmanager
def on_all() -> Iterator[None]:
    """Raise after the block in every process what was raised in one; collective, so nothing in the block may be.

    A process whose own block failed raises that, the others an error of the same kind that names the rank.
    """
    failure: Exception | None = None
    try:
        yield
    except Exception as error:  # passed on, once the others know
        failure = error
    told = gathered(None if failure is None else _told(failure))
    if failure is not None:
        raise failure
    for number, other in enumerate(told):
        if other is not None:
            kind, text = other
            raise kind(f"rank {number}: {text}" if number else text)


def _told(error: Exception) -> tuple[type[EffcliError], str]:
    """Return the kind and the text of the error in the other processes."""
    if isinstance(error, EffcliError):
        return type(error), str(error)
    return WriteError if isinstance(error, OSError) else TrainingFailedError, kind_and_line(error)
