"""`MemoryPlan`: predicted bytes by phase, each part with its basis. No torch."""

from __future__ import annotations

from typing import Literal

from effcli.facts import Fact
from effcli.units import Basis, Category, Phase


class PhaseBytes(Fact):
    """Bytes live in one phase; None where the part was not predicted."""

    weights_bytes: int
    gradients_bytes: int
    optimizer_state_bytes: int
    activations_bytes: int | None
    temporaries_bytes: int | None
    total_bytes: int | None


class MemoryPlan(Fact):
    """The plan of one update; the peak is None until activations are traced."""

    phases: dict[str, PhaseBytes]
    basis: dict[str, str]
    peak_phase: str | None = None
    peak_allocated_bytes: int | None = None
    peak_reserved_bytes: int | None = None
    context_bytes: int | None = None
    device_total_bytes: int | None = None
    fits: Literal["fits", "tight", "no"] | None = None
    largest_batch_size: int | None = None


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
