"""How numbers are written on the page and in pictures."""

from __future__ import annotations

import math

from effcli.units import format_bytes

NONE = "n/a"


def amount(num_bytes: int | None) -> str:
    """Return bytes with a binary unit; NONE where there are none to tell."""
    return NONE if num_bytes is None else format_bytes(num_bytes)


def number(value: float | None, digits: int = 4) -> str:
    """Return a number to so many significant digits, never in powers of ten where it is between 0.0001 and 1e9."""
    if value is None:
        return NONE
    if not math.isfinite(value):
        return str(value)
    if value == 0:
        return "0"
    if not 1e-4 <= abs(value) < 1e9:
        return f"{value:.{digits - 1}e}"
    return f"{value:,.{max(0, digits - 1 - math.floor(math.log10(abs(value))))}f}"


def ratio(value: float) -> str:
    """Return a ratio to three significant digits."""
    return number(value, 3)


def difference(num_bytes: int | None) -> str:
    """Return a difference in bytes with its sign, exact."""
    if num_bytes is None:
        return NONE
    return "0 B" if num_bytes == 0 else f"{'+' if num_bytes > 0 else '-'}{format_bytes(abs(num_bytes))}"
