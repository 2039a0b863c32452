"""Finds out what a path is, and reads the optimizer state in it."""

from __future__ import annotations

from pathlib import Path

from effcli.saved.mapped import map_file
from effcli.saved.optimizer import SavedOptimizer
from effcli.saved.state_dicts import PART, choose, find_optimizers, labelled
from effcli.saved.torch_file import load_torch_file
from effcli.units import listed


def read_saved(path: Path) -> SavedOptimizer:
    """Return the optimizer state that a file or folder holds; tensors are mapped, none is read.

    `PATH::KEY` takes the optimizer under a dotted key of a file that holds several.

    Raises:
        DataError: there is none, it cannot be read, or it asks for code to be run.
    """
    wanted = None
    if PART in path.name and not path.exists():
        text, _, wanted = str(path).rpartition(PART)
        path = Path(text)
    return read_file(path, wanted)


def read_file(path: Path, wanted: str | None = None) -> SavedOptimizer:
    """Return the optimizer state of one file of torch; `wanted` is the dotted key of one of several.

    Raises:
        DataError: see `read_saved`.
    """
    what = f"'{path}'"
    loaded = load_torch_file(map_file(path))
    found, notes = choose(find_optimizers(loaded.value), wanted, what, loaded.value)
    state = labelled(found.state_dict, what)
    if loaded.classes:
        notes += (f"Read as what they store, without their classes: {listed(sorted(loaded.classes), 6)}.",)
    return SavedOptimizer(
        format=loaded.format,
        path=path,
        states=state.states,
        groups=state.groups,
        members=state.members,
        names_known=state.names_known,
        notes=notes,
    )
