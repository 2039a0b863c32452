"""Bars of the peak by component: a predicted and a measured one for each name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from effcli.report.charts.names import Named
from effcli.report.charts.style import LAYERS, REST, Drawn, Rows, layer_colours, width_in
from effcli.report.device_rows import highest_phase, outside_bytes
from effcli.report.text import common_unit, in_unit
from effcli.units import Category, Phase, format_bytes

if TYPE_CHECKING:
    from effcli.measure.record import RunRecord

SIDES = {"p": "predicted", "m": "measured"}
AT_LEAST = "\N{GREATER-THAN OR EQUAL TO} "
"""What begins the total of a bar that holds no whole peak."""
_STEP = 22
_ROOM = 84
"""Pixels to the right of the longest bar, for its total."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """One bar: what it shows, and its parts with their bytes from the left. `is_whole` says that they make a peak."""

    side: str
    parts: tuple[tuple[str, int], ...]
    is_whole: bool = True

    @property
    def total_bytes(self) -> int:
        """Return the sum of the parts."""
        return sum(num_bytes for _, num_bytes in self.parts)


def predicted_bar(run: RunRecord) -> Bar:
    """Return the parts of the planned peak, or what is held before activations where no peak was planned."""
    peak = run.optimizer.plan.at_peak if run.optimizer.plan else None
    if peak is not None:
        amounts = {category: getattr(peak, f"{category}_bytes") or 0 for category in LAYERS}
        return Bar(side="p", parts=tuple((LAYERS[category][0], amounts[category]) for category in LAYERS))
    held = (run.model.weights_bytes, run.optimizer.state_bytes, run.model.gradients_bytes)
    parts = tuple((LAYERS[category][0], amount) for category, amount in zip(LAYERS, held, strict=False))
    return Bar(side="p", parts=parts, is_whole=False)


def measured_bar(run: RunRecord) -> Bar | None:
    """Return what was measured: weights and state, gradients where they are whole, and the rest of the peak.

    Nobody measures what the rest of a peak is for. In the backward phase gradients exist in part only, so they count
    as rest there; in the step all of them exist. Where no phase was counted, that of the plan decides.
    State outside torch's allocator is no part of its peak.
    """
    measured = run.measured
    if measured is None:
        return None
    plan, peak_bytes = run.optimizer.plan, measured.peak_allocated_bytes
    outside = outside_bytes(run) if run.is_on_cuda and peak_bytes is not None else 0
    state_bytes = max(0, measured.optimizer_state_bytes - outside)
    known = [(Category.WEIGHTS, measured.weights_bytes), (Category.OPTIMIZER_STATE, state_bytes)]
    counted = highest_phase(measured.allocator.phases) if measured.allocator else None
    if peak_bytes is None or (counted or (plan.peak_phase if plan else None)) == Phase.STEP:
        known.append((Category.GRADIENTS, measured.gradients_bytes))
    parts = [(LAYERS[category][0], num_bytes) for category, num_bytes in known if num_bytes is not None]
    if peak_bytes is None:
        return Bar(side="m", parts=tuple(parts), is_whole=False)
    rest = peak_bytes - sum(num_bytes for _, num_bytes in parts)
    return Bar(side="m", parts=(*parts, (REST[0], rest)) if rest >= 0 else ((REST[0], peak_bytes),))


def planned_for_profiled(run: RunRecord) -> int | None:
    """Return the planned peak of the profiled batch where that is not the batch whose parts are drawn."""
    profiled, plan = run.measured.profiled if run.measured else None, run.optimizer.plan
    planned = profiled.planned_peak_allocated_bytes if profiled else None
    return planned if plan is not None and planned != plan.peak_allocated_bytes else None


def measured_live(run: RunRecord) -> tuple[int, ...]:
    """Return the live bytes of the profiled update where its batch is that of the plan; else nothing."""
    profiled, plan = run.measured.profiled if run.measured else None, run.optimizer.plan
    if profiled is None or plan is None or profiled.planned_peak_allocated_bytes != plan.peak_allocated_bytes:
        return ()
    return profiled.timeline_bytes


def bars_of(run: RunRecord) -> tuple[Bar, ...]:
    """Return the predicted bar and, after a run, the measured one."""
    measured = measured_bar(run)
    return (predicted_bar(run), measured) if measured else (predicted_bar(run),)


def memory_chart(names: Sequence[Named], *, width: int | str, ink: str, legend: bool) -> Drawn | None:
    """Return the bars of all names that have a run; None where no name has one."""
    import altair as alt

    shown = [(named, run) for named in names if (run := named.run) is not None]
    if not shown:
        return None
    bars = {named.key: bars_of(run) for named, run in shown}
    largest = max(1, *(bar.total_bytes for own in bars.values() for bar in own))
    unit, unit_name = common_unit(largest)
    places = [f"{key}{side}" for key, own in bars.items() for side in ("h", *(bar.side for bar in own))]
    x, y = _scales(largest / unit, unit_name, places, width_in(width))
    rows = Rows("memory")
    heads = rows.add({"row": f"{named.key}h", "text": named.short} for named, _ in shown)
    totals = rows.add(_total_rows(bars, unit, unit_name))
    layers = [
        _parts(rows.add(_part_rows(shown, bars, unit)), x, y, _present(bars), columns=2 if legend else None),
        alt.Chart(heads)
        .mark_text(align="left", color=ink, fontWeight="bold", fontSize=13, dy=3, limit=alt.ExprRef(width_in(width)))
        .encode(x=alt.value(0), y=y, text="text:N"),
        alt.Chart(totals).mark_text(align="left", dx=6, color=ink, fontSize=12).encode(x=x, y=y, text="text:N"),
    ]
    marks = list(_mark_rows(shown, unit))
    if marks:
        told = alt.Tooltip("amount:N", title="planned for this batch")
        ticks = alt.Chart(rows.add(marks)).mark_tick(color=ink, thickness=2, size=_STEP)
        layers.append(ticks.encode(x=x, y=y, tooltip=told))
    described = "; ".join(f"{named.short}: {_in_words(bars[named.key])}" for named, _ in shown)
    chart = alt.layer(*layers).properties(width=width, height=_STEP * len(places), description=described)
    return Drawn(chart=chart, rows=rows)


def _scales(largest: float, unit_name: str, places: Sequence[str], across: str) -> tuple[Any, Any]:
    """Return the axis of amounts, with room for the longest bar's total, and that of bars."""
    import altair as alt

    end = alt.ExprRef(f"{largest} * {across} / max({across} - {_ROOM}, 40)")
    amounts = alt.Scale(domainMin=0, domainMax=end, nice=False)
    labels = f"{{h: '', p: '{SIDES['p']}', m: '{SIDES['m']}'}}[slice(datum.label, -1)]"
    axis = alt.Axis(labelExpr=labels, title=None, ticks=False, domain=False, labelPadding=8)
    bands = alt.Scale(domain=list(places), paddingInner=0.25, paddingOuter=0.1)
    x = alt.X("start:Q", title=unit_name, scale=amounts, axis=alt.Axis(tickCount=5))
    return x, alt.Y("row:N", sort=None, scale=bands, axis=axis)


