"""Colours, letters and lines that all charts share. Text takes the reader's colour on a page, its own in a picture."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from effcli.units import Category

PAGE_INK = "currentColor"
PICTURE_INK, PICTURE_PAPER = "#222222", "#ffffff"
FONT = "system-ui, sans-serif"
LAYERS = {
    Category.WEIGHTS: ("weights", "#4477aa"),
    Category.OPTIMIZER_STATE: ("optimizer state", "#228833"),
    Category.GRADIENTS: ("gradients", "#ccbb44"),
    Category.ACTIVATIONS: ("activations", "#66ccee"),
    Category.TEMPORARIES: ("temporaries", "#ee6677"),
}
"""Category -> name and colour, from the bottom up; colours that people who see few colours tell apart (Paul Tol)."""
REST = ("rest of the measured peak", "#999999")
"""Name and colour of measured bytes whose category nobody measured."""
SERIES = ("#0077bb", "#ee7733", "#009988", "#cc3311", "#33bbee", "#ee3377")
"""Colours of optimizers, another set than that of categories: what is blue here has nothing to do with weights."""
DASHES = ((1, 0), (6, 3), (2, 2), (8, 2, 2, 2))
"""How lines are broken when the colours begin again."""


def width_in(width: int | str) -> str:
    """Return what stands for a chart's width in expressions: a number, or the signal of one fitted to its box.

    In a row of charts the signal is that of the row, so there widths are numbers.
    """
    return "width" if isinstance(width, str) else str(width)


def values(rows: Iterable[Mapping[str, Any]]) -> Any:
    """Return rows as data of a chart."""
    import altair as alt

    return alt.InlineData(values=list(rows))


def layer_colours(field: str, names: Iterable[tuple[str, str]], *, columns: int | None) -> Any:
    """Return the colour of a field whose values are names; without columns there is no legend, a page has its own."""
    import altair as alt

    known = list(names)
    scale = alt.Scale(domain=[name for name, _ in known], range=[colour for _, colour in known])
    shown = alt.Legend(orient="bottom", columns=columns) if columns else None
    return alt.Color(f"{field}:N", title=None, sort=[name for name, _ in known], scale=scale, legend=shown)


def themed(chart: Any, ink: str) -> Any:
    """Return a chart with the look of all charts; `ink` is the colour of text, axes and lines."""
    return (
        chart.configure(background="transparent", font=FONT)
        .configure_view(stroke=None)
        .configure_axis(
            labelColor=ink,
            titleColor=ink,
            domainColor=ink,
            tickColor=ink,
            gridColor=ink,
            gridOpacity=0.15,
            domainOpacity=0.5,
            tickOpacity=0.5,
            labelFontSize=12,
            titleFontSize=12,
            titleFontWeight="normal",
        )
        .configure_legend(labelColor=ink, titleColor=ink, labelFontSize=13, symbolType="square")
        .configure_title(color=ink, subtitleColor=ink, anchor="start", fontSize=16, subtitleFontSize=13)
    )


def on_page(chart: Any) -> dict[str, Any]:
    """Return a chart as data for a page, as wide as its box."""
    fitted = chart.properties(autosize={"type": "fit-x", "contains": "padding"})
    data: dict[str, Any] = themed(fitted, PAGE_INK).to_dict()
    return data
