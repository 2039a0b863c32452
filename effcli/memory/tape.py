"""`Tape`: what was allocated and freed, in order, while a part of an update was traced. No torch.

A tape is recorded once (`effcli.trace`), lengthened and joined with others (`effcli.memory.compose`), and played
to an allocator (`effcli.memory.replay`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from effcli.units import Basis, Category, Phase


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
    """A place on the tape: a phase begins (`name` is a `Phase`), or a layer (`name`: its list, `number`: its place)."""

    name: str
    number: int = 0


Event = Alloc | Free | Mark

BATCH = "batch"
"""The kind of a micro-batch's own tensors."""
OUTPUTS = "outputs"
GRADIENT = "gradient"
END = "end of "
"""Before the name of a list of layers: the mark where one of its elements ends, forward and backward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroTape:
    """Events of forward and backward of one micro-batch, as they are when no gradient exists yet.

    Block numbers count within the tape. Marks: a `Phase` begins; `outputs`, where the forward's results have replaced
    those of the micro-batch before; `gradient` with a block, where a parameter's gradient is complete; elements of
    lists of layers. `gradients` are those blocks by the parameters' names, `copied` those of them that the engine
    copied instead of taking them over. `libraries` are blocks that libraries keep from their first use on. What else
    is still live at the end is what the loop holds on to.
    """

    events: tuple[Event, ...]
    gradients: Mapping[str, int]
    copied: frozenset[int] = frozenset()
    libraries: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTape:
    """Events from the clipping of gradients to their end: clip, optimizer step, `zero_grad(set_to_none=True)`.

    `gradients` are blocks by the parameters' names, live at the start and freed on the tape. `state` are blocks by a
    name of the optimizer's state: allocated on the tape of a first update, live at the start of a later one.
    """

    events: tuple[Event, ...]
    gradients: Mapping[str, int]
    state: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTapes:
    """The steps of the first and of a later update; `basis` is that of the temporaries.

    `built` is what making the optimizer allocates and keeps, before the first update: state or nothing.
    """

    built: StepTape
    first: StepTape
    later: StepTape
    basis: Basis
    notes: tuple[str, ...] = ()


class Begin(NamedTuple):
    """A phase of an update begins; only in programs, which join tapes. `update` and `micro` count from 0."""

    phase: Phase
    update: int
    micro: int = 0


Program = Sequence[Alloc | Free | Begin]
"""Tapes joined into the events of several updates; what precedes the first `Begin` is live before training."""
