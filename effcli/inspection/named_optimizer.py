"""What the files beside a saved optimizer state say of the optimizer. Of a pickle only the opcodes are read."""

from __future__ import annotations

import json
import pickletools
import zipfile
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from effcli.engines.checkpoint import PROGRESS
from effcli.optim import registry
from effcli.optim.entry import OptimizerEntry

_ARGUMENTS = "training_args.bin"
_MOST_BYTES = 1_000_000
"""Of a pickle of settings, which takes a few thousand."""
_NEAR = 8
"""Opcodes between the key `optim` and its value, an enum made from its text (transformers/training_args.py, 5.24)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """An optimizer that a file names."""

    entry: OptimizerEntry
    file: str


def origin_of(folder: Path) -> Origin | None:
    """Return the optimizer that the run's own settings in a checkpoint folder name; None where there are none."""
    for file, read in ((PROGRESS, _of_effcli), (_ARGUMENTS, _of_trainer)):
        path = folder / file
        try:
            name = read(path) if path.is_file() else None
            if name is not None and ":" not in name:  # a class by path would be imported
                return Origin(entry=registry.find(name), file=file)
        except Exception:  # damaged in one of many ways, or of an optimizer that is not listed: it tells nothing
            continue
    return None


def _of_effcli(path: Path) -> str | None:
    return str(json.loads(path.read_bytes())["spec"]["optim"]["name"])


def _of_trainer(path: Path) -> str | None:
    """Return the value of `optim` in Trainer's arguments, found among the opcodes of their pickle, which never runs."""
    with zipfile.ZipFile(path) as archive:
        pickles = [item for item in archive.infolist() if item.filename.endswith("data.pkl")]
        if len(pickles) != 1 or pickles[0].file_size > _MOST_BYTES:
            return None
        opcodes = pickletools.genops(archive.read(pickles[0]))
        for _, argument, _ in opcodes:
            if argument == "optim":
                texts = [text for code, text, _ in islice(opcodes, _NEAR) if "UNICODE" in code.name]
                return str(texts[0]) if texts else None
    return None
