"""Values as recipes and flags write them, read by their form. Needs nothing."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

Scalar = bool | int | float | str

_LONGEST_INTEGER = 4300
"""Digits at which Python refuses to read an integer."""
_INTEGER = re.compile(r"[+-]?[0-9]+")
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
