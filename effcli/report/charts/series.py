"""Losses of a run as points to draw: smoothed, and thinned where there are more than a screen can show."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from effcli.measure.record import RunRecord

_SHARE = 15
"""A window of smoothing is this part of a run's updates."""
_SMOOTH_POINTS = 150
_RAW_POINTS = 6000
"""How many points all runs together may have; a run keeps at least `_FEWEST`."""
_FEWEST = 60


class Point(NamedTuple):
    """The loss at one update; `training_s` is None where the record does not say when that was."""

    update: int
    training_s: float | None
    loss: float


def losses(run: RunRecord) -> tuple[Point, ...]:
    """Return the training losses that are numbers, in order."""
    return tuple(
        Point(line.update, line.training_s, line.loss)
        for line in run.history
        if line.loss is not None and math.isfinite(line.loss)
    )


def evaluations(run: RunRecord) -> list[Point]:
    """Return the evaluation losses that are numbers, each at the time of training at which its update ended."""
    times = {line.update: line.training_s for line in run.history}
    return [
        Point(line.update, times.get(line.update), line.eval_loss)
        for line in run.eval
        if line.eval_loss is not None and math.isfinite(line.eval_loss)
    ]


def window_of(num_points: int) -> int:
    """Return over how many losses `smoothed` takes the mean."""
    return max(1, round(num_points / _SHARE))


def smoothed(points: Sequence[Point]) -> list[Point]:
    """Return the mean of the losses of the window that ends there, at as many points as a line needs.

    Each window is summed anew: in a running sum one huge loss would spoil all that follow.
    """
    window, step = window_of(len(points)), max(1, math.ceil(len(points) / _SMOOTH_POINTS))
    places = [*range(0, len(points) - 1, step), *([len(points) - 1] if points else [])]
    windows = ((points[place], points[max(0, place + 1 - window) : place + 1]) for place in places)
    return [last._replace(loss=math.fsum(point.loss for point in own) / len(own)) for last, own in windows]


def points_per_run(num_runs: int) -> int:
    """Return to how many points a run is thinned where so many runs are drawn."""
    return max(_FEWEST, _RAW_POINTS // max(1, num_runs))


def thinned(points: Sequence[Point], most: int) -> list[Point]:
    """Return at most `most` points: the lowest and the highest of stretches of equal length, and both ends."""
    if len(points) <= most:
        return list(points)
    stretches = max(1, (most - 2) // 2)
    kept = {0, len(points) - 1}
    for stretch in range(stretches):
        start, end = (len(points) * edge // stretches for edge in (stretch, stretch + 1))
        places = range(start, end)
        kept |= {min(places, key=lambda place: points[place].loss), max(places, key=lambda place: points[place].loss)}
    return [points[place] for place in sorted(kept)]
