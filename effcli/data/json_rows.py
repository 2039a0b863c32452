"""Strict reading of JSON lines, and of a JSON file that holds a list of objects; values keep their type."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from effcli.data.places import LINE_COLUMN
from effcli.data.text_files import open_text
from effcli.errors import DataError

INT64_LIMIT = 2**63
WORDS = {"text": "text", "bool": "true or false", "int": "a number", "float": "a number", "nested": "a nested value"}


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonLayout:
    """How one file is read; `kinds` gives each column's kind: text, bool, int, float or nested."""

    kinds: dict[str, str]
    is_list: bool
    encoding: str


def read_layout(path: Path, *, encoding: str) -> JsonLayout:
    """Return the layout of a file after reading all of it once.

    Raises:
        DataError: wrong encoding, malformed JSON, something else than objects, one column with different kinds
            of values, or no rows.
    """
    is_list = path.suffix.lower() == ".json" and _starts_with_bracket(path, encoding)
    kinds: dict[str, str] = {}
    first_lines: dict[str, int] = {}
    num_rows = 0
    for line, values in _objects(path, encoding, is_list):
        num_rows += 1
        for column, value in values.items():
            kind = _kind(value, column, f"'{path}', line {line}")
            known = kinds.setdefault(column, "")
            if kind and not known:
                kinds[column], first_lines[column] = kind, line
            elif kind and kind != known:
                if {kind, known} != {"int", "float"}:
                    raise DataError(
                        f"'{path}', line {line}: column '{column}' holds {WORDS[kind]}, but {WORDS[known]} in line "
                        f"{first_lines[column]}; write all values of a column alike"
                    )
                kinds[column] = "float"
    if not num_rows:
        raise DataError(f'\'{path}\' is empty; each line must hold one object, such as {{"text": ..., "label": ...}}')
    if LINE_COLUMN in kinds:
        raise DataError(f"'{path}': the column name '{LINE_COLUMN}' is reserved; rename it")
    return JsonLayout(kinds={name: kind or "text" for name, kind in kinds.items()}, is_list=is_list, encoding=encoding)


def json_rows(path: Path, layout: JsonLayout) -> Iterator[dict[str, Any]]:
    """Yield one dict a row with every column (absent ones None), and its line under `LINE_COLUMN`."""
    for line, values in _objects(path, layout.encoding, layout.is_list):
        yield {**{column: values.get(column) for column in layout.kinds}, LINE_COLUMN: line}


def _objects(path: Path, encoding: str, is_list: bool) -> Iterator[tuple[int, dict[str, Any]]]:
    with open_text(path, encoding) as lines:
        values = _list_items(path, lines.read()) if is_list else _line_items(path, lines)
        for line, value in values:
            if not isinstance(value, dict):
                raise DataError(f'\'{path}\', line {line}: not an object; write {{"text": ..., "label": ...}}')
            yield line, value


def _line_items(path: Path, lines: Iterator[str]) -> Iterator[tuple[int, Any]]:
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                yield number, json.loads(line, parse_constant=_no_number)
            except ValueError as error:
                raise _malformed(path, number, error, "write one object a line") from error


def _list_items(path: Path, text: str) -> Iterator[tuple[int, Any]]:
    """Yield (line, item) of a JSON list, item by item, so that each keeps its line."""
    decoder = json.JSONDecoder(parse_constant=_no_number)
    position, line, counted = _skip_space(text, text.index("[") + 1), 1, 0
    expect_item = text[position : position + 1] != "]"
    while expect_item:
        line, counted = line + text.count("\n", counted, position), position
        try:
            item, position = decoder.raw_decode(text, position)
        except ValueError as error:
            raise _malformed(path, line, error, "check the brackets and commas of the list") from error
        yield line, item
        position = _skip_space(text, position)
        mark = text[position : position + 1]
        if mark not in {",", "]"}:
            raise DataError(f"'{path}', line {line}: the list is not closed after this item; add ',' or ']'")
        expect_item = mark == ","
        position = _skip_space(text, position + 1)


def _skip_space(text: str, position: int) -> int:
    while position < len(text) and text[position] in " \t\r\n":
        position += 1
    return position


def _starts_with_bracket(path: Path, encoding: str) -> bool:
    with open_text(path, encoding) as lines:
        return next((line for line in lines if line.strip()), "").lstrip().startswith("[")


def _kind(value: Any, column: str, where: str) -> str:
    """Return the kind of a value; empty for null."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "bool"
    if isinstance(value, int):
        if not -INT64_LIMIT <= value < INT64_LIMIT:
            raise DataError(f"{where}: the number in column '{column}' does not fit 64 bits; write it as text")
        return "int"
    if isinstance(value, float):
        return "float"
    return "text" if isinstance(value, str) else "nested"


def _no_number(_: str) -> None:
    """Read NaN and Infinity, which JSON does not have, as missing."""


def _malformed(path: Path, line: int, error: ValueError, way_out: str) -> DataError:
    reason = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
    return DataError(f"'{path}', line {line}: malformed JSON ({reason}); {way_out}")
