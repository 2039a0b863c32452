"""The optimizer that the settings of a run name, in a file beside a saved state."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from effcli.engines.checkpoint import PROGRESS
from effcli.errors import DataError, UsageError
from effcli.optim import registry
from effcli.saved.safe_text import safe
from effcli.saved.settings import read_settings

_ARGUMENTS = "training_args.bin"


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedOptimizer:
    """An optimizer's name, that of its entry where it is listed, and the file that names it."""

    name: str
    file: str
    is_listed: bool

    def __str__(self) -> str:
        """Return in words what the file says."""
        return f"{self.file} names {self.name}" + ("" if self.is_listed else ", which is not listed")


def named_optimizer(folder: Path) -> NamedOptimizer | None:
    """Return the optimizer that the run's own settings in a checkpoint folder name; None without such, or damaged ones.

    A class by path is taken for one that is not listed: looking at it would import it.
    """
    for file, read in ((PROGRESS, _in_progress), (_ARGUMENTS, _in_arguments)):
        name = read(folder / file) if (folder / file).is_file() else None
        if not isinstance(name, str) or not name:
            continue
        try:
            entry = registry.find(name) if ":" not in name else None
        except UsageError:
            entry = None
        return NamedOptimizer(name=entry.name if entry else safe(name), file=file, is_listed=entry is not None)
    return None


def _in_progress(path: Path) -> Any:
    """Return the name in what effcli saves beside a checkpoint."""
    try:
        return json.loads(path.read_bytes())["spec"]["optim"]["name"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def _in_arguments(path: Path) -> Any:
    """Return the value of Trainer's `optim`, a member of an enum (transformers/training_args.py, 5.24)."""
    try:
        return read_settings(path).get("optim")
    except DataError:
        return None
