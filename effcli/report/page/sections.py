"""The sections of the page that hold charts: memory, losses, the trade-off, and live bytes over an update."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from effcli.report.charts.live import live_chart
from effcli.report.charts.loss import Against, how_drawn, loss_chart, without_time
from effcli.report.charts.memory import AT_LEAST, bars_of, measured_live, memory_chart, planned_for_profiled
from effcli.report.charts.names import Named
from effcli.report.charts.style import LAYERS, PAGE_INK, REST, Drawn
from effcli.report.charts.tradeoff import tradeoff_chart
from effcli.report.page.device import device_notes, device_table, measured_phase_table
from effcli.report.page.shell import chart_box, escaped, layer_legend, legend
from effcli.report.page.tables import evaluation_table, memory_table, phase_table, rank_table, tradeoff_table
from effcli.report.skyline import total_bytes
from effcli.report.text import common_unit, in_unit
from effcli.units import listed

if TYPE_CHECKING:
    from effcli.measure.record import RunRecord
    from effcli.memory.plan import MemoryPlan

_LIVE_HEIGHT = 220
_ROOM_ABOVE = 1.08
"""The scale of live bytes ends at so many times the highest peak."""
_PEAKS = (
    "Measured: the highest of the whole run, each column at a moment of its own; reserved as torch counts it, the"
    " others of the driver's samples. Predicted: of updates alone."
)
"""What is said of the table of the device."""
_AGAINST: Mapping[Against, str] = {"updates": "Against updates", "time": "Against time of training"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """Lines of HTML, and the charts whose boxes they hold, by the id of the box."""

    html: tuple[str, ...]
    charts: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


def sections_of(names: Sequence[Named]) -> tuple[Section, ...]:
    """Return the sections in the order of the page; one that the record has nothing for says so."""
    return (_memory(names), _losses(names), _tradeoff(names), _timelines(names))


def _empty(title: str, why: str) -> Section:
    return Section(html=(f'<section class="whole"><h2>{title}</h2><p class="missing">{why}</p></section>',))


def _memory(names: Sequence[Named]) -> Section:
    title = "Memory at the peak, by component"
    chart = memory_chart(names, width="container", ink=PAGE_INK, legend=False)
    if chart is None:
        return _empty(title, "No run left a record.")
    runs = [named.run for named in names if named.run is not None]
    parts = {part for run in runs for bar in bars_of(run) for part, num_bytes in bar.parts if num_bytes}
    html = (
        f"<section><h2>{title}</h2>",
        f'<p class="how">{" ".join(_about_bars(names, parts))}</p>',
        legend((name, colour, None) for name, colour in (*LAYERS.values(), REST) if name in parts),
        chart_box("memory"),
        *_on_the_device(names),
        *_by_process(names),
        f"<details><summary>Numbers of this chart</summary>{memory_table(names)}</details></section>",
    )
    return Section(html=html, charts={"memory": chart.on_page()})


def _on_the_device(names: Sequence[Named]) -> Iterable[str]:
    """Yield what runs on CUDA took of the device, what these numbers are, and the peaks of each phase."""
    if table := device_table(names):
        is_measured = any(named.run is not None and named.run.measured for named in names)
        told = f'<p class="how">{_PEAKS}</p>' if is_measured else ""
        yield f"<h3>On the device</h3>{told}{table}"
    if notes := device_notes(names):
        yield f"<details><summary>What the numbers of the chart are</summary>{notes}</details>"
    if phases := measured_phase_table(names):
        yield f"<details><summary>Most allocated in each phase</summary>{phases}</details>"


def _by_process(names: Sequence[Named]) -> Iterable[str]:
    """Yield what each of several processes held; the chart and its numbers are those of the first."""
    if table := rank_table(names):
        yield f"<details><summary>By process: the least, the most, and all together</summary>{table}</details>"


def _about_bars(names: Sequence[Named], parts: set[str]) -> Iterable[str]:
    """Yield what a reader has to know about the bars."""
    runs = [named.run for named in names if named.run is not None]
    if any(run.measured for run in runs):
        yield "Weights and state are measured one by one."
    if REST[0] in parts:
        yield "The rest of a measured peak holds activations, temporaries, and gradients that are not whole yet."
    outside = [named.short for named in names if named.run is not None and _is_outside_updates(named.run)]
    if outside:
        yield f"{escaped(listed(outside, None))}: most was allocated outside updates, which alone are predicted."
    if any(planned_for_profiled(run) is not None for run in runs):
        yield (
            "The predicted bar is of the largest batch; the mark on a measured bar is the peak that was planned for"
            " the batch that was profiled."
        )
    if not all(bar.is_whole for run in runs for bar in bars_of(run)):
        yield f"Where no peak is known, bars hold weights, gradients and state alone ({AT_LEAST.strip()})."
    if len({seed for named in names for seed, *_ in named.runs}) > 1:
        yield "Of several seeds the first that finished is drawn."


def _is_outside_updates(run: RunRecord) -> bool:
    """Return whether the measured peak is that of another part of the run than its updates."""
    measured = run.measured
    return measured is not None and measured.update_peak_allocated_bytes != measured.peak_allocated_bytes


def _losses(names: Sequence[Named]) -> Section:
    title = "Training loss"
    drawn = {kind: loss_chart(names, kind, width="container", ink=PAGE_INK, legend=False) for kind in _AGAINST}
    if drawn["updates"] is None:
        return _empty(title, "Nothing was trained, so there are no losses.")
    evaluations = evaluation_table(names)
    html = (
        f'<section class="whole"><h2>{title}</h2>',
        f'<p class="how">{escaped(how_drawn(names))}</p>',
        legend((named.short, named.colour, named.dash) for named in names if any(run.losses for run in named.runs)),
        '<div class="grid">',
        *(_loss_figure(names, kind, chart) for kind, chart in drawn.items()),
        "</div>",
        f"<details><summary>Evaluations</summary>{evaluations}</details>" if evaluations else "",
        "</section>",
    )
    charts = {f"loss-{kind}": chart.on_page() for kind, chart in drawn.items() if chart is not None}
    return Section(html=html, charts=charts)


def _loss_figure(names: Sequence[Named], kind: Against, chart: Drawn | None) -> str:
    """Return the box of a chart, and below it whose losses are not in it."""
    box = "" if chart is None else chart_box(f"loss-{kind}")
    missing = without_time(names) if kind == "time" else []
    told = escaped(", ".join(missing))
    below = f'<p class="missing">Not in the records: when updates ended, for {told}.</p>' if missing else ""
    return f"<figure><h3>{_AGAINST[kind]}</h3>{box}{below}</figure>"


def _tradeoff(names: Sequence[Named]) -> Section:
    title = "Number of statistics and their precision"
    chart = tradeoff_chart(names, width="container", ink=PAGE_INK)
    if chart is None:
        return _empty(title, "No run left a record.")
    html = (
        f'<section class="whole"><h2>{title}</h2>',
        '<p class="how">Areas are bytes of state; open where predicted alone. Along a dashed line a trained parameter'
        " has the same bytes of state: down it takes fewer bits for each statistic, left fewer statistics.</p>",
        f'<div class="grid"><figure>{chart_box("tradeoff")}</figure>{tradeoff_table(names)}</div></section>',
    )
    return Section(html=html, charts={"tradeoff": chart.on_page()})


class _Planned(NamedTuple):
    """A run whose plan has a timeline, and the measured peak of updates in bytes where there is one."""

    named: Named
    run: RunRecord
    plan: MemoryPlan
    peak_bytes: int | None


def _timelines(names: Sequence[Named]) -> Section:
    """Return a chart of live bytes for each name with a traced plan, all to one scale."""
    title = "Live bytes over an update, as planned"
    shown = [
        _Planned(named, run, plan, run.measured.update_peak_allocated_bytes if run.measured else None)
        for named in names
        if (run := named.run) is not None and (plan := run.optimizer.plan) is not None and plan.timeline
    ]
    if not shown:
        return _empty(title, "No plan of these runs holds a timeline.")
    highest = max(
        *(total_bytes(point) for planned in shown for point in planned.plan.timeline),
        *(planned.peak_bytes or 0 for planned in shown),
    )
    html = (
        f'<section class="whole"><h2>{title}</h2>',
        f'<p class="how">{" ".join(_about_timelines(shown))}</p>',
        layer_legend(*(planned.plan for planned in shown)),
        '<div class="grid small">',
        *(_live_figure(planned, common_unit(highest)) for planned in shown),
        f"</div><details><summary>Peaks by phase</summary>{phase_table(names)}</details></section>",
    )
    return Section(html=html, charts={_live_key(planned): _live_chart(planned, highest) for planned in shown})


def _about_timelines(shown: Sequence[_Planned]) -> Iterable[str]:
    yield "Moments in order, not to scale of time. Dashed: the measured peak of updates."
    if any(measured_live(planned.run) for planned in shown):
        yield (
            "The line is what one update held, as measured. Its moments are others than those of the plan: its heights"
            " compare, its places do not."
        )


def _live_key(planned: _Planned) -> str:
    return f"live-{planned.named.key}"


def _live_chart(planned: _Planned, highest_bytes: int) -> dict[str, Any]:
    return live_chart(
        planned.plan,
        width="container",
        height=_LIVE_HEIGHT,
        ink=PAGE_INK,
        legend=False,
        highest_bytes=round(highest_bytes * _ROOM_ABOVE),
        measured_bytes=planned.peak_bytes,
        measured_live=measured_live(planned.run),
        description=f"Live bytes over an update with {planned.named.short}",
    ).on_page()


def _live_figure(planned: _Planned, unit: tuple[int, str]) -> str:
    sides = [("planned", planned.plan.peak_allocated_bytes), ("measured", planned.peak_bytes)]
    told = ", ".join(f"{side} {in_unit(held, unit[0])} {unit[1]}" for side, held in sides if held is not None)
    box = chart_box(_live_key(planned))
    return f'<figure><h3>{escaped(planned.named.short)}</h3><p class="how">{told}</p>{box}</figure>'
