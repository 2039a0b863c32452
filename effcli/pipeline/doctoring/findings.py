"""One line of a doctor's report, and a check that can neither end the report nor keep it waiting."""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable

from effcli.errors import EffcliError, kind_and_line
from effcli.masking import masked
from effcli.measure.doctor_record import Check, CheckStatus
from effcli.units import cut

Checks = tuple[Check, ...]
Tell = Callable[[str], object]
"""Takes what is only for who wants to know more, such as a traceback."""

LONGEST_QUOTE = 300
"""Characters of what a library or a system said, which may be pages."""


def ok(name: str, text: str) -> Check:
    """Return the line of something that is well."""
    return _check(name, "ok", text)


def note(name: str, text: str, remedy: str = "") -> Check:
    """Return the line of something that is not there, though nothing is broken."""
    return _check(name, "note", text, remedy)


def problem(name: str, text: str, remedy: str = "") -> Check:
    """Return the line of something that is broken; `remedy` is what to type or do."""
    return _check(name, "problem", text, remedy)


def _check(name: str, status: CheckStatus, text: str, remedy: str = "") -> Check:
    return Check(name=name, status=status, text=masked(text), remedy=masked(remedy))


def quoted(text: str) -> str:
    """Return what somebody else said, on one line, without secrets and not too long."""
    return cut(masked(" ".join(text.split())), LONGEST_QUOTE)


def in_words(error: BaseException) -> str:
    """Return an exception on one line: our own text alone, and others' behind their kind."""
    return str(error) if isinstance(error, EffcliError) else quoted(kind_and_line(error))


def guarded(name: str, look: Callable[[], Checks], tell: Tell) -> Checks:
    """Return what `look` finds; where it fails itself, one problem with the kind of the fault."""
    try:
        return look()
    except Exception as error:
        return (failed(name, error, tell),)


def failed(name: str, error: Exception, tell: Tell) -> Check:
    """Return the line of a check that has just failed itself, and tell where."""
    tell(masked(traceback.format_exc()))
    return problem(name, f"could not be checked: {in_words(error)}", "--verbose shows where")


class BackgroundCheck:
    """A guarded check that runs in a thread of its own, and is left behind when it takes longer than `limit_s` seconds.

    The thread is a daemon: what waits for a network drive that hangs must not keep the process from ending.
    """

    def __init__(self, name: str, look: Callable[[], Checks], *, limit_s: float, tell: Tell) -> None:
        self._name, self._limit_s = name, limit_s
        self._ends = time.monotonic() + limit_s
        self._found: list[Checks] = []
        self._thread = threading.Thread(target=lambda: self._found.append(guarded(name, look, tell)), daemon=True)
        self._thread.start()

    def checks(self) -> Checks:
        """Return what was found, or a problem when nothing was in time."""
        self._thread.join(max(0.0, self._ends - time.monotonic()))
        if self._found:
            return self._found[0]
        return (problem(self._name, f"gave no answer within {self._limit_s:g} s"),)
