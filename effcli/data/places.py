"""Where a row came from, for error messages."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from datasets import Dataset

LINE_COLUMN = "__line__"
"""Column that text files get: the line, from 1, on which the row starts (quoted cells may span lines)."""


def data_columns(rows: Dataset) -> tuple[str, ...]:
    """Return the column names that the user wrote, in order."""
    return tuple(name for name in rows.column_names if name != LINE_COLUMN)


def place(rows: Dataset, index: int, name: str) -> str:
    """Return "'name', line 7" for files of lines, else "'name', row 6"; lines and rows count from 1."""
    if LINE_COLUMN in rows.column_names:
        return f"'{name}', line {rows[index][LINE_COLUMN]}"
    return f"'{name}', row {index + 1}"
