"""Live bytes over an update as a stacked chart: a page that needs no network, or a picture."""

from __future__ import annotations

import html
import json
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from effcli.files import write_bytes, write_text
from effcli.packages import require_package
from effcli.report.skyline import total_bytes
from effcli.report.text import common_unit, tokens_of_rows
from effcli.units import Category, Phase, format_bytes

if TYPE_CHECKING:
    from effcli.measure.estimate_record import EstimateRecord
    from effcli.memory.plan import MemoryPlan, TimelinePoint

PIP = "'effcli[plot]'"
_LAYERS = {
    Category.WEIGHTS: ("weights", "#4477aa"),
    Category.OPTIMIZER_STATE: ("optimizer state", "#228833"),
    Category.GRADIENTS: ("gradients", "#ccbb44"),
    Category.ACTIVATIONS: ("activations", "#66ccee"),
    Category.TEMPORARIES: ("temporaries", "#ee6677"),
}
"""Category -> name and colour, from the bottom up; colours that people who see few colours tell apart (Paul Tol)."""
_WIDTH, _HEIGHT = 900, 420
_LETTER = 7
"""Width of a letter of a phase's name in pixels; a name that does not fit its band is left out."""
_PAGE_INK = "currentColor"
_PICTURE_INK, _PICTURE_PAPER = "#222222", "#ffffff"
_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark; }}
body {{ font: 15px/1.5 system-ui, sans-serif; color: #222; background: #fff;
  max-width: 70rem; margin: 2rem auto; padding: 0 1rem; }}
