"""The history of runs on this machine, as a table for a terminal: predicted beside measured, the newest run first."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from rich.console import Group
from rich.text import Text

from effcli.history.file import OFF, VARIABLE
from effcli.report.layout import fact_grid, print_parts, ruled_table
from effcli.report.number_text import NOT_AVAILABLE, amount
from effcli.report.text import plain
from effcli.units import count, format_count

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table

    from effcli.history.entry import HistoryEntry
    from effcli.history.record import History

NUM_SHOWN = 20
"""How many runs the table has."""

_NARROWEST = 60
"""Columns below which a run's name has lines of its own."""

_AMOUNTS = {
    "optimizer_state": "optimizer state",
    "peak_allocated": "peak allocated",
    "peak_reserved": "peak reserved",
    "context": "context",
    "process": "this process",
}


def render_history(history: History, console: Console) -> None:
    """Print the latest runs and how good their predictions were, or in a line why there are none."""
    if not history.runs:
        console.print(Text(plain(_none(history))), soft_wrap=True)
        return
    console.print(Text("effcli doctor: history", style="bold"))
    runs = [_table(history)] if console.width >= _NARROWEST else _blocks(history)
    print_parts([fact_grid(_facts(history)), *runs], console)


def _none(history: History) -> str:
    """Return in a line why there are no runs."""
    if history.file is None and history.reason is None:
        return f"No history is kept: {VARIABLE}={OFF}."
    if history.reason is not None:
        where = f" '{history.file}'" if history.file else ""
        return f"The history{where} cannot be read: {history.reason}."
    damaged = f" ({_damaged(history)})" if history.num_damaged else ""
    return (
        f"No runs yet{damaged}: each run of `effcli train` and `effcli compare` that made an update adds a line to "
        f"'{history.file}' at its end; {VARIABLE}={OFF} keeps none."
    )


def _facts(history: History) -> Iterable[tuple[str, str]]:
    shown = f"; the latest {NUM_SHOWN} are shown, --json has all" if len(history.runs) > NUM_SHOWN else ""
    yield "runs", f"{format_count(len(history.runs))}{shown}"
    yield "peaks", _peaks(history)
    yield "error", "predicted less measured, of the measured: + where too much was predicted"
    if history.num_damaged:
        yield "left out", _damaged(history)
    yield "file", f"{history.file}; {VARIABLE}=FILE names another, {VARIABLE}={OFF} keeps none"


def _peaks(history: History) -> str:
    errors = history.peak_errors
    if errors.median_error is None or errors.largest_error is None:
        return f"{NOT_AVAILABLE}: no completed run measured its peak; on a CPU --profile-memory does"
    median, largest = _percent(errors.median_error), _percent(errors.largest_error)
    return f"compared in {count(errors.num_runs, 'completed run')}: median error {median}, largest {largest}"


def _damaged(history: History) -> str:
    return f"{count(history.num_damaged, 'line')} that cannot be read"


def _table(history: History) -> Table:
    """Return for each of the latest runs a line that names it, and below it a row for each amount."""
    table = ruled_table("The newest first", "run", "predicted", "measured", "error")
    for run in reversed(history.runs[-NUM_SHOWN:]):
        table.add_row(plain(_title(run)))
        for label, *cells in _rows(run):
            table.add_row(plain(f"  {label}"), *cells)
        table.add_section()
    return table


def _blocks(history: History) -> Iterable[RenderableType]:
    """Yield what the table has with all names on lines of their own, for a terminal too narrow for columns."""
    yield Text("predicted, measured, error; the newest first", style="dim")
    for run in reversed(history.runs[-NUM_SHOWN:]):
        lines = [Text(plain(_title(run)), overflow="fold")]
        for label, *cells in _rows(run):
            lines.append(Text(plain(f"  {label}"), overflow="fold"))
            lines.append(Text(f"    {', '.join(filter(None, cells))}", overflow="fold"))
        yield Group(*lines)


def _rows(run: HistoryEntry) -> Iterable[tuple[str, str, str, str]]:
    """Yield for each amount of a run what it is, as predicted and as measured, and the error."""
    for name, label in _AMOUNTS.items():
        if (pair := run.pairs.get(name)) is not None:
            how = f" ({run.context_how})" if name == "context" and run.context_how else ""
            error = "" if pair.error is None else _percent(pair.error, sign="+")
            yield f"{label}{how}", amount(pair.predicted_bytes), amount(pair.measured_bytes), error


def _title(run: HistoryEntry) -> str:
    parts = [run.model, run.optimizer, run.precision, run.batch, run.card or run.device]
    parts += [run.status] if run.status != "completed" else []
    return f"{run.date[:16].replace('T', ' ')} {', '.join(parts)}"


def _percent(share: float, *, sign: str = "") -> str:
    """Return a share in percent with two decimals; nothing at all is a bare 0, and so is its sign."""
    shown = f"{100 * share:{sign}.2f}"
    return "0 %" if share == 0 else f"{shown.lstrip('+-') if float(shown) == 0 else shown} %"
