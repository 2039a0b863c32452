"""Hyperparameters of an optimizer: defaults overlaid with what the user gave, checked before anything is loaded."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from effcli.errors import UsageError, nearest

if TYPE_CHECKING:
    from effcli.optim.entry import OptimizerEntry
    from effcli.spec import OptimSpec

DEFAULT_MIN_8BIT_SIZE = 4096
"""Elements from which bitsandbytes keeps a state in 8 bit (`min_8bit_size` of its classes, 0.50.2)."""

_FLAGS = {
    "lr": "--lr",
    "beta1": "--beta1",
    "beta2": "--beta2",
    "eps": "--eps",
    "weight_decay": "--weight-decay",
    "min_8bit_size": "--min-8bit-size",
    "keep_32bit": "--keep-32bit",
}
_RANGES: dict[str, tuple[Callable[[float], bool], str]] = {
    "lr": (lambda x: x >= 0, "at least 0"),
    "beta1": (lambda x: 0 <= x < 1, "at least 0 and below 1"),
    "beta2": (lambda x: 0 <= x < 1, "at least 0 and below 1"),
    "eps": (lambda x: x >= 0, "at least 0"),
    "eps2": (lambda x: x >= 0, "at least 0"),
    "momentum": (lambda x: 0 <= x < 1, "at least 0 and below 1"),
    "dampening": (lambda x: 0 <= x <= 1, "between 0 and 1"),
    "decay_rate": (lambda x: x <= 0, "at most 0"),
    "beta2_decay": (lambda x: x <= 0, "at most 0"),
    "clip_threshold": (lambda x: x > 0, "above 0"),
    "d": (lambda x: x >= 1, "at least 1"),
}
"""Values that upstream's constructors accept, so that a wrong one is refused before a model is loaded."""

_TRUE, _FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")


def resolve_hyper(entry: OptimizerEntry, spec: OptimSpec) -> dict[str, Any]:
    """Return the entry's defaults overlaid with the specification.

    Raises:
        UsageError: a hyperparameter that the entry lacks, one given twice, a value of the wrong kind or out of range,
            or options that contradict each other.
    """
    named = {"lr": spec.lr, "beta1": spec.beta1, "beta2": spec.beta2, "eps": spec.eps}
    given: dict[str, Any] = {name: value for name, value in named.items() if value is not None}
    for name, value in spec.args.items():
        if name in given:
            raise UsageError(
                f"'{name}' is given twice, by {_FLAGS[name]} {given[name]} and by --optim-arg {name}={value}; keep one"
            )
        given[name] = value
    hyper = dict(entry.defaults)
    for name, value in given.items():
        if name not in entry.defaults:
            raise _unknown(entry, name)
        hyper[name] = _coerce(entry, name, value)
    hyper = entry.settle(hyper, frozenset(given))
    return hyper | _eight_bit(entry, spec)


def _eight_bit(entry: OptimizerEntry, spec: OptimSpec) -> dict[str, Any]:
    if entry.eight_bit:
        return {"min_8bit_size": spec.min_8bit_size, "keep_32bit": tuple(spec.keep_32bit)}
    for flag, given in (
        (f"--min-8bit-size {spec.min_8bit_size}", spec.min_8bit_size != DEFAULT_MIN_8BIT_SIZE),
        (f"--keep-32bit {' '.join(spec.keep_32bit)}", bool(spec.keep_32bit)),
    ):
        if given:
            raise UsageError(
                f"{flag} is for 8-bit optimizers, but '{entry.name}' keeps no 8-bit state; "
                "drop the flag or use --optim adam8bit"
            )
    return {}


def _unknown(entry: OptimizerEntry, name: str) -> UsageError:
    if name in ("weight_decay", "min_8bit_size", "keep_32bit"):
        return UsageError(f"--optim-arg {name}=...: this is set by {_FLAGS[name]}")
    shown = _FLAGS[name] if name in ("beta1", "beta2", "eps") else f"'{name}'"
    return UsageError(
        f"optimizer '{entry.name}' takes no {shown}; it takes {', '.join(sorted(entry.defaults))}."
        f"{nearest(name, entry.defaults)}"
    )


def _coerce(entry: OptimizerEntry, name: str, value: Any) -> Any:
    """Return `value` as the type of the entry's default, within the range that upstream accepts."""
    default = entry.defaults[name]
    if default is None and (value is None or (isinstance(value, str) and value.strip().lower() == "none")):
        return None
    kind: type = float if default is None else type(default)
    converted = {bool: _to_bool, int: _to_int, float: _to_float}[kind](value)
    if converted is None:
        allowed = {bool: "true or false", int: "a whole number", float: "a finite number"}[kind]
        optional = " or none" if default is None else ""
        raise UsageError(f"optimizer argument '{name}' of '{entry.name}' must be {allowed}{optional}, got '{value}'")
    accepts, allowed = _RANGES.get(name, (lambda x: True, ""))
    if not accepts(converted):
        raise UsageError(f"optimizer argument '{name}' of '{entry.name}' must be {allowed}, got {value}")
    return converted


def _to_bool(value: Any) -> bool | None:
    word = str(value).strip().lower()
    return True if word in _TRUE else False if word in _FALSE else None


def _to_int(value: Any) -> int | None:
    try:
        return None if isinstance(value, bool | float) else int(value)
    except (TypeError, ValueError):
        return None


def _to_float(value: Any) -> float | None:
    if isinstance(value, bool):
        return None
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) else None
