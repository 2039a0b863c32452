"""Opening text files so that a wrong encoding is named with its line."""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from effcli.errors import DataError

CHUNK_BYTES = 1 << 16


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


def _codec(encoding: str) -> str:
    try:
        "".encode(encoding)  # Unlike lookup alone, this refuses codecs that are not for text, such as base64.
        name = codecs.lookup(encoding).name
    except LookupError as error:
        raise DataError(f"unknown encoding '{encoding}'; use for example --encoding utf-8 or latin-1") from error
    return "utf-8-sig" if name == "utf-8" else name


def _undecodable(path: Path, encoding: str, codec: str) -> DataError:
    """Return an error that names the first line whose bytes do not fit, and an encoding to try."""
    decoder = codecs.getincrementaldecoder(codec)()
    line, found = 1, ""
    with path.open("rb") as file:
        start = file.read(4)
        file.seek(0)
        while chunk := file.read(CHUNK_BYTES):
            try:
                line += decoder.decode(chunk).count("\n")
            except UnicodeDecodeError as error:
                line += error.object[: error.start].count(b"\n")
                found = f" (byte 0x{error.object[error.start]:02x})"
                break
            except UnicodeError:  # utf-16 without the mark that it begins with
                break
    looks_utf16 = start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    guess = "utf-16" if looks_utf16 else "utf-8" if codec != "utf-8-sig" else "latin-1"
    return DataError(f"'{path}', line {line}: the text is not {encoding}{found}; use --encoding {guess}")
