"""Flags -> `EstimateSpec` or `SearchSpec`: which of several optimizers each setting is for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from effcli.errors import UsageError
from effcli.estimate_spec import EstimateSpec, build_estimate_spec
from effcli.optim import registry
from effcli.optim.entry import OptimizerEntry
from effcli.pipeline.shared_settings import shared_settings
from effcli.search_spec import SearchSpec, build_search_spec

DEFAULT_OPTIMIZERS = ("adamw", "adafactor", "adam8bit", "lion8bit", "adamw4bit", "sgd")
"""What is estimated when nothing is asked for: the usual one, and what saves ever more."""
ALL = "all"
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

    Settings of optimizers are shared out; see `shared_settings`.

    Raises:
        UsageError: an unknown name, or a value that is not allowed.
    """
    optim = dict(flags.get("optim") or {})
    names = optim.pop("name", None) or usual
    values = {"model": {}, **{key: section for key, section in flags.items() if key != "optim"}}
    build({**values, "optim": [optim]})  # so that a wrong value is said once, not for every optimizer
    named = {entry.name: entry for name in names for entry in _entries(name)}
    shared, notes = shared_settings(optim, tuple(named.values()))
    return build({**values, "optim": [{"name": name, **own} for name, own in zip(named, shared, strict=True)]}), notes


def _entries(name: str) -> tuple[OptimizerEntry, ...]:
    return registry.entries() if name == ALL else (registry.find(name),)
