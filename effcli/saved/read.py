"""Finds out what a path is, and reads the optimizer state in it."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from effcli.errors import DataError
from effcli.saved.deepspeed import SHARDS, is_shard, read_deepspeed
from effcli.saved.distributed import read_distributed
from effcli.saved.folders import Place, find_in_folder
from effcli.saved.mapped import map_file
from effcli.saved.metadata import METADATA
from effcli.saved.optimizer import SavedOptimizer
from effcli.saved.safe_text import safe
from effcli.saved.state_dicts import PART, choose, find_optimizers, labelled
from effcli.saved.torch_file import load_torch_file
from effcli.units import listed

_DATA_FILE = ".distcp"


def read_saved(path: Path) -> SavedOptimizer:
    """Return the optimizer state that a file or folder holds; tensors are mapped, none is read.

    `PATH::KEY` takes the optimizer under a dotted key of a file that holds several.

    Raises:
        DataError: there is none, it cannot be read, or it asks for code to be run.
    """
    wanted = None
    if "\0" in str(path):
        raise DataError("a path cannot hold a zero byte")
    if PART in str(path) and not os.path.exists(path):
        text, _, wanted = str(path).rpartition(PART)
        path = Path(text)
    if path.name == METADATA or path.suffix == _DATA_FILE:
        path = path.parent
    place = find_in_folder(path) if os.path.isdir(path) else Place(path=path)
    saved = _read(place, wanted)
    return replace(saved, format=place.format or saved.format, notes=(*place.notes, *saved.notes))


def _read(place: Place, wanted: str | None) -> SavedOptimizer:
    if place.kind == "distributed":
        return read_distributed(place.path, wanted)
    if place.kind == "deepspeed":
        return read_deepspeed(list(place.path.glob(SHARDS)), place.path)
    return _read_file(place.path, wanted)


def _read_file(path: Path, wanted: str | None) -> SavedOptimizer:
    """Return the optimizer state of one file; `wanted` is the dotted key of one of several."""
    what = f"'{path}'"
    file = map_file(path)
    loaded = load_torch_file(file)
    if is_shard(loaded.value):
        return read_deepspeed([path], path)
    found, notes = choose(find_optimizers(loaded.value), wanted, what, loaded.value)
    state = labelled(found, what)
    if loaded.classes:
        names = listed([safe(name) for name in sorted(loaded.classes)], 6)
        notes += (f"Read as what they store, without their classes: {names}.",)
    if any(name.endswith(".DTensor") for name in loaded.classes):
        notes += (
            "One rank's part of sharded tensors: bytes are those of this rank, shapes and elements of the whole.",
        )
    return SavedOptimizer(
        format=loaded.format,
        path=path,
        states=state.states,
        groups=state.groups,
        members=state.members,
        names_known=state.names_known,
        notes=notes,
        files=(file,),
    )
