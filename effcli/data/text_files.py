"""Opening text files so that a wrong encoding is named with its line."""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from effcli.errors import DataError

CHUNK_BYTES = 1 << 16
LINE_END = re.compile(r"\r\n|\r|\n")
MARKS = {
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}
"""First bytes -> encoding; UTF-32 comes first, because its mark begins with that of UTF-16."""
OTHER_KINDS = {
    b"\x1f\x8b": "a gzip file; unpack it first",
    b"PK\x03\x04": "a zip file or a spreadsheet; unpack it, or save the sheet as CSV",
    b"BZh": "a bzip2 file; unpack it first",
    b"\xfd7zXZ": "an xz file; unpack it first",
    b"(\xb5/\xfd": "a zstd file; unpack it first",
    b"PAR1": "a Parquet file; let its name end in .parquet",
}
"""First bytes -> what a file is that is no text, and what to do."""


@contextmanager
def open_text(path: Path, encoding: str) -> Iterator[TextIO]:
    """Open `path` for reading with line ends kept as they are; a byte-order mark is dropped.

    Raises:
        DataError: the file cannot be opened, the encoding is unknown, or (inside the block) bytes do not fit it.
    """
    codec = _codec(encoding)
    try:
        with path.open(encoding=codec, newline="") as lines:
            yield lines
    except UnicodeError as error:
        raise _undecodable(path, encoding, codec) from error
    except OSError as error:
        raise DataError(f"cannot read '{path}': {error.strerror or error}") from error


def without_nul(path: Path, lines: Iterable[str]) -> Iterator[str]:
    """Yield lines, or other pieces of the text of `path` from its start, as they are.

    Raises:
        DataError: one of them holds a NUL, which no text does: the file is damaged or of another encoding.
    """
    line = 1
    for piece in lines:
        if "\0" in piece:
            line += piece.partition("\0")[0].count("\n")
            guess = _wide_encoding(path)
            way_out = f"use --encoding {guess}" if guess else "the file may be damaged"
            raise DataError(f"'{path}', line {line}: a NUL byte, which is no text; {way_out}")
        yield piece
        line += piece.count("\n") or piece.endswith("\r")


def _wide_encoding(path: Path) -> str:
    """Return the encoding of a file without a byte-order mark that has two bytes a letter; empty for other files."""
    with path.open("rb") as file:
        first, second = file.read(2).ljust(2, b"x")
    return "utf-16-le" if first and not second else "utf-16-be" if second and not first else ""


def _codec(encoding: str) -> str:
    try:
        "".encode(encoding)  # Unlike lookup alone, this refuses codecs that are not for text, such as base64.
        b"\x80".decode(encoding, "replace")  # and those for single words, such as idna
        name = codecs.lookup(encoding).name
    except (LookupError, UnicodeError) as error:
        raise DataError(f"unknown encoding '{encoding}'; use for example --encoding utf-8 or latin-1") from error
    return "utf-8-sig" if name == "utf-8" else name


def _undecodable(path: Path, encoding: str, codec: str) -> DataError:
    """Return an error that names the first line whose bytes do not fit, and an encoding to try."""
    decoder = codecs.getincrementaldecoder(codec)()
    before, wrong = "", b""
    with path.open("rb") as file:
        start = file.read(8)
        file.seek(0)
        while chunk := file.read(CHUNK_BYTES):
            try:
                before += "".join(LINE_END.findall(decoder.decode(chunk)))
            except UnicodeDecodeError as error:
                before += error.object[: error.start].decode(codec, "replace")
                wrong = error.object[error.start : error.start + 1]
                break
            except UnicodeError:  # utf-16 without the mark that it begins with
                break
    other = next((kind for mark, kind in OTHER_KINDS.items() if start.startswith(mark)), None)
    if other is not None:
        return DataError(f"'{path}' is no text but {other}")
    line, found = 1 + len(LINE_END.findall(before)), f" (byte 0x{wrong[0]:02x})" if wrong else ""
    return DataError(
        f"'{path}', line {line}: the text is not {encoding}{found}; use --encoding {_likely(start, wrong, codec)}"
    )


def _likely(start: bytes, wrong: bytes, codec: str) -> str:
    """Return the encoding that a file most likely has whose bytes do not fit `codec`."""
    marked = next((name for mark, name in MARKS.items() if start.startswith(mark)), None)
    if marked is not None:
        return marked
    if codec != "utf-8-sig":
        return "utf-8"
    # Latin-1 has control characters there, Windows' code page quotation marks, dashes and the sign of the euro.
    return "cp1252" if b"\x80" <= wrong <= b"\x9f" else "latin-1"
