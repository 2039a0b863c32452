"""What a comparison comes to: complete, or what is left of it and how to complete it. No torch."""

from __future__ import annotations

import shlex
import signal
from collections.abc import Iterator
from contextlib import contextmanager

from effcli.errors import IncompleteComparisonError, WriteError
from effcli.measure.comparison_record import ComparisonRecord

SIGNALLED = 128
"""Exit codes above it say which signal ended a run."""


def check_compared(record: ComparisonRecord, out: str) -> None:
    """Raise unless every run was completed, or planned where nothing was to be trained.

    Raises:
        IncompleteComparisonError: with the exit code of the first run that was not.
    """
    left = [attempt for attempt in record.attempts if not attempt.ended_well]
    if not left:
        return
    first, code = left[0], left[0].exit_code or 1
    if record.status == "interrupted":  # the signal decides, whatever failed before it
        first = next((attempt for attempt in left if (attempt.exit_code or 0) > SIGNALLED), first)
        code = max(first.exit_code or 0, SIGNALLED + signal.SIGINT)
    done, again = "complete", f"; to complete them: effcli compare --resume --out {shlex.quote(out)}"
    if first.folder is None:  # nothing was to be trained
        done, again = "planned", ""
    raise IncompleteComparisonError(
        f"{len(record.attempts) - len(left)} of {len(record.attempts)} runs are {done}; "
        f"{first.name}: {first.failure or first.status}{again}",
        exit_code=code,
    )


@contextmanager
def checking_compared(record: ComparisonRecord, out: str) -> Iterator[None]:
    """Do what `check_compared` does after something is written, and say beside it that it could not be.

    Raises:
        IncompleteComparisonError: see `check_compared`.
        WriteError: nothing else went wrong.
    """
    try:
        yield
    except WriteError as error:
        try:
            check_compared(record, out)
        except IncompleteComparisonError as incomplete:
            raise IncompleteComparisonError(f"{error}; {incomplete}", exit_code=incomplete.exit_code) from error
        raise
    check_compared(record, out)
