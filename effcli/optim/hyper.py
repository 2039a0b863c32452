"""Hyperparameters of an optimizer: defaults overlaid with what the user gave, checked before anything is loaded."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from effcli.errors import UsageError, nearest
from effcli.optim.overrides import Override
from effcli.units import Basis

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
    "optim_bits": "--optim-bits",
    "min_8bit_size": "--min-8bit-size",
    "keep_32bit": "--keep-32bit",
}
_RANGES: dict[str, tuple[Callable[[float], bool], str]] = {
    "lr": (lambda x: x >= 0, "at least 0"),
    "beta1": (lambda x: 0 <= x < 1, "at least 0 and below 1"),
    "beta2": (lambda x: 0 <= x < 1, "at least 0 and below 1"),
    "beta3": (lambda x: 0 <= x < 1, "at least 0 and below 1"),
    "eps": (lambda x: x >= 0, "at least 0"),
    "eps2": (lambda x: x >= 0, "at least 0"),
    "momentum": (lambda x: 0 <= x < 1, "at least 0 and below 1"),
    "dampening": (lambda x: 0 <= x <= 1, "between 0 and 1"),
    "decay_rate": (lambda x: x <= 0, "at most 0"),
    "beta2_decay": (lambda x: x <= 0, "at most 0"),
    "weight_decay": (lambda x: x >= 0, "at least 0"),
    "optim_bits": (lambda x: x in (8, 32), "8 or 32"),
    "min_8bit_size": (lambda x: x >= 1, "at least 1"),
    "clip_threshold": (lambda x: x > 0, "above 0"),
    "d": (lambda x: x >= 1, "at least 1"),
    "max_unorm": (lambda x: x >= 0, "at least 0"),
    "t_alpha": (lambda x: x > 0, "above 0"),
    "t_beta3": (lambda x: x > 0, "above 0"),
    "alpha": (lambda x: x >= 0, "at least 0"),
    "rho": (lambda x: 0 <= x <= 1, "between 0 and 1"),
    "lr_decay": (lambda x: x >= 0, "at least 0"),
    "momentum_decay": (lambda x: x >= 0, "at least 0"),
    "initial_accumulator_value": (lambda x: x >= 0, "at least 0"),
    "etaminus": (lambda x: 0 < x < 1, "above 0 and below 1"),
    "etaplus": (lambda x: x > 1, "above 1"),
    "ns_steps": (lambda x: 1 <= x < 100, "between 1 and 99"),
    "ns_eps": (lambda x: x >= 0, "at least 0"),
}
"""Values that upstream's constructors accept, so that a wrong one is refused before a model is loaded."""

_EIGHT_BIT_OVERRIDES = {"optim_bits": 32, "min_8bit_size": DEFAULT_MIN_8BIT_SIZE, "is_sparse": False}
"""What else bitsandbytes' manager takes for a parameter, with a value of its type. Nothing in 0.50.2 reads
`is_sparse`; it is passed on all the same."""

_TRUE, _FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")


def default_hyper(entry: OptimizerEntry) -> dict[str, Any]:
    """Return the hyperparameters of an entry of which nothing was given."""
    hyper = entry.settle(dict(entry.defaults), frozenset())
    eight_bit = {"optim_bits": entry.default_bits, "min_8bit_size": DEFAULT_MIN_8BIT_SIZE} if entry.eight_bit else {}
    return {**hyper, **eight_bit, "overrides": ()}


