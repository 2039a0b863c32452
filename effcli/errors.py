"""Exceptions that a person can act on; each class carries the exit code of the command line.

The text of an error is one line: what was wrong, what was given, what is allowed, what to type next.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator


class EffcliError(Exception):
    """Base of every error that is meant to be read by the user."""

    exit_code = 1


class UsageError(EffcliError):
    """A flag, recipe or specification is wrong."""

    exit_code = 2


class TraceError(UsageError):
    """The code of a model cannot be traced without memory; what follows from shapes alone can still be said."""


class DataError(EffcliError):
    """The data set, or a file to read, is missing, malformed or does not fit the task."""

    exit_code = 2


class MissingExtraError(EffcliError):
    """An optional package is needed; the message holds the pip command."""

    exit_code = 3


class DeviceError(EffcliError):
    """The requested device, driver or precision is not available."""

    exit_code = 4


class OutOfMemoryError(EffcliError):
    """The device ran out of memory during the run."""

    exit_code = 5


class PredictionError(EffcliError):
    """A measured number differs from its prediction by more than `--tolerance`."""

    exit_code = 6


class OverBudgetError(EffcliError):
    """What is planned needs more memory than `--budget` allows, or nothing fits the card."""

    exit_code = 6


class TrainingFailedError(EffcliError):
    """The loss or the gradient is not finite, or a checkpoint is damaged."""

    exit_code = 7


class UnreachableError(EffcliError):
    """A model or data set could not be reached: hub, gated, or offline."""

    exit_code = 8


class WriteError(EffcliError):
    """The output could not be written: disk full or read-only."""

    exit_code = 9


class InterruptedRunError(EffcliError):
    """The run was stopped by a signal at an update boundary, after its state was saved."""

    def __init__(self, message: str, *, signal_number: int) -> None:
        super().__init__(message)
        self.exit_code = 128 + signal_number


class IncompleteComparisonError(EffcliError):
    """A run of a comparison failed or was interrupted; the exit code is that of the first such run."""

    def __init__(self, message: str, *, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def nearest(given: str, allowed: Iterable[str]) -> str:
    """Return " Did you mean 'x'?" for the closest allowed word, or an empty string."""
    matches = difflib.get_close_matches(given, list(allowed), n=1, cutoff=0.6)
    return f" Did you mean '{matches[0]}'?" if matches else ""


def chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an exception, what it was raised from or while that was handled, and so on to the first.

    Each comes once: one that is raised again from what wraps it closes a circle.
    """
    link: BaseException | None = error
    seen: set[int] = set()
    while link is not None and id(link) not in seen:
        yield link
        seen.add(id(link))
        link = link.__cause__ or link.__context__


def first_line(error: BaseException) -> str:
    """Return the first line of an exception's text, or its kind where it has none."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def kind_and_line(error: BaseException) -> str:
    """Return an exception's kind and the first line of its text, for one that is not ours."""
    return f"{type(error).__name__}: {first_line(error)}"
