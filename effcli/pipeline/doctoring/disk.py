"""Room on disks: what is free where runs and caches go, and whether it may be written."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from effcli.pipeline.doctoring.findings import Checks, note, ok, problem
from effcli.run_folder import RUNS
from effcli.units import GIB, format_bytes

_FEW_BYTES = GIB
"""A run keeps two checkpoints and the model: some three times weights and state, hardly less than that."""


def check_disk() -> Checks:
    """Return what room there is where run folders go when nothing else is said."""
    path = Path(RUNS).absolute()
    found = existing(path)
    remedy = "name another folder: --out FOLDER"
    if not is_writable(found):
        return (problem("disk", f"{path}, where runs go, cannot be written", remedy),)
    text = f"{path}, where runs go: {room(found)}"
    if shutil.disk_usage(found).free < _FEW_BYTES:
        return (note("disk", f"{text}, which is little for checkpoints", remedy),)
    return (ok("disk", text),)


def existing(path: Path) -> Path:
    """Return the folder itself, or the nearest one above it that exists; a link that leads nowhere is in its way."""
    return next((folder for folder in (path, *path.parents) if os.path.lexists(folder)), Path(path.anchor or "."))


def is_writable(path: Path) -> bool:
    """Return whether files can be made in a folder; false as well where it is none, or its disk is read-only."""
    return path.is_dir() and os.access(path, os.W_OK | os.X_OK)


def room(path: Path) -> str:
    """Return the free room of the disk that a folder is on, in words."""
    return f"{format_bytes(shutil.disk_usage(path).free)} free"