def _parts(data: Any, x: Any, y: Any, present: Sequence[tuple[str, str]], *, columns: int | None) -> Any:
    import altair as alt

    told = [alt.Tooltip(f"{field}:N") for field in ("optimizer", "side", "part", "amount")]
    colour = layer_colours("part", present, columns=columns)
    return alt.Chart(data).mark_bar().encode(x=x, x2="end:Q", y=y, color=colour, tooltip=told)


def _present(bars: Mapping[str, Sequence[Bar]]) -> list[tuple[str, str]]:
    """Return name and colour of the parts that some bar has."""
    found = {part for own in bars.values() for bar in own for part, num_bytes in bar.parts if num_bytes}
    return [layer for layer in (*LAYERS.values(), REST) if layer[0] in found]


def _mark_rows(shown: Sequence[tuple[Named, RunRecord]], unit: int) -> Iterable[dict[str, Any]]:
    for named, run in shown:
        planned = planned_for_profiled(run)
        if planned is not None:
            yield {"row": f"{named.key}m", "start": planned / unit, "amount": format_bytes(planned)}


def _in_words(bars: Iterable[Bar]) -> str:
    return ", ".join(f"{SIDES[bar.side]} {format_bytes(bar.total_bytes)}" for bar in bars)


def _part_rows(
    shown: Sequence[tuple[Named, RunRecord]], bars: dict[str, tuple[Bar, ...]], unit: int
) -> Iterable[dict[str, Any]]:
    for named, _ in shown:
        for bar in bars[named.key]:
            start = 0
            for part, num_bytes in bar.parts:
                if num_bytes:
                    yield {
                        "row": f"{named.key}{bar.side}",
                        "start": start / unit,
                        "end": (start + num_bytes) / unit,
                        "optimizer": named.short,
                        "side": SIDES[bar.side],
                        "part": part,
                        "amount": format_bytes(num_bytes),
                    }
                start += num_bytes


def _total_rows(bars: dict[str, tuple[Bar, ...]], unit: int, unit_name: str) -> Iterable[dict[str, Any]]:
    for key, own in bars.items():
        for bar in own:
            text = f"{'' if bar.is_whole else AT_LEAST}{in_unit(bar.total_bytes, unit)} {unit_name}"
            yield {"row": f"{key}{bar.side}", "start": bar.total_bytes / unit, "text": text}
