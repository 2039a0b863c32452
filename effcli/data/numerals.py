"""Reading numbers that are written as text, strictly: `nan`, `inf`, `1_000` and `0x1` are words, not numbers."""

from __future__ import annotations

import math
import re

NUMERAL = re.compile(r"[+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d{1,3})?", re.ASCII)
INTEGER = re.compile(r"[+-]?\d+", re.ASCII)
DECIMAL_COMMA = re.compile(r"[+-]?\d+,\d+", re.ASCII)
THOUSANDS_COMMA = re.compile(r"[+-]?[1-9]\d{0,2},\d{3}", re.ASCII)


def parse_number(text: str) -> int | float | None:
    """Return the number that `text` spells, as an int where it is whole; None where it is no number."""
    stripped = text.strip()
    if not NUMERAL.fullmatch(stripped):
        return None
    value = float(stripped)
    if not math.isfinite(value):  # thousands of digits too, which int() refuses
        return None
    return int(stripped) if INTEGER.fullmatch(stripped) else whole(value)


def has_decimal_comma(text: str) -> bool:
    """Return whether `text` looks like a number as it is written in many languages, such as 3,5."""
    return DECIMAL_COMMA.fullmatch(text.strip()) is not None


def may_have_thousands_comma(text: str) -> bool:
    """Return whether a number with a comma, such as 1,000, may be meant as one with its thousands set apart."""
    return THOUSANDS_COMMA.fullmatch(text.strip()) is not None


def whole(value: float) -> int | float:
    """Return `value` as an int where it is a whole number, else unchanged."""
    return int(value) if value.is_integer() else value
