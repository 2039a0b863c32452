"""What a comparison says against itself: runs that did not begin alike, peaks of other batches, a busy machine."""

from __future__ import annotations

from typing import Any

import pytest

from effcli.measure.comparison_record import Attempt
from effcli.measure.record import RunRecord
from effcli.pipeline.comparing.notes import comparison_notes
from tests import comparisons


def ran(name: str, seed: int = 42, *, first_loss: float = 0.5, tokens: int = 128, **given: Any) -> Any:
    """Return a run with that loss of its first update, and whose peak was measured on rows of so many tokens."""
    record = comparisons.run(name, seed, updates=4)
    first = record.history[0].model_copy(update={"loss": first_loss})
    profiled = record.measured.profiled.model_copy(update={"tokens": tokens})
    measured = record.measured.model_copy(update={"profiled": profiled})
    record = record.model_copy(update={"history": (first, *record.history[1:]), "measured": measured})
    return Attempt(name=name, seed=seed, **given), record


def on_a_gpu(run: tuple[Attempt, RunRecord]) -> tuple[Attempt, RunRecord]:
    attempt, record = run
    return attempt, record.model_copy(update={"environment": {**record.environment, "device": "cuda:0"}})


def test_runs_that_began_alike_are_not_spoken_of() -> None:
    same = [ran("adamw"), ran("adafactor"), ran("adamw", 43, first_loss=0.6), ran("adafactor", 43, first_loss=0.6)]
    assert comparison_notes(same) == ()
    assert comparison_notes([]) == ()


def test_runs_that_did_not_begin_alike_are_named_with_their_losses() -> None:
    (note,) = comparison_notes([ran("adamw"), ran("adafactor", first_loss=0.5 * (1 + 1e-7)), ran("adamw", 43)])
    assert note == (
        "The losses of the first update differ with seed 42 (adamw 0.5, adafactor 0.50000005): start weights, rows or "
        "dropout were not the same."
    )


@pytest.mark.parametrize(("difference", "num_notes"), [(5e-6, 0), (2e-5, 1)])
def test_kernels_that_round_differently_are_let_pass(difference: float, num_notes: int) -> None:
    runs = [on_a_gpu(ran("adamw")), on_a_gpu(ran("adafactor", first_loss=0.5 * (1 + difference)))]
    assert len(comparison_notes(runs)) == num_notes


def test_peaks_of_batches_of_other_shapes_and_a_busy_machine_are_said() -> None:
    shapes, busy = comparison_notes([ran("adamw", others_share=0.09), ran("adafactor", tokens=64, others_share=0.425)])
    assert shapes == (
        "Peaks were measured on batches of different shape, which changes them (rows x tokens: adamw 8 x 128, "
        "adafactor 8 x 64)."
    )
    assert busy == (
        "Other processes took part of the processors' time during adafactor 42%: seconds per update and samples per "
        "second are not comparable."
    )
