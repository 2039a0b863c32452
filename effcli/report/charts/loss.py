"""Loss curves: every loss faint, their running mean clear, evaluations as dots."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

from effcli.report.charts.names import Named, key_scale
from effcli.report.charts.series import Point, evaluations, points_per_run, smoothed, thinned, window_of
from effcli.report.charts.style import Drawn, Rows
from effcli.units import count

Against = Literal["updates", "time"]
_HEIGHT = 280
_LOGARITHMIC = 30
"""Where the highest smoothed loss is so many times the lowest, the scale is logarithmic."""
_UNITS_OF_TIME = ((7200, 3600, "hours"), (180, 60, "minutes"), (0, 1, "seconds"))


def loss_chart(names: Sequence[Named], against: Against, *, width: int | str, ink: str, legend: bool) -> Drawn | None:
    """Return the losses of all runs; None where no run has one, or none says when its updates ended."""
    import altair as alt

    scale, title = _scale(names, against)
    if scale is None:
        return None
    rows = Rows(f"loss-{against}")
    smooth = list(_rows(names, smoothed, scale))
    levels = [row["loss"] for row in smooth]
    logarithmic = min(levels) > 0 and max(levels) > _LOGARITHMIC * min(levels)
    means = rows.add(smooth)
    most = points_per_run(sum(len(named.runs) for named in names))
    raw = rows.add(_rows(names, lambda points: thinned(points, most), scale, positive=logarithmic))
    dots = rows.add(_rows(names, None, scale, positive=logarithmic))
    place = _place(title, logarithmic=logarithmic)
    lines = {**place, "detail": "run:N", **key_scale(names, legend=legend, dashes=True)}
    points = {**place, **key_scale(names, legend=False)}
    chart = alt.layer(
        alt.Chart(raw).mark_line(strokeWidth=1, opacity=0.28, strokeJoin="round").encode(**lines),
        alt.Chart(means).mark_line(strokeWidth=2, strokeJoin="round").encode(**lines),
        alt.Chart(dots)
        .mark_point(filled=True, size=55, opacity=1, stroke=ink, strokeWidth=1)
        .encode(**points, tooltip=_told("evaluation loss")),
        alt.Chart(means).mark_point(size=50, opacity=0).encode(**points, tooltip=_told("mean loss")),
    )
    described = chart.properties(width=width, height=_HEIGHT, description=_in_words(names, against))
    return Drawn(chart=described, rows=rows)


def _place(title: str, *, logarithmic: bool) -> dict[str, Any]:
    """Return both axes."""
    import altair as alt

    x = alt.X("x:Q", title=title, scale=alt.Scale(nice=False), axis=alt.Axis(grid=False, tickCount=6))
    scale = alt.Scale(type="log", zero=False) if logarithmic else alt.Scale(zero=False)
    return {"x": x, "y": alt.Y("loss:Q", title=f"loss{' (logarithmic)' if logarithmic else ''}", scale=scale)}


def _told(loss: str) -> list[Any]:
    """Return what is shown under the pointer; `loss` says of which kind that is."""
    import altair as alt

    return [
        alt.Tooltip("optimizer:N"),
        alt.Tooltip("seed:Q"),
        alt.Tooltip("update:Q", format=","),
        alt.Tooltip("seconds:Q", format=",.2f"),
        alt.Tooltip("loss:Q", title=loss, format=".4f"),
    ]


def how_drawn(names: Sequence[Named]) -> str:
    """Return how losses were smoothed and thinned, in a sentence or two."""
    lengths = sorted({len(run.losses) for named in names for run in named.runs} - {0})
    if not lengths:
        return ""
    windows = [window_of(length) for length in lengths]
    span = " to ".join(f"{window:,}" for window in dict.fromkeys((windows[0], windows[-1])))
    lines = f"mean of the last {span} updates; faint: each update" if windows[-1] > 1 else "each update"
    text = f"Lines: {lines}; dots: evaluation loss."
    if any(seeded.run.measured and seeded.run.measured.profiled for named in names for seeded in named.runs):
        text += " The profiled update's seconds are left out."
    most = points_per_run(sum(len(named.runs) for named in names))
    if lengths[-1] <= most:
        return text
    return f"{text} Of {count(lengths[-1], 'update')} the lowest and highest of each stretch are drawn, {most:,} a run."


def without_time(names: Sequence[Named]) -> list[str]:
    """Return the names with a run that has losses but does not say when its updates ended."""
    return [named.short for named in names if any(_untimed(run.losses) for run in named.runs)]


def _untimed(points: Sequence[Point]) -> bool:
    return bool(points) and all(point.training_s is None for point in points)


def _scale(names: Sequence[Named], against: Against) -> tuple[Callable[[Point], float | None] | None, str]:
    """Return what reads the place of a point on the axis, and the axis's title; None where there is no point."""
    points = [point for named in names for run in named.runs for point in run.losses]
    if against == "updates":
        return (lambda point: point.update) if points else None, "updates"
    seconds = [point.training_s for point in points if point.training_s is not None]
    if not seconds:
        return None, "time"
    _, unit, name = next(known for known in _UNITS_OF_TIME if max(seconds) >= known[0])
    return (lambda point: None if point.training_s is None else point.training_s / unit), f"{name} of training"


def _rows(
    names: Sequence[Named],
    chosen: Callable[[Sequence[Point]], Iterable[Point]] | None,
    scale: Callable[[Point], float | None],
    *,
    positive: bool = False,
) -> Iterable[dict[str, Any]]:
    """Yield the chosen losses of every run as rows, or its evaluations.

    `positive` leaves out what a logarithmic scale cannot show.
    """
    for named in names:
        for number, (seed, run, own) in enumerate(named.runs):
            for point in evaluations(run) if chosen is None else chosen(own):
                place = scale(point)
                if place is None or (positive and point.loss <= 0):
                    continue
                yield {
                    "key": named.key,
                    "run": f"{named.key}r{number}",
                    "optimizer": named.short,
                    "seed": seed,
                    "update": point.update,
                    "seconds": point.training_s,
                    "x": place,
                    "loss": point.loss,
                }


def _in_words(names: Sequence[Named], against: Against) -> str:
    ends = (
        f"{named.short} from {points[0].loss:.4f} to {points[-1].loss:.4f}"
        for named in names
        for run in named.runs
        if (points := run.losses)
    )
    return f"Training loss against {against}: {'; '.join(ends)}"
