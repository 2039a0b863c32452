"""Colours, letters and lines that all charts share. Text takes the reader's colour on a page, its own in a picture."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from effcli.files import write_bytes, write_text
from effcli.units import Category

if TYPE_CHECKING:
    from effcli.memory.plan import MemoryPlan

PAGE_INK = "currentColor"
PICTURE_INK, PICTURE_PAPER = "#222222", "#ffffff"
FONT = "system-ui, sans-serif"
Layers = dict[Category, tuple[str, str]]
LAYERS: Layers = {
    Category.WEIGHTS: ("weights", "#4477aa"),
    Category.OPTIMIZER_STATE: ("optimizer state", "#228833"),
    Category.GRADIENTS: ("gradients", "#ccbb44"),
    Category.ACTIVATIONS: ("activations", "#66ccee"),
    Category.TEMPORARIES: ("temporaries", "#ee6677"),
    Category.COMMUNICATION: ("exchange", "#aa3377"),
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


class Rows:
    """The rows of a chart, kept apart from its description, which names them: altair copies and checks what it holds.

    `prefix` sets the names apart from those of other charts in the same picture.
    """

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self.by_name: dict[str, list[Mapping[str, Any]]] = {}

    def add(self, rows: Iterable[Mapping[str, Any]]) -> Any:
        """Return rows as the data of one or more layers."""
        import altair as alt

        name = f"{self._prefix}-{len(self.by_name)}"
        self.by_name[name] = list(rows)
        return alt.NamedData(name=name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """A chart without a look of its own, and its rows."""

    chart: Any
    rows: Rows

    def on_page(self) -> dict[str, Any]:
        """Return the chart as data for a page, as wide as its box."""
        fit = {"type": "fit-x", "contains": "padding"}
        return {**self.chart.to_dict(), "config": config(PAGE_INK), "autosize": fit, "datasets": self.rows.by_name}


def layers_of(plan: MemoryPlan) -> Layers:
    """Return the categories that a plan has, from the bottom up."""
    return {category: look for category, look in LAYERS.items() if category in plan.categories}


def layer_colours(field: str, names: Iterable[tuple[str, str]], *, columns: int | None) -> Any:
    """Return the colour of a field whose values are names; without columns there is no legend, a page has its own."""
    import altair as alt

    known = list(names)
    scale = alt.Scale(domain=[name for name, _ in known], range=[colour for _, colour in known])
    shown = alt.Legend(orient="bottom", columns=columns) if columns else None
    return alt.Color(f"{field}:N", title=None, sort=[name for name, _ in known], scale=scale, legend=shown)


def config(ink: str) -> dict[str, Any]:
    """Return the look of all charts; `ink` is the colour of text, axes and lines."""
    axis = {f"{part}Color": ink for part in ("label", "title", "domain", "tick", "grid")}
    return {
        "background": "transparent",
        "font": FONT,
        "view": {"stroke": None},
        "axis": {
            **axis,
            "gridOpacity": 0.15,
            "domainOpacity": 0.5,
            "tickOpacity": 0.5,
            "labelFontSize": 12,
            "titleFontSize": 12,
            "titleFontWeight": "normal",
        },
        "legend": {"labelColor": ink, "titleColor": ink, "labelFontSize": 13, "symbolType": "square"},
        "title": {"color": ink, "subtitleColor": ink, "anchor": "start", "fontSize": 16, "subtitleFontSize": 13},
    }


def draw(chart: Any, rows: Mapping[str, Sequence[Mapping[str, Any]]], path: Path) -> None:
    """Write a chart as a picture on white paper; the ending of the path, .svg or .png, says what it becomes.

    Raises:
        WriteError: the file cannot be written.
    """
    import vl_convert

    look = {"config": config(PICTURE_INK), "background": PICTURE_PAPER, "padding": 20}
    described = {**chart.to_dict(), **look, "datasets": rows}
    if path.suffix.lower() == ".svg":
        write_text(path, vl_convert.vegalite_to_svg(described))
    else:
        write_bytes(path, vl_convert.vegalite_to_png(described, scale=2))
