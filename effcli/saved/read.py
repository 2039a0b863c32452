"""Finds out what a path is, and reads the optimizer state in it."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from effcli.errors import DataError
from effcli.saved.deepspeed import SHARDS, is_shard, read_deepspeed
from effcli.saved.distributed import read_distributed
from effcli.saved.folders import Location, find_in_folder
from effcli.saved.mapped import map_file
from effcli.saved.metadata import METADATA
from effcli.saved.optimizer import READ, SavedOptimizer
from effcli.saved.safe_text import safe
from effcli.saved.state_dicts import PART, choose, find_optimizers, labelled
from effcli.saved.torch_file import OtherKindError, load_torch_file
from effcli.units import listed

_DATA_FILE = ".distcp"
_RANKS_OWN = frozenset(("torch.distributed.tensor.DTensor", "torch.distributed._tensor.api.DTensor"))
"""Class of tensors that are spread over ranks, as torch calls it since 2.5 and called it before."""


def read_saved(path: Path) -> SavedOptimizer:
    """Return the optimizer state that a file or folder holds; tensors are mapped, none is read.

    `PATH::KEY` takes the optimizer under a dotted key of a file that holds several.

    Raises:
        DataError: there is none, it cannot be read, or it asks for code to be run.
    """
    path, wanted = split_key(path)
    if path.name == METADATA or path.suffix == _DATA_FILE:
        path = path.parent
    place = find_in_folder(path) if os.path.isdir(path) else Location(path=path)
    saved = _read(place, wanted)
    return replace(saved, format=place.format or saved.format, notes=(*place.notes, *saved.notes))


def split_key(path: Path) -> tuple[Path, str | None]:
    """Return a path, and the key behind it where it is `PATH::KEY`; None where there is a file of that name.

    Raises:
        DataError: no path can be called so.
    """
    if "\0" in str(path):
        raise DataError("a path cannot hold a zero byte")
    if PART not in str(path) or os.path.lexists(path):
        return path, None
    text, _, key = str(path).rpartition(PART)
    return Path(text), key


def _read(place: Location, wanted: str | None) -> SavedOptimizer:
    if place.kind == "distributed":
        return read_distributed(place.path, wanted)
    if place.kind == "deepspeed":
        return read_deepspeed(list(place.path.glob(SHARDS)), place.path)
    return _read_file(place.path, wanted)


def _read_file(path: Path, wanted: str | None) -> SavedOptimizer:
    """Return the optimizer state of one file; `wanted` is the dotted key of one of several."""
    what = f"'{path}'"
    file = map_file(path)
    try:
        loaded = load_torch_file(file)
    except OtherKindError as error:
        raise DataError(f"{error}; give {READ}") from error
    if is_shard(loaded.value):
        return read_deepspeed([path], path)
    found, notes = choose(find_optimizers(loaded.value), wanted, what, loaded.value)
    state = labelled(found, what)
    if loaded.classes:
        names = listed([safe(name) for name in sorted(loaded.classes)], 6)
        notes += (f"Read as what they store, without their classes: {names}.",)
    if loaded.classes & _RANKS_OWN:
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
