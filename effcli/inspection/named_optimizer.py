"""The optimizer that the settings of a run name, in a file beside a saved state."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from effcli.engines.checkpoint import PROGRESS
from effcli.errors import DataError, UsageError
from effcli.optim import registry
from effcli.optim.entry import OptimizerEntry
from effcli.saved.settings import read_settings

_ARGUMENTS = "training_args.bin"


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedOptimizer:
    """An optimizer, and the file that names it."""

    entry: OptimizerEntry
    file: str


def named_optimizer(folder: Path) -> NamedOptimizer | None:
    """Return the optimizer that the run's own settings in a checkpoint folder name.

    None where there are no settings, or damaged ones, or where they name one that is not listed.
    """
    for file, read in ((PROGRESS, _in_progress), (_ARGUMENTS, _in_arguments)):
        name = read(folder / file) if (folder / file).is_file() else None
        if not name or ":" in name:  # a class by path would be imported
            continue
        try:
            return NamedOptimizer(entry=registry.find(name), file=file)
        except UsageError:
            continue
    return None


def _in_progress(path: Path) -> str | None:
    """Return the name in what effcli saves beside a checkpoint."""
    try:
        return str(json.loads(path.read_bytes())["spec"]["optim"]["name"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def _in_arguments(path: Path) -> str | None:
    """Return the value of Trainer's `optim`, a member of an enum (transformers/training_args.py, 5.24)."""
    try:
        return str(read_settings(path).get("optim") or "") or None
    except DataError:
        return None
