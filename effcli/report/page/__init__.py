"""`compare.html`: a comparison on one page that needs no network."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from effcli.files import write_text
from effcli.report.charts.live import live_chart
from effcli.report.charts.loss import Against, how_drawn, loss_chart, without_time
from effcli.report.charts.memory import AT_LEAST, bars_of, measured_live, memory_chart, planned_for_profiled
from effcli.report.charts.names import Named, names_of
from effcli.report.charts.style import LAYERS, PAGE_INK, REST
from effcli.report.charts.tradeoff import tradeoff_chart
from effcli.report.headline import failures, headline, title_of, what_ran
from effcli.report.page.settings import settings_section
from effcli.report.page.shell import chart_box, document, escaped, layer_legend, legend
from effcli.report.page.tables import (
    evaluation_table,
    memory_table,
    phase_table,
    summary_table,
    tradeoff_table,
)
from effcli.report.skyline import total_bytes
from effcli.report.text import common_unit, in_unit

if TYPE_CHECKING:
    from effcli.measure.comparison import ComparisonRecord

_LIVE_HEIGHT = 220
_AGAINST: Mapping[Against, str] = {"updates": "Against updates", "time": "Against time of training"}


def write_page(record: ComparisonRecord, path: Path) -> None:
    """Write the page of a comparison, also of one with a single run or with plans alone.

    Raises:
        WriteError: the file cannot be written.
    """
    names = names_of(record)
    charts: dict[str, dict[str, Any]] = {}
    body = [*_header(record, names), "<main>"]
    body += [*_memory(names, charts), *_losses(names, charts)]
    body += [*_tradeoff(names, charts), *_timelines(names, charts)]
    body += ["<section><h2>Configuration</h2>", *settings_section(record, names), "</section>", "</main>"]
    body.append("<footer>Written by effcli. This page holds all it shows and asks nobody for anything.</footer>")
    write_text(path, document(title=title_of(names), body=body, charts=charts))


def _header(record: ComparisonRecord, names: Sequence[Named]) -> Iterable[str]:
    yield f'<header><p class="over">effcli {escaped(record.command)}: {escaped(record.status)}</p>'
    yield f"<h1>{escaped(headline(names))}</h1>"
    yield f'<p class="lead">{escaped(what_ran(names))}</p>'
    wrong = failures(record)
    if wrong:
        yield f'<ul class="failures">{"".join(f"<li>{escaped(line)}</li>" for line in wrong)}</ul>'
    yield summary_table(names)
    first = names[0].name if names else ""
    spread = (
        " &plusmn; is the standard deviation over the seeds." if any(len(named.runs) > 1 for named in names) else ""
    )
    if len(names) > 1:
        yield f'<p class="how">&times; is the ratio to {escaped(first)}.{spread}</p>'
    yield "</header>"


def _memory(names: Sequence[Named], charts: dict[str, dict[str, Any]]) -> Iterable[str]:
    chart = memory_chart(names, width="container", ink=PAGE_INK, legend=False)
    yield "<section><h2>Memory at the peak, by component</h2>"
    if chart is None:
        yield '<p class="missing">No run left a record.</p></section>'
        return
    charts["memory"] = chart.on_page()
    runs = [named.run for named in names if named.run is not None]
    parts = {part for run in runs for bar in bars_of(run) for part, num_bytes in bar.parts if num_bytes}
    yield f'<p class="how">{" ".join(_about_bars(names, parts))}</p>'
    yield legend((name, colour, None) for name, colour in (*LAYERS.values(), REST) if name in parts)
    yield chart_box("memory")
    yield f"<details><summary>Numbers of this chart</summary>{memory_table(names)}</details></section>"


def _about_bars(names: Sequence[Named], parts: set[str]) -> Iterable[str]:
    """Yield what a reader has to know about the bars."""
    runs = [named.run for named in names if named.run is not None]
    if any(run.measured for run in runs):
        yield "Weights and state are measured one by one."
    if REST[0] in parts:
        yield "The rest of a measured peak holds activations, temporaries, and gradients that are not whole yet."
    if any(planned_for_profiled(run) is not None for run in runs):
        yield (
            "The predicted bar is of the largest batch; the mark on a measured bar is the peak that was planned for"
            " the batch that was profiled."
        )
    if not all(bar.is_whole for run in runs for bar in bars_of(run)):
        yield f"Where no peak is known, bars hold weights, gradients and state alone ({AT_LEAST.strip()})."
    if len({seed for named in names for seed, *_ in named.runs}) > 1:
        yield "Of several seeds the first that finished is drawn."


def _losses(names: Sequence[Named], charts: dict[str, dict[str, Any]]) -> Iterable[str]:
    drawn = {kind: loss_chart(names, kind, width="container", ink=PAGE_INK, legend=False) for kind in _AGAINST}
    yield '<section class="whole"><h2>Training loss</h2>'
    if drawn["updates"] is None:
        yield '<p class="missing">Nothing was trained, so there are no losses.</p></section>'
        return
    yield f'<p class="how">{escaped(how_drawn(names))}</p>'
    yield legend((named.short, named.colour, named.dash) for named in names if any(run.losses for run in named.runs))
    yield '<div class="grid">'
    for kind, chart in drawn.items():
        yield f"<figure><h3>{_AGAINST[kind]}</h3>"
        if chart is not None:
            charts[f"loss-{kind}"] = chart.on_page()
            yield chart_box(f"loss-{kind}")
        missing = without_time(names) if kind == "time" else []
        if missing:
            told = escaped(", ".join(missing))
            yield f'<p class="missing">Not in the records: when updates ended, for {told}.</p>'
        yield "</figure>"
    yield "</div>"
    table = evaluation_table(names)
    if table:
        yield f"<details><summary>Evaluations</summary>{table}</details>"
    yield "</section>"


def _tradeoff(names: Sequence[Named], charts: dict[str, dict[str, Any]]) -> Iterable[str]:
    chart = tradeoff_chart(names, width="container", ink=PAGE_INK)
    yield '<section class="whole"><h2>Number of statistics and their precision</h2>'
    if chart is None:
        yield '<p class="missing">No run left a record.</p></section>'
        return
    charts["tradeoff"] = chart.on_page()
    yield (
        '<p class="how">Areas are bytes of state; open where predicted alone. Along a dashed line a trained parameter'
        " has the same bytes of state: down it takes fewer bits for each statistic, left fewer statistics.</p>"
    )
    yield f'<div class="grid"><figure>{chart_box("tradeoff")}</figure>{tradeoff_table(names)}</div></section>'


def _timelines(names: Sequence[Named], charts: dict[str, dict[str, Any]]) -> Iterable[str]:
    """Yield a chart of live bytes for each name with a traced plan, all to one scale."""
    shown = [
        (named, run, plan)
        for named in names
        if (run := named.run) is not None and (plan := run.optimizer.plan) is not None and plan.timeline
    ]
    yield '<section class="whole"><h2>Live bytes over an update, as planned</h2>'
    if not shown:
        yield '<p class="missing">No plan of these runs holds a timeline.</p></section>'
        return
    peaks = [run.measured.peak_allocated_bytes if run.measured else None for _, run, _ in shown]
    highest = max(
        *(total_bytes(point) for _, _, plan in shown for point in plan.timeline), *(peak or 0 for peak in peaks)
    )
    unit, unit_name = common_unit(highest)
    line = (
        " The line is what one update held, as measured. Its moments are others than those of the plan: its heights"
        " compare, its places do not."
        if any(measured_live(run) for _, run, _ in shown)
        else ""
    )
    yield f'<p class="how">Moments in order, not to scale of time. Dashed: the measured peak.{line}</p>'
    yield layer_legend()
    yield '<div class="grid small">'
    for (named, run, plan), peak in zip(shown, peaks, strict=True):
        key = f"live-{named.key}"
        chart = live_chart(
            plan,
            width="container",
            height=_LIVE_HEIGHT,
            ink=PAGE_INK,
            legend=False,
            highest_bytes=round(highest * 1.08),
            measured_bytes=peak,
            measured_live=measured_live(run),
            description=f"Live bytes over an update with {named.short}",
        )
        charts[key] = chart.on_page()
        sides = [("planned", plan.peak_allocated_bytes), ("measured", peak)]
        told = ", ".join(f"{side} {in_unit(held, unit)} {unit_name}" for side, held in sides if held is not None)
        yield f'<figure><h3>{escaped(named.short)}</h3><p class="how">{told}</p>{chart_box(key)}</figure>'
    yield f"</div><details><summary>Peaks by phase</summary>{phase_table(names)}</details></section>"
