"""Files and folders that appear whole or not at all. No torch."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

from effcli.errors import WriteError, first_line

DRAFT = ".writing-"
"""What the name of a file or folder begins with until it is complete."""

REPLACED = f"{DRAFT}replaced-"
"""What the name of a folder begins with for the moment in which another takes its place."""

_SYSTEM_ERROR = re.compile(r"\(os error (\d+)\)")


def write_text(path: Path, text: str) -> None:
    """Write a file of text in UTF-8; see `write_bytes`."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file, and the folders above it, whole or not at all.

    Raises:
        WriteError: disk full or read-only.
    """
    draft = path.with_name(f"{DRAFT}{path.name}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with draft.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
        _flush(path.parent)
    except BaseException as error:
        with contextlib.suppress(OSError):
            draft.unlink()
        _raise_explained(error, path)
        raise


def write_folder(path: Path, fill: Callable[[Path], object]) -> None:
    """Let `fill` write into a folder that appears under its name only when `fill` has returned.

    A folder that has the name already stays until then.

    Raises:
        WriteError: disk full or read-only; what else `fill` raises is passed on.
    """
    draft = path.with_name(f"{DRAFT}{path.name}")
    try:
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
        fill(draft)
        for written in (*draft.rglob("*"), draft):
            _flush(written)
        _take_place(draft, path)
        _flush(path.parent)
    except BaseException as error:
        shutil.rmtree(draft, ignore_errors=True)
        _raise_explained(error, path)
        raise


def remove_folder(path: Path) -> None:
    """Remove a folder so that what a kill leaves of it does not look complete; one that cannot be removed stays."""
    going = path.with_name(f"{REPLACED}{path.name}")
    with contextlib.suppress(OSError):
        path.rename(going)
    shutil.rmtree(going, ignore_errors=True)


def write_failure(error: BaseException) -> str | None:
    """Return in a few words why the system refused to write; None where the error says nothing of the kind.

    What is written in Rust raises errors of its own, which end in the system's number (safetensors 0.8, tokenizers
    0.23); torch's writer, in C++, one that the system's error is the context of (2.13).
    """
    link: BaseException | None = error
    while link is not None:
        if isinstance(link, OSError):
            return link.strerror or first_line(link)
        if found := _SYSTEM_ERROR.search(str(link)):
            return os.strerror(int(found[1]))
        link = link.__cause__ or link.__context__
    return None


def _raise_explained(error: BaseException, path: Path) -> None:
    """Raise the error that tells a person what could not be written, where that is what happened."""
    why = write_failure(error)
    if why is not None:
        raise WriteError(f"could not write '{path}': {why}") from error


def _take_place(draft: Path, path: Path) -> None:
    """Give the draft its name; a folder that has it goes only when the new one is there."""
    replaced = path.with_name(f"{REPLACED}{path.name}")
    if not path.exists():
        draft.rename(path)
        return
    shutil.rmtree(replaced, ignore_errors=True)
    path.rename(replaced)
    try:
        draft.rename(path)
    except BaseException:
        replaced.rename(path)
        raise
    shutil.rmtree(replaced, ignore_errors=True)


def _flush(path: Path) -> None:
    """Make sure that a file, or the names in a folder, are on the disk before a later step says so."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