@media (prefers-color-scheme: dark) {{ body {{ color: #ddd; background: #181a1b; }} }}
h1 {{ font-size: 1.2rem; margin: 0; }}
p {{ margin: .2rem 0; }}
#chart {{ margin-top: 1rem; width: 100%; }}
#vg-tooltip-element {{ font: inherit; }}
</style>
</head>
<body>
<h1>{title}</h1>
{facts}
<div id="chart"></div>
<script>
{library}
vegaEmbed("#chart", {chart}, {{renderer: "svg", actions: false,
  tooltip: {{theme: matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light"}}}});
</script>
</body>
</html>
"""


def require_plotting(path: str) -> None:
    """Raise unless the packages that draw are there.

    Raises:
        MissingExtraError: they are not installed.
    """
    for package in ("altair", "vl_convert"):
        require_package(package, f"--timeline {path}", pip=PIP)


def write_timeline(record: EstimateRecord, path: Path) -> None:
    """Draw the timeline of the first optimizer of a record into a file; its ending says what it becomes.

    Raises:
        WriteError: the file cannot be written.
    """
    import vl_convert

    optimizer = record.optimizers[0]
    if optimizer.plan is None:
        return
    title = f"{record.model.name} with {optimizer.name}"
    facts = _facts(record, optimizer.plan)
    if path.suffix.lower() == ".html":
        write_text(path, _page(title, facts, _chart(optimizer.plan, _PAGE_INK).to_dict()))
        return
    chart = _chart(optimizer.plan, _PICTURE_INK).properties(
        title={"text": title, "subtitle": facts}, background=_PICTURE_PAPER
    )
    if path.suffix.lower() == ".svg":
        write_text(path, vl_convert.vegalite_to_svg(chart.to_dict()))
    else:
        write_bytes(path, vl_convert.vegalite_to_png(chart.to_dict(), scale=2))


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


def _page(title: str, facts: Iterable[str], chart: dict[str, Any]) -> str:
    import vl_convert

    return _PAGE.format(
        title=html.escape(title),
        facts="\n".join(f"<p>{html.escape(line)}</p>" for line in facts),
        library=vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;"),
        chart=json.dumps(chart).replace("<", "\\u003c"),
    )


def _chart(plan: MemoryPlan, ink: str) -> Any:
    """Return the chart: bands of phases, the stacked categories, the peak, and a line under the pointer with values."""
    import altair as alt

    points = plan.timeline
    unit, unit_name = common_unit(max(map(total_bytes, points)))
    moments = [_moment(index, point, unit) for index, point in enumerate(points)]
    end = {**moments[-1], "moment": len(points)}  # a step ends where the next point is
    names = [name for name, _ in _LAYERS.values()]
    moment = alt.X("moment:Q", axis=None, scale=alt.Scale(domain=[0, len(points)], nice=False))
    areas = (
        alt.Chart(alt.InlineData(values=[*moments, end]))
        .transform_fold(names, as_=["category", "bytes"])
        .transform_calculate(order=f"indexof({json.dumps(names)}, datum.category)")
        .mark_area(interpolate="step-after")
        .encode(
            x=moment,
            y=alt.Y("bytes:Q", title=f"live bytes, {unit_name}", stack="zero"),
            color=alt.Color(
                "category:N",
                title=None,
                sort=names,
                scale=alt.Scale(domain=names, range=[colour for _, colour in _LAYERS.values()]),
                legend=alt.Legend(orient="bottom"),
            ),
            order=alt.Order("order:Q"),
        )
    )
    pointed = alt.selection_point(on="pointerover", clear="pointerout", fields=["moment"], empty=False)
    values = ["update:N", "phase:N", *(f"{name}:Q" for name in (*names, "total"))]
    hover = (
        alt.Chart(alt.InlineData(values=moments))
        .mark_rect(color=ink)
        .encode(
            x=moment,
            x2="end:Q",
            opacity=alt.condition(pointed, alt.value(0.3), alt.value(0)),
            tooltip=[alt.Tooltip(value, format=",.2f" if value.endswith(":Q") else "") for value in values],
        )
        .add_params(pointed)
    )
    return (
        alt.layer(*_bands(points, moment, ink), areas, *_peak(plan, moment, unit, ink), hover)
        .properties(width=_WIDTH, height=_HEIGHT, padding={"left": 5, "right": 20, "top": 10, "bottom": 5})
        .configure(background="transparent", font="system-ui, sans-serif")
        .configure_view(stroke=None)
        .configure_axis(
            labelColor=ink,
            titleColor=ink,
            domainColor=ink,
            tickColor=ink,
            gridColor=ink,
            gridOpacity=0.15,
            labelFontSize=12,
        )
        .configure_legend(labelColor=ink, titleColor=ink, labelFontSize=13, symbolType="square")
        .configure_title(color=ink, subtitleColor=ink, anchor="start", fontSize=16, subtitleFontSize=13)
    )


def _bands(points: Sequence[TimelinePoint], moment: Any, ink: str) -> Iterable[Any]:
    """Yield the shading of backward phases, the names of the phases above it, and of the updates above those."""
    import altair as alt

    phases = _stretches(points, lambda point: (point.update, point.micro, point.phase))
    updates = _stretches(points, lambda point: point.update)
    shaded = [{"moment": start, "end": end} for start, end, point in phases if point.phase == Phase.BACKWARD]
    yield alt.Chart(alt.InlineData(values=shaded)).mark_rect(color=ink, opacity=0.06).encode(x=moment, x2="end:Q")
    for stretches, names, height, weight in (
        (phases, [str(point.phase) for _, _, point in phases], -8, "normal"),
        (updates, ["later updates" if point.update else "first update" for _, _, point in updates], -26, "bold"),
    ):
        texts = [
            {"moment": start, "text": name}
            for (start, end, _), name in zip(stretches, names, strict=True)
            if (end - start) * _WIDTH / len(points) > _LETTER * len(name)
        ]
        yield (
            alt.Chart(alt.InlineData(values=texts))
            .mark_text(align="left", dx=3, color=ink, fontSize=12, fontWeight=weight)
            .encode(x=moment, y=alt.value(height), text="text:N")
        )


def _peak(plan: MemoryPlan, moment: Any, unit: int, ink: str) -> Iterable[Any]:
    """Yield a dot and a text at the highest moment."""
    import altair as alt

    totals = [total_bytes(point) for point in plan.timeline]
    highest = totals.index(max(totals))
    at_left = highest < len(totals) / 2
    row = {"moment": highest + 0.5, "total": totals[highest] / unit, "text": f"peak {format_bytes(totals[highest])}"}
    base = alt.Chart(alt.InlineData(values=[row])).encode(x=moment, y="total:Q")
    yield base.mark_point(color=ink, filled=True, size=60, opacity=1)
    yield base.mark_text(
        color=ink, fontSize=13, fontWeight="bold", align="left" if at_left else "right", dx=8 if at_left else -8, dy=-8
    ).encode(text="text:N")


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
        **{name: getattr(point, f"{category}_bytes") / unit for category, (name, _) in _LAYERS.items()},
        "total": total_bytes(point) / unit,
    }
