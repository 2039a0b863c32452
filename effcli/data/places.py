"""Where a row came from, for error messages, and under which column name that is kept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from effcli.errors import DataError

if TYPE_CHECKING:
    from datasets import Dataset

LINE_COLUMN = "__line__"
"""Column that text files get: the line, from 1, on which the row starts (quoted cells may span lines)."""


def data_columns(rows: Dataset) -> tuple[str, ...]:
    """Return the column names that the user wrote, in order."""
    return tuple(name for name in rows.column_names if name != LINE_COLUMN)


def check_column_names(names: Sequence[str], where: str) -> None:
    """Check that the column names of a file can be told apart; `where` names the file.

    Raises:
        DataError: one is used twice, or is the one that lines are kept under.
    """
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise DataError(f"{where}: the column name '{twice}' is used twice; found: {', '.join(names)}")
    if LINE_COLUMN in names:
        raise DataError(f"{where}: the column name '{LINE_COLUMN}' is reserved; rename it")


def place(rows: Dataset, index: int, name: str) -> str:
    """Return "'name', line 7" for files of lines, else "'name', row 6"; lines and rows count from 1."""
    if LINE_COLUMN in rows.column_names:
        return f"'{name}', line {rows[index][LINE_COLUMN]}"
    return f"'{name}', row {index + 1}"
