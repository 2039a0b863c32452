"""The one sink of results: stdout gets tables or exactly one JSON document, stderr all that is said meanwhile."""

from __future__ import annotations

import io
import json as json_format
import math
import os
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from effcli.streams import is_terminal

if TYPE_CHECKING:
    from rich.console import Console

    from effcli.history.record import History
    from effcli.measure.comparison_record import ComparisonRecord
    from effcli.measure.doctor_record import DoctorRecord
    from effcli.measure.estimate_record import EstimateRecord
    from effcli.measure.inspection_record import InspectionRecord
    from effcli.measure.record import RunRecord
    from effcli.measure.search_record import SearchRecord

PIPE_COLUMNS = 80
"""Width where there is no terminal to ask and COLUMNS is not set."""


def make_console(stderr: bool) -> Console:
    """Return a console that takes text literally (no markup, no emoji codes).

    Without a terminal it writes neither colour nor control characters, whatever FORCE_COLOR says, and characters
    that the encoding lacks become backslash escapes instead of an error.
    """
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="backslashreplace")
    terminal = is_terminal(stream)
    return Console(
        file=stream,
        force_terminal=terminal,
        force_jupyter=False,
        force_interactive=terminal,
        color_system="auto" if terminal else None,
        width=_width(terminal),
        markup=False,
        emoji=False,
        highlight=False,
    )


def _width(terminal: bool) -> int | None:
    """Return a console's columns, None where rich finds them; rich takes `COLUMNS=0` at its word and prints nothing."""
    named = os.environ.get("COLUMNS", "")
    if named.isdecimal() and int(named) == 0:
        return shutil.get_terminal_size((PIPE_COLUMNS, 0)).columns if terminal else PIPE_COLUMNS
    return None if terminal or named else PIPE_COLUMNS


def emit(record: RunRecord, json: bool, quiet: bool) -> None:
    """Write a run's result to stdout: one JSON document, or the tables.

    `quiet` leaves out the notes; the tables stay, because they are what the command was called for. On a terminal
    the notes are left out too: they were said there, on stderr, when they came up.
    """
    if json:
        emit_json(record.model_dump(mode="json"))
        return
    from effcli.report.tables import render_run

    render_run(record, make_console(stderr=False), notes=not quiet and not is_terminal(sys.stdout))


def emit_saved_run(record: RunRecord, quiet: bool) -> None:
    """Write the tables of one saved run to stdout, also on a terminal with the notes, unless `quiet`."""
    from effcli.report.tables import render_run

    render_run(record, make_console(stderr=False), notes=not quiet)


def emit_estimate(record: EstimateRecord, json: bool, quiet: bool) -> None:
    """Write an estimate to stdout: one JSON document, or the tables; `quiet` leaves out the notes."""
    if json:
        emit_json(record.model_dump(mode="json"))
        return
    from effcli.report.estimate import render_estimate

    render_estimate(record, make_console(stderr=False), notes=not quiet)


def emit_inspection(record: InspectionRecord, json: bool, quiet: bool, top: int | None = None) -> None:
    """Write what a saved state holds to stdout: one JSON document, or the tables with the `top` largest parameters.

    `quiet` leaves out the notes.
    """
    if json:
        emit_json(record.model_dump(mode="json"))
        return
    from effcli.report.inspection import render_inspection

    render_inspection(record, make_console(stderr=False), top=top, notes=not quiet)


def emit_search(record: SearchRecord, json: bool, quiet: bool) -> None:
    """Write what a search found to stdout: one JSON document, or the table; `quiet` leaves out the notes."""
    if json:
        emit_json(record.model_dump(mode="json"))
        return
    from effcli.report.search import render_search

    render_search(record, make_console(stderr=False), notes=not quiet)


def emit_comparison(
    record: ComparisonRecord, json: bool, quiet: bool, folder: str | None = None, *, said: bool = False
) -> None:
    """Write a comparison to stdout: one JSON document, or the tables; `quiet` leaves out what runs said.

    `folder` is where the comparison lies, None where it is saved nowhere. What its runs `said` on stderr when it came
    up is left out on a terminal, as in `emit`.
    """
    if json:
        emit_json(record.model_dump(mode="json"))
        return
    from effcli.report.comparison import render_comparison

    if said and is_terminal(sys.stdout):
        record = record.model_copy(update={"runs": tuple(run.model_copy(update={"notes": ()}) for run in record.runs)})
    render_comparison(record, make_console(stderr=False), notes=not quiet, folder=folder)


def emit_doctor(record: DoctorRecord, json: bool, quiet: bool, verbose: bool) -> None:
    """Write what a doctor found to stdout: one JSON document, or a line for each check.

    `quiet` leaves out what is no problem, `verbose` adds the versions of packages.
    """
    if json:
        emit_json(record.model_dump(mode="json"))
        return
    from effcli.report.doctor import render_doctor

    render_doctor(record, make_console(stderr=False), quiet=quiet, verbose=verbose)


def emit_history(history: History, json: bool) -> None:
    """Write the history of runs to stdout: one JSON document, or the tables."""
    if json:
        emit_json(history.model_dump(mode="json"))
        return
    from effcli.report.history import render_history

    render_history(history, make_console(stderr=False))


@contextmanager
def waiting(text: str, quiet: bool) -> Iterator[None]:
    """Say on stderr what is being waited for, on a terminal and for that long only."""
    if quiet or not is_terminal(sys.stderr):
        yield
        return
    from rich.live import Live
    from rich.spinner import Spinner

    # Unlike a console's `status` it leaves stdout as it is, which is being looked at.
    with Live(Spinner("dots", text), console=make_console(stderr=True), transient=True, redirect_stdout=False):
        yield


def emit_files(files: Mapping[str, Path], json: bool) -> None:
    """Name, below the tables, files that were written, by what they are; nothing beside a JSON document."""
    if json or not files:
        return
    from effcli.report.layout import fact_grid, print_parts

    console = make_console(stderr=False)
    console.print()
    print_parts([fact_grid((what, str(path)) for what, path in files.items())], console)


def emit_json(document: Mapping[str, Any]) -> None:
    """Write one JSON document to stdout; NaN and infinities, which JSON lacks, become null."""
    print(json_format.dumps(_finite(document), indent=2, allow_nan=False))


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_finite(inner) for inner in value]
    return value
