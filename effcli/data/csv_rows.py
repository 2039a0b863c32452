"""Strict reading of CSV and TSV files: every cell stays text, every fault has its line."""

from __future__ import annotations

import csv
import itertools
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from effcli.data.numerals import parse_number
from effcli.data.places import LINE_COLUMN, check_column_names
from effcli.data.text_files import open_text, without_nul
from effcli.errors import DataError
from effcli.units import count

DELIMITERS = (",", ";", "\t", "|")
SNIFFED_ROWS = 100
FIELD_LIMIT = 2**31 - 1
QUOTED_FIELD = re.compile(r'"(?:[^"]|"")*"')
SPACED_QUOTE = re.compile(r'[ \t]+"')


@dataclass(frozen=True, slots=True, kw_only=True)
class CsvLayout:
    """How one file is read. `written_numbers` are columns whose numbers stand without quotes, so mean numbers."""

    columns: tuple[str, ...]
    delimiter: str
    quoted: bool
    encoding: str
    written_numbers: frozenset[str]
    num_rows: int
    notes: tuple[str, ...]


def read_layout(path: Path, *, delimiter: str | None, encoding: str) -> CsvLayout:
    """Return the layout of a file after reading all of it, where tabs separate its fields twice.

    Raises:
        DataError: wrong encoding, a NUL byte, a malformed quote, a row with too few or too many fields, no rows, or
            column names that are missing or used twice.
    """
    csv.field_size_limit(max(csv.field_size_limit(), FIELD_LIMIT))
    separator = _resolve_delimiter(path, delimiter, encoding)
    quoted = not (separator == "\t" and _quotes_are_text(path, encoding))
    columns, num_rows = _columns(path, separator, quoted, encoding)
    notes = []
    if separator != "," and delimiter is None and path.suffix.lower() != ".tsv":
        notes.append(f"The fields of '{path}' are separated by {_shown(separator)}.")
    if not quoted:
        notes.append(f"Quote marks in '{path}' are read as text, because some fields start with a single one.")
    return CsvLayout(
        columns=columns,
        delimiter=separator,
        quoted=quoted,
        encoding=encoding,
        written_numbers=frozenset(columns) - _columns_of_quoted_numbers(path, separator, quoted, encoding, columns),
        num_rows=num_rows,
        notes=tuple(notes),
    )


def csv_rows(path: Path, layout: CsvLayout) -> Iterator[dict[str, str | int]]:
    """Yield one dict of text cells a row, and the line it starts on under `LINE_COLUMN`."""
    records = _records(path, layout.delimiter, layout.quoted, layout.encoding)
    next(records)
    for line, fields in records:
        if len(fields) == len(layout.columns):
            yield {**dict(zip(layout.columns, fields, strict=True)), LINE_COLUMN: line}


def _records(path: Path, delimiter: str, quoted: bool, encoding: str) -> Iterator[tuple[int, list[str]]]:
    """Yield (first line, fields) of each record; empty lines are left out."""
    line = 1
    with open_text(path, encoding) as lines:
        options: dict[str, Any] = {"quoting": csv.QUOTE_MINIMAL if quoted else csv.QUOTE_NONE}
        reader = csv.reader(without_nul(path, lines), delimiter=delimiter, strict=True, **options)
        try:
            for fields in reader:
                if fields:
                    yield line, fields
                line = reader.line_num + 1
        except csv.Error as error:
            fault = "a quoted field is never closed" if "end of data" in str(error) else f"malformed quotes ({error})"
            way_out = "close the quote, and write a quote mark inside quotes twice"
            raise DataError(f"'{path}', line {line}: {fault}; {way_out}") from error


