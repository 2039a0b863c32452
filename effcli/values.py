"""Values as recipes and flags write them, read by their form. Needs nothing."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

Scalar = bool | int | float | str

_TRUE, _FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")

_LONGEST_INTEGER = 4300
"""Digits at which Python refuses to read an integer."""
_INTEGER = re.compile(r"[+-]?[0-9]+")
_DEVICE = re.compile(r"auto|cpu|cuda(:[0-9]+)?")
_FLOAT = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")


def as_list(value: Any) -> Any:
    """Return a single text as a list of one, nothing as an empty list, and anything else as it is."""
    if value is None:
        return ()
    return (value,) if isinstance(value, str) else value


def as_scalar(key: str, value: Any) -> Scalar:
    """Return an optimizer argument as the boolean, integer, float or text that its writing says.

    The type that the optimizer expects is not known here, so `true`, `1`, `1e-4` and `mean` decide by their form; `no`
    and `off` stay texts, and nothing becomes the text `none`, which the registry reads as "switched off".

    Raises:
        ValueError: the value is neither a text, a finite number nor a boolean.
    """
    if value is None:
        return "none"
    if isinstance(value, str):
        if value.lower() in ("true", "false"):
            return value.lower() == "true"
        if _INTEGER.fullmatch(value) and len(value) < _LONGEST_INTEGER:
            return int(value)
        value = float(value) if _FLOAT.fullmatch(value) else value
    if not isinstance(value, bool | int | float | str):
        raise ValueError(f"{key} has no single value; give a text, a number, true or false")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{key} is not a finite number")
    return value


def scalars(value: Any, example: str) -> Any:
    """Return keys with scalar values, or an empty mapping for nothing.

    Raises:
        ValueError: `value` is no mapping; the message shows `example`.
    """
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ValueError(f"{value!r} is no set of keys with values; write {example}")
    return {key: as_scalar(key, given) for key, given in value.items()}


def as_percentage(value: Any) -> float | None:
    """Return a number or the text of one, which may end in a percent sign, as a number; None for None.

    Raises:
        ValueError: it is no finite number of 0 or more.
    """
    if value is None:
        return None
    number = to_float(value.strip().removesuffix("%") if isinstance(value, str) else value)
    if number is None or number < 0:
        raise ValueError(f"{value!r} is no percentage of 0 or more; give one such as 5 or 5%")
    return number or 0.0  # which has no sign


def to_bool(value: Any) -> bool | None:
    """Return the boolean that a value or its writing means; None where it means none."""
    word = str(value).strip().lower()
    return True if word in _TRUE else False if word in _FALSE else None


def to_int(value: Any) -> int | None:
    """Return a whole number or the one that a text writes; None for anything else, `1.0` and `true` too."""
    try:
        return None if isinstance(value, bool | float) else int(value)
    except (TypeError, ValueError):
        return None


def to_float(value: Any) -> float | None:
    """Return a finite number or the one that a text writes; None for anything else, `true` too."""
    if isinstance(value, bool):
        return None
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) else None


def to_number(value: Any) -> int | float | None:
    """Return a whole number where that is what is written, else a finite one; None for anything else."""
    whole = to_int(value)
    return to_float(value) if whole is None else whole


def to_numbers(value: Any) -> tuple[float, ...] | None:
    """Return the numbers of a list, or of a text with commas in it; None where one of them is none."""
    items = value.strip(" ()[]").split(",") if isinstance(value, str) else value
    numbers = [to_number(item) for item in items] if isinstance(items, list | tuple) else [None]
    return None if None in numbers else tuple(number for number in numbers if number is not None)


def to_text(value: Any) -> str | None:
    """Return a text that is not empty; None for anything else."""
    return value if isinstance(value, str) and value else None


SHORTEST_INTERVAL_S = 0.01
"""Seconds between two readings of a driver, below which they would be a burden."""


def as_interval(value: float) -> float:
    """Return seconds between two readings, 0 for none.

    Raises:
        ValueError: they are fewer than any use has.
    """
    if 0 < value < SHORTEST_INTERVAL_S:
        raise ValueError(f"{value:g} s is too short; give 0 for no readings, or at least {SHORTEST_INTERVAL_S:g}")
    return value


def as_shard(value: Any) -> Any:
    """Return `ddp` where nothing is to be sharded; YAML reads a bare `none` as a text, and `null` as None."""
    return "ddp" if value is None or value == "none" else value


def as_device(value: str) -> str:
    """Return the name of a device.

    Raises:
        ValueError: it is none.
    """
    if not _DEVICE.fullmatch(value):
        raise ValueError(f"{value!r} is not a device; give auto, cpu, cuda or cuda:0")
    return value
