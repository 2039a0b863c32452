"""What a written page holds, read back without a browser."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any


def charts_of(page: str) -> dict[str, dict[str, Any]]:
    """Return the description of each chart that a page draws."""
    found = re.search(r'<script type="application/json" id="charts">(.*?)</script>', page, re.DOTALL)
    assert found
    return json.loads(found[1])


def layers(chart: dict[str, Any], mark: str) -> list[dict[str, Any]]:
    """Return the layers of that kind of mark."""
    return [layer for layer in chart.get("layer", [chart]) if layer["mark"]["type"] == mark]


def rows_of(chart: dict[str, Any], mark: str) -> list[list[dict[str, Any]]]:
    """Return the data of each layer of that kind."""
    return [chart["datasets"][layer["data"]["name"]] for layer in layers(chart, mark)]


def texts_in(value: Any) -> Iterator[str]:
    """Yield the keys of all mappings inside a value: what a chart calls its fields and settings."""
    if isinstance(value, dict):
        yield from value
        for inner in value.values():
            yield from texts_in(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from texts_in(inner)
