"""A doctor's report for a terminal: a line for each check, and how to mend what is not well; reads only the record."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from rich.console import Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from effcli.report.layout import fact_grid, print_parts
from effcli.report.number_text import NOT_AVAILABLE
from effcli.report.text import plain
from effcli.units import count

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from effcli.measure.doctor_record import Check, DoctorRecord

_STYLES = {"ok": "green", "note": "yellow", "problem": "bold red"}
_NARROWEST = 60
"""Columns below which names stand above their texts."""


def render_doctor(record: DoctorRecord, console: Console, *, quiet: bool, verbose: bool = False) -> None:
    """Print the checks in their order, those that found a problem alone with `quiet`; with `verbose` the versions."""
    console.print(Text(f"effcli doctor: {_summary(record)}", style="bold"))
    checks = record.problems if quiet else record.checks
    parts: list[RenderableType] = []
    if checks:
        parts.append(_grid(checks) if console.width >= _NARROWEST else _blocks(checks))
    if verbose:
        parts.append(fact_grid((name, version or NOT_AVAILABLE) for name, version in record.versions.items()))
    print_parts(parts, console)


def _summary(record: DoctorRecord) -> str:
    notes = sum(check.status == "note" for check in record.checks)
    parts = [count(number, noun) for number, noun in ((len(record.problems), "problem"), (notes, "note")) if number]
    return ", ".join(parts) or "all is well"


def _grid(checks: Iterable[Check]) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True)
    grid.add_column(no_wrap=True, style="dim")
    grid.add_column(overflow="fold")
    for check in checks:
        grid.add_row(_status(check), plain(check.name), _text(check))
    return grid


def _blocks(checks: Iterable[Check]) -> RenderableType:
    parts: list[RenderableType] = []
    for check in checks:
        name = _status(check).append(f" {plain(check.name)}", style="not bold default")
        parts += [name, Padding(_text(check), (0, 0, 0, 2))]
    return Group(*parts)


def _status(check: Check) -> Text:
    return Text(check.status, style=_STYLES[check.status])


def _text(check: Check) -> Text:
    text = Text(plain(check.text), overflow="fold")
    return text.append(f"\nto mend: {plain(check.remedy)}", style="bold") if check.remedy else text