def resolve_hyper(entry: OptimizerEntry, spec: OptimSpec, overrides: Iterable[Override] = ()) -> dict[str, Any]:
    """Return the entry's defaults overlaid with the specification.

    `overrides` come after those of the specification; `override_config` makes them from parameters.

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
        hyper[name] = _coerce(entry, name, value, entry.defaults)
    hyper = entry.settle(hyper, frozenset(given))
    if not entry.takes_weight_decay and "weight_decay" in spec.model_fields_set and spec.weight_decay:
        raise UsageError(f"--weight-decay {spec.weight_decay}: '{entry.name}' has no weight decay; leave the flag out")
    hyper |= _eight_bit(entry, spec)
    return hyper | {"overrides": _overrides(entry, spec, overrides, hyper)}


def _eight_bit(entry: OptimizerEntry, spec: OptimSpec) -> dict[str, Any]:
    if entry.eight_bit:
        return {"optim_bits": spec.optim_bits or entry.default_bits, "min_8bit_size": spec.min_8bit_size}
    taken: dict[str, Any] = {}
    for name, text, given in (
        ("optim_bits", spec.optim_bits, spec.optim_bits is not None),
        ("min_8bit_size", spec.min_8bit_size, spec.min_8bit_size != DEFAULT_MIN_8BIT_SIZE),
        ("keep_32bit", " ".join(spec.keep_32bit), bool(spec.keep_32bit)),
    ):
        if given and name in spec.args:
            raise UsageError(f"'{name}' is given twice, by {_FLAGS[name]} {text} and by --optim-arg; keep one")
        if given and name not in entry.defaults:
            raise UsageError(
                f"{_FLAGS[name]} {text} is for the listed optimizers of bitsandbytes, not for '{entry.name}'; "
                "drop the flag or use --optim adam8bit"
            )
        if given:  # a class by path that has an argument of this name
            taken[name] = getattr(spec, name)
    return taken


def _overrides(
    entry: OptimizerEntry, spec: OptimSpec, further: Iterable[Override], hyper: Mapping[str, Any]
) -> tuple[Override, ...]:
    """Return the overrides of `--override` in their order, then those of `--keep-32bit`, then the further ones."""
    own = [Override(pattern=pattern, values=values) for pattern, values in spec.overrides.items()]
    kept = [Override(pattern=pattern, values={"optim_bits": 32}, flag="--keep-32bit") for pattern in spec.keep_32bit]
    return tuple(
        replace(override, values=_override_values(entry, override, hyper)) for override in (*own, *kept, *further)
    )


def _override_values(entry: OptimizerEntry, override: Override, hyper: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of one override, each of its declared type; the entry must bear them together.

    Raises:
        UsageError: a key that cannot be overridden, or a value that the entry refuses.
    """
    said = f"{override.flag} '{override.pattern.removeprefix('=')}'"
    allowed = [name for name in ("lr", "beta1", "beta2", "beta3", "eps") if name in entry.defaults]
    allowed += ["weight_decay"] if entry.takes_weight_decay else []
    allowed += list(_EIGHT_BIT_OVERRIDES) if entry.eight_bit else []
    values: dict[str, Any] = {}
    for key, value in override.values.items():
        if key not in allowed:
            raise UsageError(
                f"{said}: '{entry.name}' cannot override '{key}'; it can {', '.join(allowed)}.{nearest(key, allowed)}"
            )
        values[key] = _coerce(entry, key, value, {**_EIGHT_BIT_OVERRIDES, "weight_decay": 0.0, **entry.defaults})
    if not values:
        raise UsageError(f"{said} overrides nothing; it can {', '.join(allowed)}, as in lr=1e-5")
    entry.settle({**hyper, **values}, frozenset(values))
    return values


def _unknown(entry: OptimizerEntry, name: str) -> UsageError:
    if name in ("weight_decay", "optim_bits", "min_8bit_size", "keep_32bit"):
        return UsageError(f"--optim-arg {name}=...: this is set by {_FLAGS[name]}")
    shown = _FLAGS[name] if name in ("beta1", "beta2", "eps") else f"'{name}'"
    return UsageError(
        f"optimizer '{entry.name}' takes no {shown}; it takes {', '.join(sorted(entry.defaults))}."
        f"{nearest(name, entry.defaults)}"
    )


def _coerce(entry: OptimizerEntry, name: str, value: Any, defaults: Mapping[str, Any]) -> Any:
    """Return `value` as the type of its default, within the range that upstream accepts."""
    default = defaults[name]
    if default is None and (value is None or (isinstance(value, str) and value.strip().lower() == "none")):
        return None
    by_form = entry.basis is Basis.PROBED  # of a class by path nothing is known but its defaults
    if by_form and default is None:
        return value
    kind: type = float if default is None else type(default)
    convert, allowed = _KINDS[kind]
    if by_form and kind is int:  # often written for a float
        convert, allowed = _to_number, "a number"
    converted = convert(value)
    if converted is None or (kind is tuple and len(converted) != len(default)):
        optional = " or none" if default is None else f", {len(default)} of them" if kind is tuple else ""
        raise UsageError(f"optimizer argument '{name}' of '{entry.name}' must be {allowed}{optional}, got '{value}'")
    accepts, allowed = _RANGES.get(name, (lambda x: True, ""))
    if not accepts(converted) and not (by_form and name not in _FLAGS):
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


def _to_text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None


def _to_float(value: Any) -> float | None:
    if isinstance(value, bool):
        return None
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) else None


def _to_number(value: Any) -> int | float | None:
    whole = _to_int(value)
    return _to_float(value) if whole is None else whole


def _to_numbers(value: Any) -> tuple[float, ...] | None:
    items = value.strip(" ()[]").split(",") if isinstance(value, str) else value
    numbers = [_to_number(item) for item in items] if isinstance(items, list | tuple) else [None]
    return None if None in numbers else tuple(number for number in numbers if number is not None)


_KINDS: dict[type, tuple[Callable[[Any], Any], str]] = {
    bool: (_to_bool, "true or false"),
    int: (_to_int, "a whole number"),
    float: (_to_float, "a finite number"),
    str: (_to_text, "a text"),
    tuple: (_to_numbers, "numbers with commas"),
}
"""Type of a default -> how a value becomes one, and what a message calls it."""
