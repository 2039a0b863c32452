"""Lines of a history, made up, for tests of what is learnt from them and of how they are shown."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

MIB = 2**20


def pair(predicted: int | None, measured: int | None) -> dict[str, int | None]:
    """Return an amount as predicted and as measured, in bytes."""
    return {"predicted_bytes": predicted, "measured_bytes": measured}


def line(*, context_mib: float | None = 612, pairs: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    """Return a run on an RTX 4090 that measured its context; without one, a run that did not."""
    amounts: dict[str, Any] = {
        "optimizer_state": pair(134_004_336, 134_004_336),
        "peak_allocated": pair(1000 * MIB, 1010 * MIB),
        "peak_reserved": pair(1100 * MIB, 1120 * MIB),
        "process": pair(1581 * MIB, 1732 * MIB),
    }
    if context_mib is not None:
        amounts["context"] = pair(504_658_657, int(context_mib * MIB))
    return {
        "schema_version": 1, "date": "2030-01-31T10:11:12+01:00", "effcli": "0.1.0", "status": "completed",
        "device": "cuda:0", "card": "NVIDIA GeForce RTX 4090", "driver_version": "570.86.15", "torch": "2.9.0+cu130",
        "model": "distilbert-base-cased", "optimizer": "adam8bit", "engine": "pytorch", "precision": "bf16",
        "batch": "8 x 2", "pairs": amounts if pairs is None else pairs, "context_how": None, **changes,
    }  # fmt: skip


def on_cpu(**changes: Any) -> dict[str, Any]:
    """Return a run on a CPU that did not measure its peak."""
    state = {"optimizer_state": pair(4_363_296, 4_363_296)}
    nowhere = {"device": "cpu", "card": None, "driver_version": None, "torch": "2.9.0+cpu"}
    return line(**{**nowhere, "pairs": state, **changes})


def write(path: Path, *lines: dict[str, Any] | str) -> Path:
    """Write a history of these lines, the oldest first, and return its path."""
    texts = [one if isinstance(one, str) else json.dumps(one) for one in lines]
    path.write_text("".join(f"{text}\n" for text in texts))
    return path


def read(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a history as they are written, the oldest first."""
    return [json.loads(text) for text in path.read_text().splitlines()]
