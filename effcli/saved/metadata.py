"""The `.metadata` of torch's distributed checkpoints: which tensor lies where, without its data.

Written by `torch.distributed.checkpoint` as a pickle of `Metadata` (torch/distributed/checkpoint/metadata.py and
filesystem.py, 2.13), which is read here as plain attributes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from effcli.errors import DataError
from effcli.saved.checks import RefusedPickleError, checked_size, numel_of
from effcli.saved.mapped import Section, map_file
from effcli.saved.stand_ins import SavedObject
from effcli.saved.torch_file import run_pickle

METADATA = ".metadata"
_LONGEST_NAME = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Where one part of an entry lies: a file of the checkpoint, and the bytes in it; `offsets` within the tensor."""

    file: str
    start: int
    num_bytes: int
    offsets: tuple[int, ...]
    is_transformed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One entry of a checkpoint: its keys, its parts, and a tensor's shape and dtype, None for other values."""

    keys: tuple[str | int, ...]
    shape: tuple[int, ...] | None
    dtype: torch.dtype | None
    chunks: tuple[Chunk, ...]


def read_metadata(folder: Path) -> list[Entry]:
    """Return the entries of a distributed checkpoint, in their order.

    Raises:
        DataError: the metadata is damaged, or asks for code to be run.
    """
    what = f"'{folder / METADATA}'"
    value, _ = run_pickle(Section(map_file(folder / METADATA)), None, what)
    try:
        stored = _by_name(_mapping(value, "storage_data"))
        keys = getattr(value, "planner_data", None)
        keys = keys if isinstance(keys, dict) else {}
        named = _mapping(value, "state_dict_metadata").items()
        return [_entry(_name(name), facts, keys.get(name), stored.get(name, [])) for name, facts in named]
    except (AttributeError, KeyError, TypeError, ValueError, RefusedPickleError) as error:
        raise DataError(f"{what} is damaged: it is not the metadata of a distributed checkpoint") from error


def _mapping(value: Any, name: str) -> dict[Any, Any]:
    mapping = getattr(value, name)
    if not isinstance(value, SavedObject) or not isinstance(mapping, dict):
        raise TypeError(name)
    return mapping


def _name(value: Any) -> str:
    if not isinstance(value, str) or len(value) > _LONGEST_NAME:
        raise ValueError("a name")
    return value


def _by_name(storage_data: dict[Any, Any]) -> dict[str, list[Chunk]]:
    found: dict[str, list[Chunk]] = {}
    for index, place in storage_data.items():
        file, start, length = place.relative_path, place.offset, place.length
        if not isinstance(file, str) or Path(file).name != file:
            raise ValueError(file)
        offsets = getattr(index, "offset", None)
        chunk = Chunk(
            file=file,
            start=checked_size(start),
            num_bytes=checked_size(length),
            offsets=tuple(offsets) if offsets is not None else (),
            is_transformed=bool(getattr(place, "transform_descriptors", None)),
        )
        found.setdefault(index.fqn, []).append(chunk)
    return {name: sorted(chunks, key=lambda chunk: chunk.offsets) for name, chunks in found.items()}


def _entry(name: str, facts: Any, keys: Any, chunks: list[Chunk]) -> Entry:
    path = keys if isinstance(keys, tuple) and keys else (name,)
    path = tuple(key if isinstance(key, int) else _name(key) for key in path)
    if not hasattr(facts, "size"):
        return Entry(keys=path, shape=None, dtype=None, chunks=tuple(chunks))
    properties = vars(facts.properties)
    dtype = properties.get("dtype", (properties.get("state") or (None,))[0])
    if not isinstance(dtype, torch.dtype):
        raise TypeError(name)
    shape = tuple(facts.size)
    held = sum(numel_of(tuple(chunk.sizes)) for chunk in facts.chunks)
    if numel_of(shape) != held and math.prod(shape) > 0:
        raise ValueError(name)
    return Entry(keys=path, shape=shape, dtype=dtype, chunks=tuple(chunks))
