"""Tables of many columns where a terminal is too narrow for them: a block of lines for each row."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group
from rich.text import Text

from effcli.report.layout import fact_grid

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table

_NARROWEST_NAME = 9
_GAP = 2


def fitted(table: Table, console: Console) -> RenderableType:
    """Return the table itself where its numbers fit beside a short name, else a block of lines for each of its rows.

    Cells and headings are texts; a row whose name begins with a blank belongs to the row above it, and a heading whose
    first line is empty goes on with that of the column before it.
    """
    columns = [[str(column.header), *map(str, column.cells)] for column in table.columns]
    widths = [max(len(line) for cell in column for line in cell.split("\n")) for column in columns]
    if not table.row_count or sum(width + _GAP for width in widths[1:]) + _NARROWEST_NAME <= console.width:
        return table
    labels = _labels([column[0] for column in columns[1:]])
    blocks: list[RenderableType] = [Text(str(table.title), style="bold")]
    for name, values in _merged([list(row) for row in zip(*(column[1:] for column in columns), strict=True)]):
        shown = ((label, value) for label, value in zip(labels, values, strict=True) if value)
        blocks += [Text(name), fact_grid((f"  {label}", value) for label, value in shown)]
    return Group(*blocks)


def _labels(headings: list[str]) -> list[str]:
    """Return headings on one line each, complete where they begin above the column before."""
    labels, above = [], ""
    for heading in headings:
        first, _, second = heading.rpartition("\n")
        above = first or (above if heading.startswith("\n") else "")
        subject = above.partition(",")[0] if second == "ratio" else above
        labels.append(f"{subject} {second}".strip())
    return labels


def _merged(rows: list[list[str]]) -> list[tuple[str, list[str]]]:
    """Return names with their values, those of rows that belong to the one above joined to it."""
    merged: list[tuple[str, list[str]]] = []
    for name, *values in rows:
        if merged and (name.startswith(" ") or not name):
            above, known = merged[-1]
            joined = [" ".join(filter(None, pair)) for pair in zip(known, values, strict=True)]
            merged[-1] = (f"{above} ({name.strip()})" if name.strip() else above, joined)
        else:
            merged.append((name, values))
    return merged
