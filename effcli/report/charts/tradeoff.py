"""The trade-off: how many statistics an optimizer keeps for a parameter, and in how many bits it keeps each."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from effcli.report.charts.labels import Spot, placed
from effcli.report.charts.names import Named, key_scale
from effcli.report.charts.style import Drawn, Rows, width_in
from effcli.units import StateAmount, format_bytes, listed

_HEIGHT = 300
_BEND = 0.003
"""Below about so many statistics a parameter the scale is linear, above logarithmic: 0, 0.003 and 2 all show."""
_TICKS = (0, 0.01, 0.1, 1, 2, 4, 8, 16)
_BITS = (0, 4, 8, 16, 32, 64)
_BYTES_PER_PARAMETER = (0.01, 0.1, 1, 2, 4, 8)
_MOST_IN_LABEL = 2
"""So many names a label tells; of more it tells the first."""
_BEYOND = 1.4
"""The axis ends at so many times the most statistics."""
_SMALLEST, _LARGEST = 60, 900
"""Areas of points in square pixels."""
_NEAR = 0.03
"""Share of an axis within which two points get one label."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """What an optimizer keeps: statistics over trained parameters, bits over statistics, and bytes of all state.

    Counters of steps are no statistics; constants of quantisation add to the bits. 0 bits of nothing.
    """

    named: Named
    statistics: float
    bits: float
    state_bytes: int
    measured: bool


def kept_by(names: Sequence[Named]) -> list[Kept]:
    """Return what the optimizer of each name keeps: as measured, else as predicted. Seeds do not differ in it."""
    kept = []
    for named in names:
        run = named.run
        if run is None or not run.model.num_trainable_parameters:
            continue
        measured = run.measured
        elements = measured.optimizer_state_elements if measured else run.optimizer.state_elements
        state_bytes = measured.optimizer_state_bytes if measured else run.optimizer.state_bytes
        steps = (measured or run.optimizer).tensors.get("step", StateAmount(elements=0, bytes=0))
        elements -= steps.elements
        kept.append(
            Kept(
                named=named,
                statistics=elements / run.model.num_trainable_parameters,
                bits=8 * (state_bytes - steps.bytes) / elements if elements > 0 else 0.0,
                state_bytes=state_bytes,
                measured=measured is not None,
            )
        )
    return kept


def tradeoff_chart(names: Sequence[Named], *, width: int | str, ink: str) -> Drawn | None:
    """Return one point a name, its area the bytes of its state; None where no name has a run."""
    import altair as alt

    kept = kept_by(names)
    if not kept:
        return None
    right = max(2.0, *(one.statistics for one in kept))
    top = max(32.0, *(one.bits for one in kept)) * 1.3
    rows = Rows("tradeoff")
    place = _axes(right, top)
    layers = [*_lines(rows, place, right, top, ink), *_points(rows, place, kept, names)]
    layers += _texts(rows, place, _groups(kept, right, top), right, top, width_in(width), ink)
    described = "; ".join(
        f"{one.named.short}: {one.statistics:.4g} statistics of {one.bits:.3g} bits, {format_bytes(one.state_bytes)}"
        for one in kept
    )
    chart = alt.layer(*layers).properties(width=width, height=_HEIGHT, description=described)
    return Drawn(chart=chart, rows=rows)


def _axes(right: float, top: float) -> dict[str, Any]:
    import altair as alt

    statistics = alt.Axis(values=[tick for tick in _TICKS if tick <= right * 1.2], format="~g", grid=False)
    across = alt.Scale(type="symlog", constant=_BEND, domain=[-0.2 * _BEND, right * _BEYOND], nice=False)
    bits = alt.Axis(values=[bits for bits in _BITS if bits <= top])
    up = alt.Scale(domain=[-0.05 * top, top], nice=False)
    return {
        "x": alt.X("x:Q", title="statistics for a trained parameter", scale=across, axis=statistics),
        "y": alt.Y("y:Q", title="bits for a statistic", scale=up, axis=bits),
    }


def _lines(rows: Rows, place: Mapping[str, Any], right: float, top: float, ink: str) -> Iterable[Any]:
    """Yield lines of the same bytes a parameter, and how many these are at their upper ends."""
    import altair as alt

    curves = list(_curves(right, top))
    lines = alt.Chart(rows.add(curves)).mark_line(color=ink, opacity=0.22, strokeWidth=1, strokeDash=[3, 3])
    yield lines.encode(**place, detail="line:N")
    ends = alt.Chart(rows.add(row for row in curves if row["text"]))
    yield ends.mark_text(color=ink, opacity=0.6, fontSize=11, align="right", dx=-3, dy=9).encode(**place, text="text:N")


def _points(rows: Rows, place: Mapping[str, Any], kept: Sequence[Kept], names: Sequence[Named]) -> Iterable[Any]:
    """Yield predicted points, which are open, then measured ones."""
    import altair as alt

    told = [
        alt.Tooltip("optimizer:N"),
        alt.Tooltip("x:Q", title="statistics for a parameter", format=",.4g"),
        alt.Tooltip("y:Q", title="bits for a statistic", format=",.3f"),
        alt.Tooltip("amount:N", title="state"),
        alt.Tooltip("told:N", title="as"),
    ]
    size = alt.Size("state_bytes:Q", legend=None, scale=_area(kept))
    for measured in sorted({one.measured for one in kept}):
        points = alt.Chart(rows.add(_point(one) for one in kept if one.measured == measured))
        marks = points.mark_point(opacity=0.85, strokeWidth=2, filled=measured)
        yield marks.encode(**place, size=size, tooltip=told, **key_scale(names, legend=False))


def _texts(
    rows: Rows,
    place: Mapping[str, Any],
    groups: Sequence[Sequence[Kept]],
    right: float,
    top: float,
    across: str,
    ink: str,
) -> Iterable[Any]:
    """Yield the names beside their points, at most half as wide as the chart."""
    import altair as alt

    largest = max(one.state_bytes for group in groups for one in group)
    spots = [
        Spot(
            text=listed([one.named.short for one in group], len(group) if len(group) <= _MOST_IN_LABEL else 1),
            across=_place(group[0].statistics, right),
            down=_HEIGHT * (1 - group[0].bits / top),
            radius=max(_radius(one, largest) for one in group),
        )
        for group in groups
    ]
    look = {"color": ink, "fontSize": 13, "fontWeight": "bold", "limit": alt.ExprRef(f"{across} / 2")}
    for group, spot, (align, dx, dy) in zip(groups, spots, placed(spots), strict=True):
        label = alt.Chart(rows.add([{"x": group[0].statistics, "y": group[0].bits, "text": spot.text}]))
        yield label.mark_text(align=align, dx=dx, dy=dy, **look).encode(**place, text="text:N")


def _area(kept: Sequence[Kept]) -> Any:
    """Return the area of points in square pixels: in proportion to bytes, but never too small to be seen."""
    import altair as alt

    return alt.Scale(domain=[0, max(1, *(one.state_bytes for one in kept))], range=[_SMALLEST, _LARGEST], nice=False)


def _point(one: Kept) -> dict[str, Any]:
    return {
        "key": one.named.key,
        "optimizer": one.named.short,
        "x": one.statistics,
        "y": one.bits,
        "state_bytes": one.state_bytes,
        "amount": format_bytes(one.state_bytes),
        "told": "measured" if one.measured else "predicted",
    }


def _curves(right: float, top: float) -> Iterable[dict[str, Any]]:
    """Yield points of the lines on which a parameter has the same bytes of state: bits = 8 x bytes / statistics."""
    for place, num_bytes in enumerate(_BYTES_PER_PARAMETER):
        start = 8 * num_bytes / top
        if start >= right:
            continue
        steps = 40
        for step in range(steps + 1):
            statistics = start * (right * _BEYOND / start) ** (step / steps)
            text = f"{num_bytes:g} B" if step == 0 else ""
            yield {"line": place, "x": statistics, "y": 8 * num_bytes / statistics, "text": text}


def _groups(kept: Sequence[Kept], right: float, top: float) -> list[list[Kept]]:
    """Return points by where they are: those that nearly coincide share a label."""
    groups: list[list[Kept]] = []
    for one in kept:
        group = next((group for group in groups if _near(group[0], one, right, top)), None)
        if group is None:
            groups.append([one])
        else:
            group.append(one)
    return groups


def _radius(one: Kept, largest: int) -> float:
    """Return the radius of a point in pixels."""
    return math.sqrt((_SMALLEST + (_LARGEST - _SMALLEST) * one.state_bytes / max(1, largest)) / math.pi)


def _place(statistics: float, right: float) -> float:
    return math.log1p(statistics / _BEND) / math.log1p(right * _BEYOND / _BEND)


def _near(first: Kept, other: Kept, right: float, top: float) -> bool:
    across = abs(_place(first.statistics, right) - _place(other.statistics, right))
    return across < _NEAR and abs(first.bits - other.bits) / top < _NEAR
