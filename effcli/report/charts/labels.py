"""Where labels of points go, so that none lies on another."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

Align = Literal["left", "center", "right"]
_LETTER, _LINE = 7.6, 16
"""Width of a letter and height of a line in pixels, for bold text of 13."""
_NARROWEST = 320
"""Width in pixels of a chart in a picture or on a phone; on wider ones there is more room than is reckoned with."""
_LEVELS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Spot:
    """A text to place at a point: `across` is its share of the width, `down` and `radius` are pixels."""

    text: str
    across: float
    down: float
    radius: float


class Placed(NamedTuple):
    """How a text is drawn, relative to its point, in pixels."""

    align: Align
    dx: float
    dy: float


class _Box(NamedTuple):
    left: float
    right: float
    top: float

    def covers(self, other: _Box) -> bool:
        apart = self.right <= other.left or other.right <= self.left or abs(self.top - other.top) >= _LINE
        return not apart


def placed(spots: Sequence[Spot]) -> list[Placed]:
    """Return where each text goes, earlier ones first: above its point or below, as near as nothing is there yet."""
    taken: list[_Box] = []
    found = []
    for spot in spots:
        align, dx = _side(spot.across)
        options = [(dy, _box(spot, align, dx, dy)) for dy in _heights(spot.radius)]
        dy, box = next((option for option in options if not any(map(option[1].covers, taken))), options[0])
        taken.append(box)
        found.append(Placed(align, dx, dy))
    return found


def _side(across: float) -> tuple[Align, float]:
    """Return the alignment that keeps a text inside the chart."""
    return ("left", -4) if across < 0.25 else ("right", 10) if across > 0.75 else ("center", 0)


def _heights(radius: float) -> Iterable[float]:
    """Yield shifts from a point, from the nearest one: the first above, the second below."""
    for level in range(_LEVELS):
        yield -radius - 7 - level * _LINE
        yield radius + 15 + level * _LINE


def _box(spot: Spot, align: Align, dx: float, dy: float) -> _Box:
    width = min(_LETTER * len(spot.text), _NARROWEST / 2)
    place = spot.across * _NARROWEST + dx
    left = place - {"left": 0.0, "center": 0.5, "right": 1.0}[align] * width
    return _Box(left, left + width, spot.down + dy)
