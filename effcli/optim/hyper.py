"""Hyperparameters of an optimizer: defaults overlaid with what the user gave, checked before anything is loaded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from effcli.errors import UsageError, nearest
from effcli.flags import FLAG_OF
from effcli.optim.overrides import Override
from effcli.optim.ranges import FLAGGED
from effcli.units import Basis
from effcli.values import to_bool, to_float, to_int, to_number, to_numbers, to_text

if TYPE_CHECKING:
    from effcli.optim.entry import OptimizerEntry
    from effcli.spec import OptimSpec

DEFAULT_MIN_8BIT_SIZE = 4096
"""Elements from which bitsandbytes keeps a state in 8 bit (`min_8bit_size` of its classes, 0.50.2)."""

_EIGHT_BIT_OVERRIDES = {"optim_bits": 32, "min_8bit_size": DEFAULT_MIN_8BIT_SIZE, "is_sparse": False}
"""What else bitsandbytes' manager takes for a parameter, with a value of its type. Nothing in 0.50.2 reads
`is_sparse`; it is passed on all the same."""


def flag_of(name: str) -> str:
    """Return the flag that sets a hyperparameter."""
    return FLAG_OF.get(f"optim.{name}", f"--optim-arg {name}=")


def default_hyper(entry: OptimizerEntry) -> dict[str, Any]:
    """Return the hyperparameters of an entry of which nothing was given."""
    hyper = entry.settle(dict(entry.defaults), frozenset())
    eight_bit = {"optim_bits": entry.bits, "min_8bit_size": DEFAULT_MIN_8BIT_SIZE} if entry.eight_bit else {}
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
                f"'{name}' is given twice, by {flag_of(name)} {given[name]} and by --optim-arg {name}={value}; keep one"
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
        return {
            "optim_bits": spec.optim_bits or entry.bits,
            "min_8bit_size": spec.min_8bit_size or DEFAULT_MIN_8BIT_SIZE,
        }
    taken: dict[str, Any] = {}
    for name, text, given in (
        ("optim_bits", spec.optim_bits, spec.optim_bits is not None),
        ("min_8bit_size", spec.min_8bit_size, spec.min_8bit_size is not None),
        ("keep_32bit", " ".join(spec.keep_32bit), bool(spec.keep_32bit)),
    ):
        if given and name in spec.args:
            raise UsageError(f"'{name}' is given twice, by {flag_of(name)} {text} and by --optim-arg; keep one")
        if given and name not in entry.defaults:
            raise UsageError(
                f"{flag_of(name)} {text} is for the listed optimizers of bitsandbytes, not for '{entry.name}'; "
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
    allowed = [name for name in allowed if name not in entry.not_overridable]
    choices = f"it can {', '.join(allowed)}" if allowed else "it takes no overrides"
    values: dict[str, Any] = {}
    for key, value in override.values.items():
        if key not in allowed:
            raise UsageError(f"{said}: '{entry.name}' cannot override '{key}'; {choices}.{nearest(key, allowed)}")
        values[key] = _coerce(entry, key, value, {**_EIGHT_BIT_OVERRIDES, "weight_decay": 0.0, **entry.defaults})
    if not values:
        raise UsageError(f"{said} overrides nothing; {choices}{f', as in {allowed[0]}=1e-5' if allowed else ''}")
    entry.settle({**hyper, **values}, frozenset(values))
    return values


def _unknown(entry: OptimizerEntry, name: str) -> UsageError:
    if name in ("weight_decay", "optim_bits", "min_8bit_size", "keep_32bit"):
        return UsageError(f"--optim-arg {name}=...: this is set by {flag_of(name)}")
    shown = flag_of(name) if name in ("beta1", "beta2", "eps") else f"'{name}'"
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
        convert, allowed = to_number, "a number"
    converted = convert(value)
    if converted is None or (kind is tuple and len(converted) != len(default)):
        optional = " or none" if default is None else f", {len(default)} of them" if kind is tuple else ""
        raise UsageError(f"optimizer argument '{name}' of '{entry.name}' must be {allowed}{optional}, got '{value}'")
    limits = entry.ranges.get(name, FLAGGED.get(name))
    if limits is not None and not limits.accepts(converted):
        raise UsageError(f"optimizer argument '{name}' of '{entry.name}' must be {limits.text}, got {value}")
    return converted


_KINDS: dict[type, tuple[Callable[[Any], Any], str]] = {
    bool: (to_bool, "true or false"),
    int: (to_int, "a whole number"),
    float: (to_float, "a finite number"),
    str: (to_text, "a text"),
    tuple: (to_numbers, "numbers with commas"),
}
"""Type of a default -> how a value becomes one, and what a message calls it."""
