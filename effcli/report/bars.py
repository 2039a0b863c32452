"""Bars of block characters, for amounts side by side in a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from effcli.report.text import can_encode

_BLOCKS, _ASCII = ("█", "▓", "░", "▒"), ("#", "=", ".", "-")


def fills(encoding: str) -> tuple[str, ...]:
    """Return one fill per part of a bar, told apart without colour; ASCII where the encoding lacks blocks.

    They stand for weights, gradients, state, and for activations and temporaries.
    """
    return _BLOCKS if can_encode("".join(_BLOCKS), encoding) else _ASCII


def stacked_bar(parts: Sequence[int], largest: int, width: int, encoding: str) -> str:
    """Return a bar in which each part is as long as its share of `largest`, at most `width` characters.

    Ends of parts are rounded, not lengths, so that the whole is as long as the sum says.
    """
    if largest <= 0:
        return ""
    bar, reached = "", 0
    for part, fill in zip(parts, fills(encoding), strict=False):
        reached += part
        bar += fill * (round(width * reached / largest) - len(bar))
    return bar
