"""Checkpoints as tests make and change them, and an object that no reader of one may unpickle."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from effcli.engines.checkpoint import MANIFEST, CheckpointProgress
from effcli.engines.window_schedule import START


def progress_after(update: int) -> CheckpointProgress:
    """Return the progress of a run of nine updates over one row."""
    return CheckpointProgress(
        update=update, spec={}, train_rows=1, rows_fingerprint="a", config_fingerprint="b", origin=START,
        first_window=1, total_updates=9, history=(), evaluations=(),
    )  # fmt: skip


def let_manifest_fit(checkpoint: Path, name: str) -> None:
    """Give a file that was changed in a checkpoint the checksum of what it holds now."""
    sums = json.loads((checkpoint / MANIFEST).read_text())
    sums[name] = hashlib.sha256((checkpoint / name).read_bytes()).hexdigest()
    (checkpoint / MANIFEST).write_text(json.dumps(sums))


class Trap:
    """An object whose unpickling runs code: it makes the file `marker`."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return Path.touch, (self.marker,)