def _columns(path: Path, delimiter: str, quoted: bool, encoding: str) -> tuple[tuple[str, ...], int]:
    """Return the column names and the number of rows, after checking that each has as many fields."""
    records = _records(path, delimiter, quoted, encoding)
    _, header = next(records, (0, []))
    if not header:
        raise DataError(f"'{path}' is empty; the first line must hold the column names, such as text,label")
    columns = tuple(name.strip() or f"column_{number}" for number, name in enumerate(header, start=1))
    found = ", ".join(columns)
    check_column_names(columns, f"'{path}'")
    num_rows = 0
    for line, fields in records:
        if len(fields) == len(columns):
            num_rows += 1
        elif not _is_blank(fields):
            raise DataError(
                f"'{path}', line {line}: {count(len(fields), 'field')} where the header has {len(columns)} ({found}); "
                f"{_way_out(fields, delimiter, quoted)}, or name another separator by --delimiter"
            )
    if not num_rows:
        raise DataError(f"'{path}' has a header ({found}) but no rows")
    return columns, num_rows


def _way_out(fields: list[str], delimiter: str, quoted: bool) -> str:
    """Return what to do about a row with too many or too few fields."""
    if quoted and any(SPACED_QUOTE.match(field) for field in fields):
        return "remove the spaces before the quote mark: quotes count where a field begins with them"
    if quoted:
        return f"put text that holds {_shown(delimiter)} in double quotes"
    return f"put text that holds {_shown(delimiter)} in double quotes, and no field with a single one"


def _is_blank(fields: list[str]) -> bool:
    return len(fields) == 1 and not fields[0].strip()


def _resolve_delimiter(path: Path, delimiter: str | None, encoding: str) -> str:
    if delimiter is not None:
        if len(delimiter) != 1 or delimiter in '"\r\n':
            raise DataError(f"--delimiter is {delimiter!r}; it must be one character, such as ',' or ';', or tab")
        return delimiter
    return "\t" if path.suffix.lower() == ".tsv" else _sniff(path, encoding)


def _sniff(path: Path, encoding: str) -> str:
    """Return the separator of the header line; where several could be, the first that gives rows of equal width."""
    with open_text(path, encoding) as lines:
        head = [line for line in itertools.islice(lines, SNIFFED_ROWS) if line.strip()]
    if not head:
        return ","
    candidates = [mark for mark in DELIMITERS if len(next(csv.reader(head[:1], delimiter=mark))) > 1]
    for mark in candidates if len(candidates) > 1 else []:
        if len({len(fields) for fields in csv.reader(head, delimiter=mark) if fields}) == 1:
            return mark
    return candidates[0] if candidates else ","


def _quotes_are_text(path: Path, encoding: str) -> bool:
    """Return whether a tab-separated file is written without quoting, as the files of GLUE are.

    So it is when all lines have equally many fields and some field starts with a quote mark that does not enclose
    it. Read as quoting, such a mark would swallow the lines up to the next one.
    """
    width, stray = 0, False
    with open_text(path, encoding) as lines:
        for line in lines:
            fields = line.rstrip("\r\n").split("\t")
            if _is_blank(fields):
                continue
            width = width or len(fields)
            if len(fields) != width:
                return False
            stray = stray or any(field.startswith('"') and not QUOTED_FIELD.fullmatch(field) for field in fields)
    return stray


def _columns_of_quoted_numbers(
    path: Path, delimiter: str, quoted: bool, encoding: str, columns: tuple[str, ...]
) -> frozenset[str]:
    """Return the columns whose first cells are all numbers in quotes: text on purpose."""
    if not quoted:
        return frozenset()
    remaining = set(columns)
    with open_text(path, encoding) as lines:
        raw_lines: list[str] = []
        reader = csv.reader(_remembered(lines, raw_lines), delimiter=delimiter)
        for fields in itertools.islice(reader, 1, SNIFFED_ROWS):
            raw = "".join(raw_lines)
            raw_lines.clear()
            raw_cells = raw.rstrip("\r\n").split(delimiter)
            if len(raw_cells) != len(fields):
                raw_cells = [raw] * len(fields)
            for column, cell, raw_cell in zip(columns, fields, raw_cells, strict=False):
                if parse_number(cell) is None or f'"{cell}"' not in raw_cell:
                    remaining.discard(column)
    return frozenset(remaining)


def _remembered(lines: Iterable[str], memory: list[str]) -> Iterator[str]:
    for line in lines:
        memory.append(line)
        yield line


def _shown(delimiter: str) -> str:
    return "tabs" if delimiter == "\t" else f"'{delimiter}'"
