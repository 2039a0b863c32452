"""`Tape`: what was allocated and freed, in order, while a part of an update was traced. No torch.

A tape is recorded once (`effcli.trace`), lengthened and joined with others (`effcli.memory.compose`), and played
to an allocator (`effcli.memory.replay`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from effcli.units import Category, Phase


class Alloc(NamedTuple):
    """A storage of `num_bytes` comes to life under the number `block`.

    `source` is the module that ran, or the parameter it belongs to; `kind` says in plain words what it is, such as
    "dropout masks" or "logits and loss", the same words for all storages of a kind.
    """

    block: int
    num_bytes: int
    category: Category
    source: str
    kind: str


class Free(NamedTuple):
    """The storage with the number `block` is given back."""

    block: int


class Mark(NamedTuple):
    """A place on the tape: a phase begins (`name` is a `Phase`), or a layer (`name` is its list, `index` its place)."""

    name: str
    index: int = 0


Event = Alloc | Free | Mark


class Begin(NamedTuple):
    """A phase of an update begins; only in programs, which join tapes. `update` and `micro` count from 0."""

    phase: Phase
    update: int
    micro: int = 0


Program = Sequence[Alloc | Free | Begin]
"""Tapes joined into the events of several updates; what precedes the first `Begin` is live before training."""
