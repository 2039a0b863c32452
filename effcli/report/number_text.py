"""How numbers are written: what is not known, what is too small for its unit, ratios, differences."""

from __future__ import annotations

import math

from effcli.units import MIB, format_bytes

NOT_AVAILABLE = "n/a"
"""What stands where there is no number to tell."""


def amount(num_bytes: int | None) -> str:
    """Return bytes with a binary unit; NOT_AVAILABLE where there are none to tell."""
    return NOT_AVAILABLE if num_bytes is None else format_bytes(num_bytes)


def in_mib(num_bytes: int) -> str:
    """Return bytes in MiB, however many, so that a column can be added up; below 1 MiB with the unit that suits."""
    return format_bytes(num_bytes) if abs(num_bytes) < MIB else f"{num_bytes / MIB:,.2f} MiB"


def mib(num_bytes: int | None) -> str:
    """Return bytes as `in_mib` does; NOT_AVAILABLE where there are none to tell."""
    return NOT_AVAILABLE if num_bytes is None else in_mib(num_bytes)


def number(value: float | None, digits: int = 4) -> str:
    """Return a number to so many significant digits, never in powers of ten where it is between 0.0001 and 1e9."""
    if value is None:
        return NOT_AVAILABLE
    if not math.isfinite(value):
        return str(value)
    if value == 0:
        return "0"
    shown = f"{value:.{digits - 1}e}"  # rounded first: 0.9996 is 1.00, with as many digits as 1 has
    if not 1e-4 <= abs(float(shown)) < 1e9:
        return shown
    exponent = int(shown.partition("e")[2])
    return f"{value:,.{max(0, digits - 1 - exponent)}f}"


def ratio(value: float) -> str:
    """Return a ratio to three significant digits: those of optimizers' states range from 1 to 0.0001."""
    return number(value, 3)


def difference(num_bytes: int | None) -> str:
    """Return a difference in bytes with its sign, exact."""
    if num_bytes is None:
        return NOT_AVAILABLE
    return "0 B" if num_bytes == 0 else f"{'+' if num_bytes > 0 else '-'}{format_bytes(abs(num_bytes))}"
