"""Live bytes over an update as a stacked chart: bands of phases, categories, the peak, and values under the pointer."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from effcli.report.charts.style import LAYERS, Drawn, Layers, Rows, layer_colours, layers_of, width_in
from effcli.report.skyline import total_bytes
from effcli.report.text import common_unit, in_unit
from effcli.units import Phase, format_bytes

if TYPE_CHECKING:
    from effcli.memory.plan import MemoryPlan, TimelinePoint

_LETTER = 7
"""Width of a letter of a phase's name in pixels; a name that does not fit its band is cut short, or left out."""
_SHORT: dict[str, str] = {
    Phase.FORWARD: "fwd",
    Phase.BACKWARD: "bwd",
    "first update": "first",
    "later updates": "later",
}


def live_chart(
    plan: MemoryPlan,
    *,
    width: int | str,
    height: int,
    ink: str,
    legend: bool,
    highest_bytes: int | None = None,
    measured_bytes: int | None = None,
    measured_live: Sequence[int] = (),
    description: str = "Live bytes over an update",
) -> Drawn:
    """Return the chart of a plan with a timeline, its measured peak as a rule where it is given.

    `highest_bytes` is where the scale ends, so that charts side by side have the same. `measured_live` are the live
    bytes of a measured update: a line as long as the later update is drawn.
    """
    import altair as alt

    points = plan.timeline
    unit, unit_name = common_unit(highest_bytes or max(map(total_bytes, points)))
    layers = layers_of(plan)
    moments = [_moment(index, point, unit) for index, point in enumerate(points)]
    rows = Rows("live")
    data = rows.add([*moments, {**moments[-1], "moment": len(points)}])  # a step ends where the next point is
    moment = alt.X("moment:Q", axis=None, scale=alt.Scale(domain=[0, len(points)], nice=False))
    scale = alt.Scale(domain=[0, highest_bytes / unit]) if highest_bytes else alt.Undefined
    y = alt.Y("bytes:Q", title=f"live bytes, {unit_name}", stack="zero", scale=scale)
    marks = [*_bands(rows, points, moment, width_in(width), ink), _areas(data, moment, y, layers, legend=legend)]
    marks += [*_peak(rows, plan, moment, unit, unit_name, ink), _hover(data, moment, layers, ink)]
    if measured_live:
        marks.insert(-1, _measured_live(rows, measured_live, points, moment, unit, ink))
    if measured_bytes is not None:
        marks.append(_measured(rows, measured_bytes, unit, ink))
    chart = alt.layer(*marks).properties(width=width, height=height, description=description)
    return Drawn(chart=chart, rows=rows)


def _areas(data: Any, moment: Any, y: Any, layers: Layers, *, legend: bool) -> Any:
    """Return the stacked categories."""
    import altair as alt

    names = [name for name, _ in layers.values()]
    return (
        alt.Chart(data)
        .transform_fold(names, as_=["category", "bytes"])
        .transform_calculate(order=f"indexof({json.dumps(names)}, datum.category)")
        .mark_area(interpolate="step-after")
        .encode(
            x=moment,
            y=y,
            color=layer_colours("category", layers.values(), columns=len(layers) if legend else None),
            order=alt.Order("order:Q"),
        )
    )


def _hover(data: Any, moment: Any, layers: Layers, ink: str) -> Any:
    """Return a line under the pointer, with the values there."""
    import altair as alt

    pointed = alt.selection_point(on="pointerover", clear="pointerout", fields=["moment"], empty=False)
    told = ["update:N", "phase:N", *(f"{name}:Q" for name, _ in layers.values()), "total:Q"]
    return (
        alt.Chart(data)
        .mark_rect(color=ink)
        .encode(
            x=moment,
            x2="end:Q",
            opacity=alt.condition(pointed, alt.value(0.3), alt.value(0)),
            tooltip=[alt.Tooltip(value, format=",.2f" if value.endswith(":Q") else "") for value in told],
        )
        .add_params(pointed)
    )


