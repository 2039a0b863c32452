"""What `--tolerance` asks after a run: is measured memory off its prediction by more than that? No torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from effcli.errors import PredictionError
from effcli.measure.comparison_record import ComparisonRecord
from effcli.measure.record import RunRecord
from effcli.units import format_bytes, format_count, listed

_PEAK = "peak allocated"
_OF_OTHERS = {
    "optimizer state of other ranks": "optimizer_state_bytes",
    "weights of other ranks": "weights_bytes",
    "gradients of other ranks": "gradients_bytes",
}
_ON_A_CPU = f"{_PEAK} (on a CPU --profile-memory measures it)"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Twins:
    """One amount as predicted and as measured, in bytes; None where that side does not have it."""

    label: str
    predicted_bytes: int | None
    measured_bytes: int | None

    @property
    def off(self) -> float | None:
        """Return by how many per cent of the prediction it is off; None where there is nothing to compare.

        Infinite where nothing was predicted and something is there.
        """
        if self.predicted_bytes is None or self.measured_bytes is None:
            return None
        difference = abs(self.measured_bytes - self.predicted_bytes)
        if difference == 0:
            return 0.0
        return 100 * difference / self.predicted_bytes if self.predicted_bytes else math.inf


def check_prediction(record: RunRecord, tolerance: float) -> str:
    """Return which amounts of a run are within `tolerance` per cent of their prediction, in a sentence.

    Weights, gradients, optimizer state and the peak of an update are compared, on CUDA what is reserved as well; an
    amount that was not predicted or not measured is not. Of several processes the amounts are those of the first, and
    state, weights and gradients of every other are compared too.

    Raises:
        PredictionError: one is off by more; one line with the worst.
    """
    return _verdict([("", record)], tolerance)


def check_predictions(record: ComparisonRecord, tolerance: float) -> str:
    """Return what `check_prediction` does of all runs of a comparison.

    Raises:
        PredictionError: an amount of a run is off by more; one line with the worst.
    """
    runs = [(attempt, record.record_of(attempt)) for attempt in record.attempts]
    seeds = len({attempt.seed for attempt, _ in runs}) > 1
    named = [(f"{a.name}, seed {a.seed}" if seeds else a.name, run) for a, run in runs if run is not None]
    return _verdict([(f"{name}: ", run) for name, run in named], tolerance)


def _verdict(runs: Sequence[tuple[str, RunRecord]], tolerance: float) -> str:
    """Return the sentence about runs, each with what its amounts are prefixed with; see `check_prediction`."""
    found = [(name, twins, run) for name, run in runs for twins in _amounts(run)]
    _refuse(((name, twins) for name, twins, _ in found), tolerance)
    left = {twins.label: _missing(twins, run) for _, twins, run in found if twins.off is None}
    compared = dict.fromkeys(twins.label for _, twins, _ in found if twins.label not in left)
    if not compared:
        return "--tolerance: nothing is compared, for want of measurements."
    within = f"Within {tolerance:.15g} % of the prediction" if tolerance else "As predicted, to the byte"
    also = f" Not compared: {listed(list(left.values()), None)}." if left else ""
    return f"{within}: {listed(_short(compared), None, last='and')}.{also}"


def _short(labels: Iterable[str]) -> list[str]:
    """Return the names of amounts with those of all ranks said once."""
    given = list(labels)
    if not set(_OF_OTHERS) <= set(given):
        return given
    own = [label for label in given if label not in _OF_OTHERS]
    return [f"{label} of every rank" if label == "gradients" else label for label in own]


def _refuse(named: Iterable[tuple[str, _Twins]], tolerance: float) -> None:
    """Raise where an amount is off by more than the tolerance; the first of equals counts as the worst."""
    over = [(twins.off, name, twins) for name, twins in named if twins.off is not None and twins.off > tolerance]
    if not over:
        return
    off, name, worst = max(over, key=lambda one: one[0])
    others = [f"{prefix}{twins.label}" for _, prefix, twins in over if twins is not worst]
    also = f"; also off: {listed(others)}" if others else ""
    raise PredictionError(
        f"{name}{worst.label}: {_difference(worst, off, tolerance)}; allowed {tolerance:.15g} %{also}"
    )


def _missing(twins: _Twins, run: RunRecord) -> str:
    """Return how an amount is called that cannot be compared, and what would let it."""
    on_cpu = run.environment.get("device") == "cpu"
    was_asked = bool(run.spec.get("loop", {}).get("profile_memory")) or bool(run.measured and run.measured.profiled)
    return _ON_A_CPU if twins.label == _PEAK and on_cpu and not was_asked else twins.label


def _amounts(run: RunRecord) -> Iterator[_Twins]:
    """Yield what is predicted of a run, each with its measured twin; peaks are those of updates, as a plan's are."""
    measured = run.measured
    peak_bytes = measured.update_peak_allocated_bytes if measured else None
    weights, gradients, state = (
        (measured.weights_bytes, measured.gradients_bytes, measured.optimizer_state_bytes) if measured else (None,) * 3
    )
    yield _Twins(label="optimizer state", predicted_bytes=run.optimizer.state_bytes, measured_bytes=state)
    yield _Twins(label="weights", predicted_bytes=run.model.weights_bytes, measured_bytes=weights)
    yield _Twins(label="gradients", predicted_bytes=run.model.gradients_bytes, measured_bytes=gradients)
    yield from _other_ranks(run)
    yield _Twins(label=_PEAK, predicted_bytes=run.comparable_planned_peak_bytes, measured_bytes=peak_bytes)
    if measured is not None and measured.allocator is not None:
        yield _Twins(
            label="peak reserved",
            predicted_bytes=run.comparable_planned_reserved_bytes,
            measured_bytes=measured.update_peak_reserved_bytes,
        )


def _other_ranks(run: RunRecord) -> Iterator[_Twins]:
    """Yield for state, weights and gradients those of the rank beyond the first that are furthest off.

    Nothing can be compared where a rank did not tell what it held, as in a run that failed.
    """
    predicted, measured = run.optimizer.per_rank[1:], run.measured.per_rank[1:] if run.measured else ()
    for label, name in _OF_OTHERS.items():
        amounts: list[tuple[int, int | None]] = [(getattr(rank, name), None) for rank in predicted]
        if len(predicted) == len(measured):
            amounts = [(getattr(one, name), getattr(two, name)) for one, two in zip(predicted, measured, strict=True)]
        found = [_Twins(label=label, predicted_bytes=one, measured_bytes=two) for one, two in amounts]
        if found:
            yield max(found, key=lambda twins: math.inf if twins.off is None else twins.off)


def _difference(twins: _Twins, off: float, tolerance: float) -> str:
    """Return both amounts and how far they are apart; in whole bytes where they read the same otherwise."""
    amounts = (twins.predicted_bytes or 0, twins.measured_bytes or 0)
    predicted, measured = map(format_bytes, amounts)
    if predicted == measured:
        predicted, measured = (f"{format_count(amount)} B" for amount in amounts)
    text = f"predicted {predicted}, measured {measured}"
    return text if math.isinf(off) else f"{text}, {_percent(off, tolerance)} off"


def _percent(off: float, tolerance: float) -> str:
    """Return a share with as many decimals, from one on, as show that it is above the tolerance."""
    texts = (f"{off:.{digits}f}" for digits in range(1, 12))
    return f"{next((text for text in texts if float(text) > tolerance), repr(off))} %"
