"""A signal's request to stop, kept in case a library catches what was raised for it."""

from __future__ import annotations

from typing import NoReturn

_requested: list[int] = []
"""The signal that asked the process to stop; empty before there is one."""


def interrupt(number: int) -> NoReturn:
    """Raise SystemExit with the exit code of a signal, and keep the request.

    Libraries let it through as a rule, but `datasets` catches whatever is raised while it hashes a function
    (`update_fingerprint`, 5.2) and goes on.
    """
    _requested[:] = [number]
    raise SystemExit(128 + number)


def stop_if_interrupted() -> None:
    """Raise SystemExit again where a signal asked to stop and the process still runs."""
    if _requested:
        raise SystemExit(128 + _requested[0])


def forget_interruption() -> None:
    """Begin without a request: an earlier command of the same process may have been stopped."""
    _requested.clear()
