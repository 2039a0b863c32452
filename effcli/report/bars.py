"""Bars of block characters, for amounts side by side in a terminal."""

from __future__ import annotations

from collections.abc import Sequence

FILLS = ("█", "▓", "░")
"""One fill per part of a bar, told apart without colour."""


def stacked_bar(parts: Sequence[int], largest: int, width: int) -> str:
    """Return a bar in which each part is as long as its share of `largest`, at most `width` characters.

    Ends of parts are rounded, not lengths, so that the whole is as long as the sum says.
    """
    if largest <= 0:
        return ""
    bar, reached = "", 0
    for part, fill in zip(parts, FILLS, strict=False):
        reached += part
        bar += fill * (round(width * reached / largest) - len(bar))
    return bar
