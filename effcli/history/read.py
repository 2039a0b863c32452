"""Reads the history back; lines that cannot be read are left out and counted."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from effcli.history.entry import SCHEMA_VERSION, HistoryEntry
from effcli.history.file import history_file, read_lines, why
from effcli.history.record import History, peak_errors

if TYPE_CHECKING:
    from pathlib import Path


def read_history() -> History:
    """Return the runs that are kept; see `History` for where there are none."""
    path: Path | None = None
    try:
        path = history_file()
        lines = read_lines(path) if path else []
    except OSError as error:
        return History(file=str(path) if path else None, reason=why(error))
    runs, num_damaged = entries_of(lines)
    return History(file=str(path) if path else None, runs=runs, num_damaged=num_damaged, peak_errors=peak_errors(runs))


def entries_of(lines: Iterable[bytes]) -> tuple[tuple[HistoryEntry, ...], int]:
    """Return the runs of these lines, and how many of the lines are damaged or of another version."""
    from pydantic import ValidationError

    runs, num_damaged = [], 0
    for line in lines:
        try:
            run = HistoryEntry.model_validate_json(line)
        except ValidationError:
            num_damaged += 1
            continue
        if run.schema_version == SCHEMA_VERSION:
            runs.append(run)
        else:
            num_damaged += 1
    return tuple(runs), num_damaged
