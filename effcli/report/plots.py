"""A comparison as one picture: memory, loss and trade-off side by side."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from effcli.files import write_bytes, write_text
from effcli.report.charts.look import PICTURE_INK, PICTURE_PAPER, themed
from effcli.report.charts.loss import how_drawn, loss_chart
from effcli.report.charts.memory import memory_chart
from effcli.report.charts.names import names_of
from effcli.report.charts.tradeoff import tradeoff_chart
from effcli.report.headline import headline, what_ran

if TYPE_CHECKING:
    from effcli.measure.comparison import ComparisonRecord

_WIDTH = 320


def write_plot(record: ComparisonRecord, path: Path) -> None:
    """Write the picture of a comparison; the ending of the path, .png or .svg, says what it becomes.

    A part that the record has nothing for is left out: losses, where nothing was trained.

    Raises:
        WriteError: the file cannot be written.
    """
    import altair as alt
    import vl_convert

    names = names_of(record)
    memory = memory_chart(names, width=_WIDTH, ink=PICTURE_INK, legend=True)
    losses = loss_chart(names, "updates", width=_WIDTH, ink=PICTURE_INK, legend=True)
    tradeoff = tradeoff_chart(names, width=_WIDTH, ink=PICTURE_INK)
    parts = [
        chart.properties(title=alt.TitleParams(title, subtitle=below, fontSize=14, subtitleFontSize=11))
        for title, below, chart in (
            ("Memory at the peak", "by component", memory),
            ("Training loss", how_drawn(names), losses),
            ("Number of statistics and their precision", "area: bytes of state", tradeoff),
        )
        if chart is not None
    ]
    title = alt.TitleParams([headline(names)], subtitle=[what_ran(names)], fontSize=17, offset=20)
    row = alt.hconcat(*parts, title=title, spacing=90, bounds="flush").resolve_scale(
        color="independent", strokeDash="independent"
    )
    chart = themed(row, PICTURE_INK).properties(background=PICTURE_PAPER, padding=20).to_dict()
    if path.suffix.lower() == ".svg":
        write_text(path, vl_convert.vegalite_to_svg(chart))
    else:
        write_bytes(path, vl_convert.vegalite_to_png(chart, scale=2))
