"""A comparison as one picture: memory, loss and trade-off side by side."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from effcli.report.charts.loss import how_drawn, loss_chart
from effcli.report.charts.memory import memory_chart
from effcli.report.charts.names import names_of
from effcli.report.charts.style import PICTURE_INK, draw
from effcli.report.charts.tradeoff import tradeoff_chart
from effcli.report.headline import headline, what_ran

if TYPE_CHECKING:
    from effcli.measure.comparison_record import ComparisonRecord

_WIDTH = 320


def write_plot(record: ComparisonRecord, path: Path) -> None:
    """Write the picture of a comparison; the ending of the path, .png or .svg, says what it becomes.

    A part that the record has nothing for is left out: losses, where nothing was trained.

    Raises:
        WriteError: the file cannot be written.
    """
    import altair as alt

    names = names_of(record)
    parts = [
        (title, below, drawn)
        for title, below, drawn in (
            ("Memory at the peak", "by component", memory_chart(names, width=_WIDTH, ink=PICTURE_INK, legend=True)),
            (
                "Training loss",
                how_drawn(names),
                loss_chart(names, "updates", width=_WIDTH, ink=PICTURE_INK, legend=True),
            ),
            (
                "Number of statistics and their precision",
                "area: bytes of state",
                tradeoff_chart(names, width=_WIDTH, ink=PICTURE_INK),
            ),
        )
        if drawn is not None
    ]
    charts = [
        drawn.chart.properties(title=alt.TitleParams(title, subtitle=below, fontSize=14, subtitleFontSize=11))
        for title, below, drawn in parts
    ]
    title = alt.TitleParams([headline(names)], subtitle=[what_ran(names)], fontSize=17, offset=20)
    row = alt.hconcat(*charts, title=title, spacing=90, bounds="flush")
    rows = {name: own for _, _, drawn in parts for name, own in drawn.rows.by_name.items()}
    draw(row.resolve_scale(color="independent", strokeDash="independent"), rows, path)
