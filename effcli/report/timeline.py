"""Live bytes over an update as a stacked chart: a page that needs no network, or a picture."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from effcli.files import write_text
from effcli.packages import DRAWING, DRAWING_PIP, require_package
from effcli.report.charts.live import live_chart
from effcli.report.charts.style import PAGE_INK, PICTURE_INK, draw
from effcli.report.page.shell import chart_box, document, escaped, layer_legend
from effcli.report.text import tokens_of_rows
from effcli.units import format_bytes

if TYPE_CHECKING:
    from effcli.measure.estimate_record import EstimateRecord
    from effcli.memory.plan import MemoryPlan

_WIDTH, _HEIGHT = 900, 420


def require_plotting(path: str) -> None:
    """Raise unless the packages that draw are there.

    Raises:
        MissingExtraError: they are not installed.
    """
    for package in DRAWING:
        require_package(package, f"--timeline {path}", pip=DRAWING_PIP)


def write_timeline(record: EstimateRecord, path: Path) -> None:
    """Draw the timeline of the first optimizer of a record into a file; its ending says what it becomes.

    Raises:
        WriteError: the file cannot be written.
    """
    optimizer = record.optimizers[0]
    if optimizer.plan is None:
        return
    title = f"{record.model.name} with {optimizer.name}"
    facts = _facts(record, optimizer.plan)
    if path.suffix.lower() == ".html":
        write_text(path, _page(title, facts, optimizer.plan))
        return
    chart = live_chart(optimizer.plan, width=_WIDTH, height=_HEIGHT, ink=PICTURE_INK, legend=True)
    draw(chart.chart.properties(title={"text": title, "subtitle": facts}), chart.rows.by_name, path)


def _facts(record: EstimateRecord, plan: MemoryPlan) -> list[str]:
    """Return what the picture is of, in a line, and its peak in another."""
    facts = [record.precision]
    if record.peak is not None:
        batch = record.peak.batch
        tokens = tokens_of_rows(record.peak.max_length, record.peak.max_target_length)
        rows = f"{batch.micro} x {batch.accum} rows per update"
        facts = [rows, *tokens, record.precision, f"on {record.peak.device}"]
    peak = f"peak {format_bytes(plan.peak_allocated_bytes or 0)} in the {plan.peak_phase} phase"
    return [", ".join(facts), f"{peak}; moments in order, not to scale of time"]


def _page(title: str, facts: Iterable[str], plan: MemoryPlan) -> str:
    """Return a page that holds the chart and what it needs to be drawn."""
    chart = live_chart(plan, width="container", height=_HEIGHT, ink=PAGE_INK, legend=False)
    body = [
        f"<header><h1>{escaped(title)}</h1>",
        *(f'<p class="lead">{escaped(line)}</p>' for line in facts),
        f"</header><main>{layer_legend(plan)}{chart_box('chart')}</main>",
    ]
    return document(title=title, body=body, charts={"chart": chart.on_page()})