def _bands(rows: Rows, points: Sequence[TimelinePoint], moment: Any, across: str, ink: str) -> Iterable[Any]:
    """Yield the shading of backward phases, the names of the phases above it, and of the updates above those."""
    import altair as alt

    phases = _stretches(points, lambda point: (point.update, point.micro, point.phase))
    updates = _stretches(points, lambda point: point.update)
    shaded = [{"moment": start, "end": end} for start, end, point in phases if point.phase == Phase.BACKWARD]
    yield alt.Chart(rows.add(shaded)).mark_rect(color=ink, opacity=0.06).encode(x=moment, x2="end:Q")
    for stretches, names, height, weight in (
        (phases, [str(point.phase) for _, _, point in phases], -8, "normal"),
        (updates, ["later updates" if point.update else "first update" for _, _, point in updates], -26, "bold"),
    ):
        texts = [
            {"moment": start, "text": name, "short": _SHORT.get(name, name), "share": (end - start) / len(points)}
            for (start, end, _), name in zip(stretches, names, strict=True)
        ]
        yield (
            alt.Chart(rows.add(texts))
            .transform_calculate(
                shown=f"datum.share * {across} > {_LETTER} * (length(datum.text) + 1) ? datum.text : datum.short"
            )
            .transform_filter(f"datum.share * {across} > {_LETTER} * (length(datum.shown) + 1)")
            .mark_text(align="left", dx=3, color=ink, fontSize=12, fontWeight=weight)
            .encode(x=moment, y=alt.value(height), text="shown:N")
        )


def _peak(rows: Rows, plan: MemoryPlan, moment: Any, unit: int, unit_name: str, ink: str) -> Iterable[Any]:
    """Yield a dot and a text at the highest moment."""
    import altair as alt

    totals = [total_bytes(point) for point in plan.timeline]
    highest = totals.index(max(totals))
    at_left = highest < len(totals) / 2
    row = {
        "moment": highest + 0.5,
        "total": totals[highest] / unit,
        "text": f"peak {in_unit(totals[highest], unit)} {unit_name}",
    }
    base = alt.Chart(rows.add([row])).encode(x=moment, y="total:Q")
    yield base.mark_point(color=ink, filled=True, size=60, opacity=1)
    yield base.mark_text(
        color=ink, fontSize=13, fontWeight="bold", align="left" if at_left else "right", dx=8 if at_left else -8, dy=-8
    ).encode(text="text:N")


def _measured(rows: Rows, num_bytes: int, unit: int, ink: str) -> Any:
    """Return a line across the chart at the measured peak."""
    import altair as alt

    line = alt.Chart(rows.add([{"total": num_bytes / unit, "amount": format_bytes(num_bytes)}]))
    told = alt.Tooltip("amount:N", title="measured peak of updates")
    return line.mark_rule(color=ink, strokeDash=[5, 3], opacity=0.8).encode(y="total:Q", tooltip=told)


def _measured_live(
    rows: Rows, measured: Sequence[int], points: Sequence[TimelinePoint], moment: Any, unit: int, ink: str
) -> Any:
    """Return the measured update as a line over the later one that was planned, in as many equal steps as it has."""
    import altair as alt

    start = sum(not point.update for point in points)
    step = (len(points) - start) / len(measured)
    live = [{"moment": start + place * step, "bytes": held / unit} for place, held in enumerate(measured)]
    line = alt.Chart(rows.add(live)).mark_line(interpolate="step-after", color=ink, strokeWidth=1.2)
    return line.encode(x=moment, y="bytes:Q")


def _stretches(
    points: Sequence[TimelinePoint], key: Callable[[TimelinePoint], object]
) -> list[tuple[int, int, TimelinePoint]]:
    """Return where neighbours with the same key begin and end, and the first of them."""
    stretches, start = [], 0
    for _, group in groupby(points, key):
        members = list(group)
        stretches.append((start, start + len(members), members[0]))
        start += len(members)
    return stretches


def _moment(index: int, point: TimelinePoint, unit: int) -> dict[str, Any]:
    """Return one moment as a row of data, amounts in `unit`."""
    return {
        "moment": index,
        "end": index + 1,
        "update": "later" if point.update else "first",
        "phase": point.phase,
        **{name: getattr(point, f"{category}_bytes") / unit for category, (name, _) in LAYERS.items()},
        "total": total_bytes(point) / unit,
    }
