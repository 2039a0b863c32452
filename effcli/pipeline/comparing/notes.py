"""What keeps the numbers of a comparison from being comparable, as far as they show it themselves. No torch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from effcli.measure.comparison_record import Attempt
from effcli.measure.record import RunRecord
from effcli.setting_texts import mapping
from effcli.units import listed

BUSY_SHARE = 0.1
"""Share of the processors' time that others may take before it is said: about what a desktop takes at rest."""
_SAME_LOSS = 1e-5
"""Relative difference of losses that rounding explains: kernels of a GPU, and autocast, need not repeat every bit."""

Ran = tuple[Attempt, RunRecord]


def comparison_notes(ran: Sequence[Ran]) -> tuple[str, ...]:
    """Return one sentence for each thing that should be known before numbers of these runs are compared."""
    return (*_first_losses(ran), *_shapes(ran), *_busy(ran))


def _first_losses(ran: Sequence[Ran]) -> Iterator[str]:
    """Yield where runs of one seed did not begin alike: before the first update no optimizer has done anything."""
    for seed in dict.fromkeys(attempt.seed for attempt, _ in ran):
        losses = [
            (attempt.name, record.history[0].loss, _relative_tolerance(record))
            for attempt, record in ran
            if attempt.seed == seed and record.history and record.history[0].loss is not None
        ]
        if not losses:
            continue
        first = losses[0][1] or 0.0
        if any(not math.isclose(first, loss or 0.0, rel_tol=tolerance) for _, loss, tolerance in losses):
            shown = listed([f"{name} {loss:.9g}" for name, loss, _ in losses], shown=5)
            yield (
                f"The losses of the first update differ with seed {seed} ({shown}): start weights, rows or dropout "
                "were not the same."
            )


def _relative_tolerance(record: RunRecord) -> float:
    exact = record.environment.get("device") == "cpu" and mapping(record.spec.get("loop")).get("precision") == "fp32"
    return 0.0 if exact else _SAME_LOSS


def _shapes(ran: Sequence[Ran]) -> Iterator[str]:
    """Yield where peaks were measured on batches of different shape."""
    shapes = [
        (attempt, record.measured.profiled)
        for attempt, record in ran
        if record.measured is not None and record.measured.profiled is not None
    ]
    if len({(profiled.rows, profiled.tokens) for _, profiled in shapes}) > 1:
        shown = listed([f"{attempt.name} {profiled.rows} x {profiled.tokens}" for attempt, profiled in shapes], shown=5)
        yield f"Peaks were measured on batches of different shape, which changes them (rows x tokens: {shown})."


def _busy(ran: Sequence[Ran]) -> Iterator[str]:
    """Yield during which runs other processes took so much that times are not comparable."""
    busy = [attempt for attempt, _ in ran if (attempt.others_share or 0.0) >= BUSY_SHARE]
    if busy:
        shown = listed([f"{attempt.name} {attempt.others_share:.0%}" for attempt in busy], shown=5)
        yield (
            f"Other processes took part of the processors' time during {shown}: seconds per update and samples per "
            "second are not comparable."
        )
