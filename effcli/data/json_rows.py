"""Strict reading of JSON lines, and of a JSON file that holds a list of objects; values keep their type."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from effcli.data.places import LINE_COLUMN, check_column_names
from effcli.data.text_files import open_text, without_nul
from effcli.errors import DataError

INT64_LIMIT = 2**63
WORDS = {"text": "text", "bool": "true or false", "int": "a number", "float": "a number", "nested": "a nested value"}
PIECE_CHARACTERS = 1 << 18
"""Part of a list that is read at once; more is read only where one item is longer."""
SPACE = " \t\r\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonLayout:
    """How one file is read; `kinds` gives each column's kind: text, bool, int, float or nested."""

    kinds: dict[str, str]
    is_list: bool
    encoding: str
    num_rows: int


def read_layout(path: Path, *, encoding: str) -> JsonLayout:
    """Return the layout of a file after reading all of it once.

    Raises:
        DataError: wrong encoding, malformed JSON, something else than objects, one column with different kinds
            of values, text that is no Unicode, or no rows.
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
    check_column_names(tuple(kinds), f"'{path}'")
    for column in kinds:
        if "\0" in column or not _is_unicode(column):
            raise DataError(f"'{path}': the column name {column!a} is no text; rename it")
    return JsonLayout(
        kinds={name: kind or "text" for name, kind in kinds.items()},
        is_list=is_list,
        encoding=encoding,
        num_rows=num_rows,
    )


def json_rows(path: Path, layout: JsonLayout) -> Iterator[dict[str, Any]]:
    """Yield one dict a row with every column (absent ones None), and its line under `LINE_COLUMN`."""
    for line, values in _objects(path, layout.encoding, layout.is_list):
        yield {**{column: values.get(column) for column in layout.kinds}, LINE_COLUMN: line}


def _objects(path: Path, encoding: str, is_list: bool) -> Iterator[tuple[int, dict[str, Any]]]:
    with open_text(path, encoding) as file:
        if is_list:
            values = _list_items(path, without_nul(path, iter(partial(file.read, PIECE_CHARACTERS), "")))
        else:
            values = _line_items(path, without_nul(path, file))
        for line, value in values:
            if not isinstance(value, dict):
                raise DataError(f'\'{path}\', line {line}: not an object; write {{"text": ..., "label": ...}}')
            yield line, value


def _line_items(path: Path, lines: Iterator[str]) -> Iterator[tuple[int, Any]]:
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                yield number, json.loads(line, parse_constant=_no_number)
            except (ValueError, RecursionError) as error:
                raise _malformed(path, number, error, "write one object a line") from error


def _list_items(path: Path, pieces: Iterator[str]) -> Iterator[tuple[int, Any]]:
    """Yield (line, item) of a JSON list, item by item, so that each keeps its line and the text is never held whole."""
    text = _Pieces(pieces)
    text.skip_space()
    text.skip("[")
    text.skip_space()
    mark = "," if text.next_character != "]" else "]"
    while mark == ",":
        line = text.line
        try:
            item = text.decoded()
        except (ValueError, RecursionError) as error:
            raise _malformed(path, line, error, "check the brackets and commas of the list") from error
        yield line, item
        text.skip_space()
        mark = text.next_character
        if mark not in {",", "]"}:
            raise DataError(f"'{path}', line {line}: the list is not closed after this item; add ',' or ']'")
        if mark == ",":
            text.skip(mark)
            text.skip_space()
    text.skip("]")
    text.skip_space()
    if text.next_character:
        raise DataError(f"'{path}', line {text.line}: text after the end of the list; remove it")


class _Pieces:
    """Text that is read as far as it is needed, from a position that only moves on; `line` is its line."""

    def __init__(self, pieces: Iterator[str]) -> None:
        self._pieces = pieces
        self._decoder = json.JSONDecoder(parse_constant=_no_number)
        self._text, self._position = "", 0
        self.line = 1

    @property
    def next_character(self) -> str:
        """Return the character at the position; empty at the end."""
        return self._text[self._position : self._position + 1] if self._has_text() else ""

    def skip(self, passed: str) -> None:
        """Move on behind what is known to come next."""
        self._move_to(self._position + len(passed))

    def skip_space(self) -> None:
        """Move on to the next character that is no space."""
        while self._has_text():
            position = self._position
            while position < len(self._text) and self._text[position] in SPACE:
                position += 1
            self._move_to(position)
            if position < len(self._text):
                return

    def decoded(self) -> Any:
        """Return the value at the position and move on behind it.

        Raises:
            ValueError: it is malformed, or ends with the text.
        """
        while True:
            try:
                item, end = self._decoder.raw_decode(self._text, self._position)
            except ValueError:
                if not self._read_more():
                    raise
                continue
            # A number may go on in the next piece; what ends by a mark of its own does not.
            if end == len(self._text) and self._read_more():
                continue
            self._move_to(end)
            return item

    def _move_to(self, position: int) -> None:
        self.line += self._text.count("\n", self._position, position)
        self._position = position

    def _has_text(self) -> bool:
        return self._position < len(self._text) or self._read_more()

    def _read_more(self) -> bool:
        """Add as much text as is held, so that a long item is decoded a few times only; return whether there was any.

        What was passed is dropped.
        """
        held = self._text[self._position :]
        more: list[str] = []
        while sum(map(len, more)) <= len(held):
            piece = next(self._pieces, "")
            if not piece:
                break
            more.append(piece)
        self._text, self._position = held + "".join(more), 0
        return bool(more)


def _starts_with_bracket(path: Path, encoding: str) -> bool:
    with open_text(path, encoding) as file:
        pieces = iter(partial(file.read, PIECE_CHARACTERS), "")
        return next((piece for piece in pieces if piece.strip(SPACE)), "").lstrip(SPACE).startswith("[")


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
    is_text = isinstance(value, str)
    if not _is_unicode(value if is_text else json.dumps(value, ensure_ascii=False)):
        raise DataError(f"{where}: column '{column}' holds half a surrogate pair (such as \\ud83d), which is no text")
    return "text" if is_text else "nested"


def _is_unicode(text: str) -> bool:
    try:
        return text.isascii() or bool(text.encode())
    except UnicodeEncodeError:
        return False


def _no_number(_: str) -> None:
    """Read NaN and Infinity, which JSON does not have, as missing."""


def _malformed(path: Path, line: int, error: Exception, way_out: str) -> DataError:
    reason = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
    return DataError(f"'{path}', line {line}: malformed JSON ({reason}); {way_out}")
