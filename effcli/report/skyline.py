"""Live bytes over an update as a chart of block characters, a few rows high, with its phases named below."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from effcli.report.text import can_encode
from effcli.units import Phase, format_bytes

if TYPE_CHECKING:
    from effcli.memory.plan import TimelinePoint

_BLOCKS = " ▁▂▃▄▅▆▇█"
_ASCII = " .:#"
_SHORT: dict[str, str] = {Phase.FORWARD: "fwd", Phase.BACKWARD: "bwd"}
_ROWS = 5
_WIDTH = 79


def total_bytes(point: TimelinePoint) -> int:
    """Return what is live at one moment."""
    return (
        point.weights_bytes
        + point.gradients_bytes
        + point.optimizer_state_bytes
        + point.activations_bytes
        + point.temporaries_bytes
        + point.communication_bytes
    )


def skyline(points: Sequence[TimelinePoint], encoding: str, width: int = _WIDTH) -> tuple[str, ...]:
    """Return the lines of a chart whose columns are moments in order, not spans of time; at most `width` characters.

    A column is as high as the highest of its moments, measured from 0. Where the encoding has no block characters,
    ASCII takes their place.
    """
    totals = [total_bytes(point) for point in points]
    peak = max(totals)
    scale = format_bytes(peak)
    columns = width - len(scale) - 1
    starts = [column * len(points) // columns for column in range(columns)]
    heights = [
        max(totals[start : max(start + 1, following)])
        for start, following in zip(starts, [*starts[1:], len(points)], strict=True)
    ]
    levels = _BLOCKS if can_encode(_BLOCKS, encoding) else _ASCII
    rows = _rows([height / peak for height in heights], levels)
    top = heights.index(peak)
    labels = [scale, *[""] * (_ROWS - 2), "0"]
    return (
        _line(" " * top + ("▼" if levels is _BLOCKS else "v"), scale),
        *(_line(row, scale, label) for label, row in zip(labels, rows, strict=True)),
        _line(_names([(points[start].update, points[start].micro, points[start].phase) for start in starts]), scale),
        _line(_names([("first update", "later updates")[min(points[start].update, 1)] for start in starts]), scale),
    )


def _rows(shares: Sequence[float], levels: str) -> list[str]:
    """Return rows from the top down; what is above 0 shows at least as the lowest level."""
    steps = len(levels) - 1
    heights = [max(round(share * steps * _ROWS), 1 if share > 0 else 0) for share in shares]
    return [
        "".join(levels[min(steps, max(0, height - row * steps))] for height in heights)
        for row in reversed(range(_ROWS))
    ]


def _names(columns: Sequence[object]) -> str:
    """Return a line with a mark and, as far as there is room, a name where the value of a column changes."""
    line = ""
    for value, group in groupby(columns):
        name = str(value[-1] if isinstance(value, tuple) else value)
        room = len(list(group))
        fitting = (text for text in (name, _SHORT.get(name, name[:1]), name[:1]) if len(text) < room)
        line += f"|{next(fitting, '')}".ljust(room)
    return line


def _line(text: str, scale: str, label: str = "") -> str:
    return f"{label:>{len(scale)}} {text}".rstrip()
