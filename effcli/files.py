"""Files and folders that appear whole or not at all. No torch."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from safetensors import SafetensorError

from effcli.errors import WriteError, first_line
from effcli.units import MIB

DRAFT = ".writing-"
"""What the name of a file or folder begins with until it is complete."""
NEARLY_FULL_BYTES = 16 * MIB


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
    except OSError as error:
        with contextlib.suppress(OSError):
            draft.unlink()
        raise WriteError(f"could not write '{path}': {error.strerror}") from error


def write_folder(path: Path, fill: Callable[[Path], object]) -> None:
    """Let `fill` write into a folder that appears under its name only when `fill` has returned.

    Raises:
        WriteError: disk full or read-only.
    """
    draft = path.with_name(f"{DRAFT}{path.name}")
    try:
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
        fill(draft)
        _flush(draft)
        shutil.rmtree(path, ignore_errors=True)
        draft.rename(path)
    except (OSError, RuntimeError, SafetensorError) as error:  # torch and safetensors raise their own on a full disk
        shutil.rmtree(draft, ignore_errors=True)
        raise WriteError(f"could not write '{path}': {write_failure(error, path.parent)}") from error


def write_failure(error: Exception, folder: Path) -> str:
    """Return in a few words why writing into `folder` failed; libraries word a full disk in ways of their own."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    if shutil.disk_usage(folder).free < NEARLY_FULL_BYTES:
        return "no space left on the device"
    return first_line(error)


def _flush(folder: Path) -> None:
    """Make sure that the files are on the disk before the rename says so."""
    for path in (*folder.rglob("*"), folder):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
