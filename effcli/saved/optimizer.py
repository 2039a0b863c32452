"""What is read of a saved optimizer, whatever the file: states by label, groups, and where it comes from."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from effcli.saved.mapped import MappedFile

if TYPE_CHECKING:
    import torch

READ = (
    "a Trainer checkpoint, accelerate's save_state folder, a run of effcli, or an optimizer's file such as optimizer.pt"
)
"""What can be read, for messages."""

Pieces = Callable[[], Iterator["torch.Tensor"]]
"""Reads a tensor that lies in several places: yields its parts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedOptimizer:
    """One optimizer's saved state, not read but mapped.

    `format` says in words what kind of file or folder it is, `path` is what was read. `states` are by label: the
    parameter's name where `names_known`, else the number that `state_dict` gives it. `groups` are the `param_groups`
    without `params`, `members` the labels of each. Without `holds_whole_tensors` tensors are pieces of a flat one and
    have no parameter's shape. `shards` counts the files it is spread over; tensors of sharded checkpoints are on the
    meta device, and `pieces` reads them, by label and state name. `notes` are sentences; `files` are mapped, and more
    of them when `pieces` are read.
    """

    format: str
    path: Path
    states: dict[str, dict[str, Any]]
    groups: tuple[dict[str, Any], ...]
    members: tuple[tuple[str, ...], ...]
    names_known: bool
    holds_whole_tensors: bool = True
    shards: int = 1
    notes: tuple[str, ...] = ()
    pieces: Mapping[tuple[str, str], Pieces] = field(default_factory=dict, repr=False)
    files: Sequence[MappedFile] = field(default=(), repr=False)

    def forget(self) -> None:
        """Let go of the pages of the files that were read, so that they don't add up."""
        for file in self.files:
            file.forget()
