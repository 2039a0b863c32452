"""Flags -> `EstimateSpec` or `SearchSpec`: which of several optimizers each setting is for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from effcli.errors import UsageError
from effcli.estimate_spec import EstimateSpec, build_estimate_spec
from effcli.optim import registry
from effcli.optim.entry import OptimizerEntry
from effcli.recipes import overlay
from effcli.search_spec import SearchSpec, build_search_spec
from effcli.units import listed

DEFAULT_OPTIMIZERS = ("adamw", "adafactor", "adam8bit", "lion8bit", "adamw4bit", "sgd")
"""What is estimated when nothing is asked for: the usual one, and what saves ever more."""
ALL = "all"
_EIGHT_BIT = ("keep_32bit", "min_8bit_size", "optim_bits", "is_sparse")


SEARCHED_OPTIMIZERS = ("adamw", "adafactor", "adamw8bit")
"""What a search tries when nothing is asked for: what trains much as AdamW does, in ever less memory."""
_Spec = TypeVar("_Spec", EstimateSpec, SearchSpec)


def resolve_estimate(flags: Mapping[str, Any]) -> tuple[EstimateSpec, tuple[str, ...]]:
    """Return the specification of an estimate; see `_resolve`."""
    return _resolve(flags, DEFAULT_OPTIMIZERS, build_estimate_spec)


def resolve_search(flags: Mapping[str, Any]) -> tuple[SearchSpec, tuple[str, ...]]:
    """Return the specification of a search; see `_resolve`.

    Raises:
        UsageError: there is no card to search for.
    """
    if not (flags.get("loop") or {}).get("gpu"):
        raise UsageError("say what the settings must fit: --gpu 24GiB, or a card that `effcli gpus` lists")
    return _resolve(flags, SEARCHED_OPTIMIZERS, build_search_spec)


def _resolve(
    flags: Mapping[str, Any], usual: Sequence[str], build: Callable[[Mapping[str, Any]], _Spec]
) -> tuple[_Spec, tuple[str, ...]]:
    """Return the specification of nested sections, `optim.name` a list, and what should be said about it.

    A setting of an optimizer goes to each of the named ones that has it; which ones have not is said. One that none of
    them has stays with the first, whose hyperparameters are then refused.

    Raises:
        UsageError: an unknown name, or a value that is not allowed.
    """
    optim = dict(flags.get("optim") or {})
    names = optim.pop("name", None) or usual
    values = {"model": {}, **{key: section for key, section in flags.items() if key != "optim"}}
    build({**values, "optim": [optim]})  # so that a wrong value is said once, not for every optimizer
    named = {entry.name: entry for name in names for entry in _entries(name)}
    entries = list(named.values())
    taken: list[dict[str, Any]] = [{"name": name} for name in named]
    notes: list[str] = []
    for flag, key, setting in _settings(optim):
        having = [index for index, entry in enumerate(entries) if _has(entry, key)]
        for index in having or [0]:
            taken[index] = overlay(taken[index], setting)
        if having and len(having) < len(entries):
            without = [entry.name for index, entry in enumerate(entries) if index not in having]
            notes.append(f"{flag} is not for {listed(without)}.")
    return build({**values, "optim": taken}), tuple(notes)


def _entries(name: str) -> tuple[OptimizerEntry, ...]:
    return registry.entries() if name == ALL else (registry.find(name),)


def _settings(optim: Mapping[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield each setting as the user wrote it, its key, and the section that holds it alone."""
    for name, value in optim.items():
        if name == "args":
            for key, given in value.items():
                yield f"--optim-arg {key}={given}", key, {"args": {key: given}}
        elif name == "overrides":
            for pattern, pairs in value.items():
                for key, given in pairs.items():
                    yield f"--override {pattern}:{key}={given}", key, {"overrides": {pattern: {key: given}}}
        else:
            shown = " ".join(value) if isinstance(value, list | tuple) else value
            yield f"--{name.replace('_', '-')} {shown}", name, {name: value}


def _has(entry: OptimizerEntry, key: str) -> bool:
    if key == "weight_decay":
        return entry.takes_weight_decay
    return key in entry.defaults or (entry.eight_bit and key in _EIGHT_BIT)
