"""Optimizer states in torch's distributed checkpoints: sizes from the metadata alone, values only when asked for."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch

from effcli.errors import DataError
from effcli.saved.mapped import MappedFile, Section, map_file
from effcli.saved.metadata import METADATA, Chunk, Entry, read_metadata
from effcli.saved.optimizer import Pieces, SavedOptimizer
from effcli.saved.state_dicts import FoundState, choose, labelled
from effcli.saved.torch_file import load_archive
from effcli.units import count

_STATE = re.compile(r"(?:(?P<before>.+?)\.)??(?P<part>state|param_groups)\.(?P<name>.+)\.(?P<key>[^.]+)", re.DOTALL)
"""A key that `flatten_optimizer_state_dict` made of several. As little as can be stands before `state`, since a module
may be called so too; neither state names nor settings have a dot."""
_OPTIMIZER = re.compile(r"optim", re.IGNORECASE)


def read_distributed(folder: Path, wanted: str | None = None) -> SavedOptimizer:
    """Return the optimizer state of a distributed checkpoint; its tensors are on the meta device.

    Raises:
        DataError: it holds none, or is damaged.
    """
    what = f"'{folder}'"
    entries = read_metadata(folder)
    shards = _Shards(folder)
    trees = _Trees(shards)
    for entry in entries:
        trees.add(entry)
    weights = {".".join(map(str, entry.keys)): torch.empty(0) for entry in entries if entry.shape is not None}
    found, notes = choose(trees.found(), wanted, what, weights)
    state = labelled(found, what)
    names = {chunk.file for entry in entries for chunk in entry.chunks}
    num_missing = sum(not (folder / name).is_file() for name in names)
    if num_missing or any(shards.is_cut_short(chunk) for entry in entries for chunk in entry.chunks):
        missing = (
            f"{num_missing} of {count(len(names), 'data file')} missing" if num_missing else "a data file cut short"
        )
        notes += (f"Incomplete: {missing}. Tensor sizes are the metadata's; settings of groups may lack.",)
    return SavedOptimizer(
        format="torch distributed checkpoint",
        path=folder,
        states=state.states,
        groups=state.groups,
        members=state.members,
        names_known=state.names_known or not state.groups,
        shards=max(len(names), 1),
        notes=notes,
        pieces=trees.pieces[found.keys],
        files=shards.files,
    )


class MissingDataError(DataError):
    """A data file is missing or ends too early; the metadata still tells the sizes."""


class _Shards:
    """The data files of a checkpoint, each mapped when it is first read."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._by_name: dict[str, MappedFile] = {}
        self._sizes: dict[str, int] = {}
        self.files: list[MappedFile] = []

    def is_cut_short(self, chunk: Chunk) -> bool:
        """Return whether a file ends before a part that should lie in it."""
        if chunk.file not in self._sizes:
            self._sizes[chunk.file] = (self._folder / chunk.file).stat().st_size
        return chunk.start + chunk.num_bytes > self._sizes[chunk.file]

    def values(self, entry: Entry) -> Iterator[Any]:
        """Yield the parts of an entry.

        Raises:
            MissingDataError: a file is missing or ends too early.
            DataError: it is damaged otherwise.
        """
        for chunk in entry.chunks:
            what = f"'{self._folder / chunk.file}'"
            if chunk.is_transformed:
                raise DataError(f"{what} is compressed, so that its values cannot be read; the sizes can")
            if not (self._folder / chunk.file).is_file():
                raise MissingDataError(f"{what} is missing, though '{METADATA}' names it")
            if chunk.file not in self._by_name:
                self._by_name[chunk.file] = map_file(self._folder / chunk.file)
                self.files.append(self._by_name[chunk.file])
            file = self._by_name[chunk.file]
            if chunk.start + chunk.num_bytes > file.num_bytes:
                raise MissingDataError(f"{what} is cut short: '{METADATA}' says that it goes on")
            yield load_archive(Section(file, chunk.start, chunk.start + chunk.num_bytes), what).value

    def tensors(self, entry: Entry) -> Iterator[torch.Tensor]:
        """Yield the parts of a tensor."""
        for value in self.values(entry):
            if not isinstance(value, torch.Tensor) or value.dtype != entry.dtype:
                raise DataError(f"'{self._folder}' is damaged: '{METADATA}' does not say what its files hold")
            yield value


class _Trees:
    """The optimizers of a checkpoint, put together from the keys of its entries."""

    def __init__(self, shards: _Shards) -> None:
        self._shards = shards
        self._states: dict[tuple[str, ...], dict[Any, dict[str, Any]]] = {}
        self._groups: dict[tuple[str, ...], dict[Any, dict[str, Any]]] = {}
        self.pieces: dict[tuple[str, ...], dict[tuple[str, str], Pieces]] = {}

    def add(self, entry: Entry) -> None:
        """Take one entry; what belongs to no optimizer is passed over."""
        split = _split(entry.keys)
        if split is None:
            return
        before, part, name, key = split
        within = self._states if part == "state" else self._groups
        owner = within.setdefault(before, {}).setdefault(name, {})
        if entry.shape is None:
            with suppress(MissingDataError):  # which is noted
                owner[key] = next(self._shards.values(entry), None)
            return
        owner[key] = torch.empty(entry.shape, dtype=entry.dtype, device="meta")
        if part == "state":
            self.pieces.setdefault(before, {})[str(name), key] = partial(self._shards.tensors, entry)

    def found(self) -> list[FoundState]:
        """Return the optimizers as `state_dict` would give them, with the keys that lead to each."""
        found = []
        for before in dict.fromkeys((*self._states, *self._groups)):  # an optimizer without state has groups alone
            states, groups = self._states.get(before, {}), self._groups.get(before, {})
            if not groups and not any(_OPTIMIZER.search(key) for key in before):
                continue  # a module that is called `state`
            self.pieces.setdefault(before, {})
            found.append(FoundState(keys=before, state_dict={"state": states, "param_groups": _groups(groups)}))
        return found


def _split(keys: tuple[str | int, ...]) -> tuple[tuple[str, ...], str, str | int, str] | None:
    """Return what leads to an optimizer, `state` or `param_groups`, a parameter's name or a group's number, the key."""
    for position, key in enumerate(keys):
        before = tuple(map(str, keys[:position]))
        rest = keys[position + 1 :]
        if key in ("state", "param_groups") and len(rest) >= 2:
            return before, str(key), rest[0], ".".join(map(str, rest[1:]))
        match = _STATE.fullmatch(str(key)) if not rest else None
        if match:
            before += (match["before"],) if match["before"] else ()
            return before, match["part"], match["name"], match["key"]
    return None


def _groups(groups: dict[Any, dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the groups; settings that were flattened by parameter are put together where they are alike."""
    if all(isinstance(name, int) for name in groups):
        return [groups[index] for index in sorted(groups)]
    alike: dict[str, dict[str, Any]] = {}
    for name, settings in groups.items():
        own = {key: value for key, value in settings.items() if key != "params"}
        alike.setdefault(repr(sorted(own.items(), key=lambda item: item[0])), {**own, "params": []})["params"].append(
            name
        )
    return list(alike.values())
