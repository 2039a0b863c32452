"""`MemoryPlan`: predicted bytes by phase, each part with its basis. No torch."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from effcli.facts import Fact
from effcli.units import Basis, Category, Phase

Fits = Literal["fits", "tight", "no"]


class PhaseBytes(Fact):
    """Bytes live at the highest moment of one phase; None where the part was not predicted.

    `communication_bytes` are held to exchange with other processes: parameters gathered for use, gradients on their
    way, and the buffers of both; 0 in a run of one process.
    """

    weights_bytes: int
    gradients_bytes: int
    optimizer_state_bytes: int
    activations_bytes: int | None
    temporaries_bytes: int | None
    communication_bytes: int = 0
    total_bytes: int | None


class PeakPart(Fact):
    """One named part of what is live at the peak: a kind of tensor, or a module."""

    name: str
    category: str
    num_bytes: int
    basis: str


class Change(Fact):
    """What one changed setting would do to the peak; `saved_bytes` is negative where it costs."""

    name: str
    flags: str
    peak_allocated_bytes: int
    saved_bytes: int
    peak_phase: str


class TimelinePoint(Fact):
    """Bytes live at one moment, by category; `update` and `micro` count from 0."""

    update: int
    micro: int
    phase: str
    weights_bytes: int
    gradients_bytes: int
    optimizer_state_bytes: int
    activations_bytes: int
    temporaries_bytes: int
    communication_bytes: int = 0


class MemoryPlan(Fact):
    """The plan of one update; everything about the peak is None or empty until activations are traced.

    `phases` are those of a later update, when the optimizer state exists throughout; `first_phases` those of the first.
    `peak_update` says which of the two holds the peak. `device_total_bytes` is reserved + context: the need.
    `first_step_bytes` is what torch's allocator is expected to count more after the first step than before it: the
    state on the device in the blocks that it gets, of which large ones may be larger than asked for. None on a CPU.
    `context_source` says in words what a learnt context was learnt from.
    """

    phases: dict[str, PhaseBytes]
    first_phases: dict[str, PhaseBytes] = Field(default_factory=dict)
    basis: dict[str, str]
    device: str | None = None
    peak_phase: str | None = None
    peak_update: Literal["first", "later"] | None = None
    peak_allocated_bytes: int | None = None
    peak_reserved_bytes: int | None = None
    first_step_bytes: int | None = None
    context_bytes: int | None = None
    context_source: str | None = None
    device_total_bytes: int | None = None
    budget_bytes: int | None = None
    fits: Fits | None = None
    largest_batch_size: int | None = None
    parts: tuple[PeakPart, ...] = ()
    modules: tuple[PeakPart, ...] = ()
    changes: tuple[Change, ...] = ()
    timeline: tuple[TimelinePoint, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def at_peak(self) -> PhaseBytes | None:
        """Return what is live at the peak; None until activations are traced."""
        phases = self.first_phases if self.peak_update == "first" else self.phases
        return phases.get(self.peak_phase) if self.peak_phase else None

    @property
    def categories(self) -> tuple[Category, ...]:
        """Return what its amounts are of; one process exchanges nothing."""
        exchanges = Category.COMMUNICATION in self.basis
        return tuple(category for category in Category if exchanges or category is not Category.COMMUNICATION)


def exact_plan(
    *,
    weights_bytes: int,
    gradients_bytes: int,
    optimizer_state_bytes: int,
    accum: int,
    state_basis: Basis = Basis.EXACT,
) -> MemoryPlan:
    """Return the parts that follow from shapes alone; activations and temporaries are left out, not guessed.

    The phases are those of an update after the first one, when the optimizer state exists throughout. Gradients are
    complete at the end of backward and live until the step has used them; with accumulation they also live through
    the forward of every micro-batch but the first.
    """
    parts = PhaseBytes(
        weights_bytes=weights_bytes,
        gradients_bytes=gradients_bytes,
        optimizer_state_bytes=optimizer_state_bytes,
        activations_bytes=None,
        temporaries_bytes=None,
        total_bytes=None,
    )
    forward = parts.model_copy(update={"gradients_bytes": gradients_bytes if accum > 1 else 0})
    return MemoryPlan(
        phases={Phase.FORWARD: forward, Phase.BACKWARD: parts, Phase.STEP: parts},
        basis={
            Category.WEIGHTS: Basis.EXACT,
            Category.GRADIENTS: Basis.EXACT,
            Category.OPTIMIZER_STATE: state_basis,
        },
    )
