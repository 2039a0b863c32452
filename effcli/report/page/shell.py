"""The page around charts: one file that asks nobody for anything, in light and dark, on phones and on paper."""

from __future__ import annotations

import base64
import hashlib
import html
import json
from collections.abc import Iterable, Mapping
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from effcli.report.charts.style import layers_of

if TYPE_CHECKING:
    from effcli.memory.plan import MemoryPlan

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"
"""What a browser lets the page do: draw itself. Scripts run by their hash alone; vega sets styles as it goes."""
_ESCAPES = {ord(character): f"\\u{ord(character):04x}" for character in "<>&\u2028\u2029"}


def escaped(text: object) -> str:
    """Return text as HTML that shows it and nothing else, also inside an attribute."""
    return html.escape(str(text))


def in_script(value: Any) -> str:
    """Return a value as JSON that cannot end the element it stands in, and is one line for any parser."""
    return json.dumps(value, allow_nan=False, separators=(",", ":"), ensure_ascii=False).translate(_ESCAPES)


def document(*, title: str, body: Iterable[str], charts: Mapping[str, Mapping[str, Any]]) -> str:
    """Return a whole page; `body` is HTML in which an element has the id of each chart.

    vega parses expressions of charts itself (`ast`), so the page needs no leave to make code of text.
    """
    library, own = (_library(), _asset("page.js")) if charts else ("", _asset("page.js"))
    scripts = [script for script in (library, own) if script]
    allowed = " ".join(f"'sha256-{_digest(script)}'" for script in scripts)
    return "\n".join(
        (
            "<!DOCTYPE html>",
            '<html lang="en">',
            "<head>",
            '<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}; script-src {allowed}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="color-scheme" content="light dark">',
            f"<title>{escaped(title)}</title>",
            f"<style>\n{_asset('page.css')}</style>",
            "</head>",
            "<body>",
            *body,
            f'<script type="application/json" id="charts">{in_script(charts)}</script>',
            *(f"<script>{script}</script>" for script in scripts),
            "</body>",
            "</html>\n",
        )
    )


def chart_box(key: str) -> str:
    """Return the element that a chart is drawn into."""
    return f'<div class="chart" id="{key}"></div>'


def legend(entries: Iterable[tuple[str, str, tuple[int, ...] | None]]) -> str:
    """Return names beside their colours; a line in its dashes where these are given, else a square."""
    items = []
    for name, colour, dash in entries:
        shape = (
            f'<rect width="14" height="14" y="1" rx="2" fill="{colour}"/>'
            if dash is None
            else f'<path d="M0 8H26" stroke="{colour}" stroke-width="3" stroke-dasharray="{_dashes(dash)}"/>'
        )
        width = 14 if dash is None else 26
        picture = f'<svg width="{width}" height="16" aria-hidden="true">{shape}</svg>'
        items.append(f"<li>{picture}{escaped(name)}</li>")
    return f'<ul class="legend">{"".join(items)}</ul>'


def layer_legend(*plans: MemoryPlan) -> str:
    """Return the legend of the categories of memory that some plan has."""
    layers = {category: look for plan in plans for category, look in layers_of(plan).items()}
    return legend((name, colour, None) for name, colour in layers.values())


def _dashes(dash: tuple[int, ...]) -> str:
    return "none" if dash == (1, 0) else " ".join(map(str, dash))


@cache
def _library() -> str:
    """Return the charts' library, which comes with vl-convert, without an end of its element in it."""
    import vl_convert

    bundle: str = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;")
    return bundle.replace("</script", "<\\/script")


def _asset(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def _digest(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
