"""What all tables look like: built from `Text`, never from markup, and nothing cut off where a terminal is narrow."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from rich.box import Box
from rich.table import Table
from rich.text import Text

from effcli.report.text import plain

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

_RULED = Box("    \n    \n ── \n    \n ── \n ── \n    \n    \n")


def print_parts(parts: Iterable[RenderableType], console: Console) -> None:
    """Print parts with a blank line between; tables without rows are left out."""
    for number, part in enumerate(part for part in parts if not isinstance(part, Table) or part.row_count):
        if number:
            console.print()
        _print(part, console)


def ruled_table(title: str, first: str, *numbers: str) -> Table:
    """Return an empty table with a column of text and columns of numbers."""
    table = Table(
        title=Text(title, style="bold"),
        title_justify="left",
        box=_RULED,
        show_edge=False,
        pad_edge=False,
        padding=(0, 1, 0, 0),
        header_style="dim",
    )
    table.add_column(first, overflow="fold")
    for name in numbers:
        table.add_column(name, justify="right", overflow="fold")
    return table


def fact_grid(pairs: Iterable[tuple[str, str]]) -> Table:
    """Return labels with their values beside them."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", min_width=10)
    grid.add_column(overflow="fold")
    for label, value in pairs:
        grid.add_row(label, Text(plain(value), overflow="fold"))
    return grid


def _print(part: RenderableType, console: Console) -> None:
    """Print a part; without a terminal, also without the blanks that fill up its lines."""
    if console.is_terminal:
        console.print(part)
        return
    with console.capture() as capture:
        console.print(part)
    console.out("\n".join(line.rstrip() for line in capture.get().splitlines()), highlight=False)
