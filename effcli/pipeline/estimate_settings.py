"""Flags -> `EstimateSpec` or `SearchSpec`: which of several optimizers each setting is for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from effcli.errors import UsageError
from effcli.estimate_spec import EstimateSpec, build_estimate_spec
from effcli.optim import registry
from effcli.optim.entry import OptimizerEntry
from effcli.pipeline.ranks import check_on_shares
from effcli.pipeline.shared_settings import shared_settings
from effcli.search_spec import SearchSpec, build_search_spec
from effcli.units import listed

DEFAULT_OPTIMIZERS = ("adamw", "adafactor", "adam8bit", "lion8bit", "adamw4bit", "sgd")
"""What is estimated when nothing is asked for: the usual one, and what saves ever more."""
ALL = "all"
SEARCHED_OPTIMIZERS = ("adamw", "adafactor", "adamw8bit")
"""What a search tries when nothing is asked for: what trains much as AdamW does, in ever less memory."""
_Spec = TypeVar("_Spec", EstimateSpec, SearchSpec)


def resolve_estimate(flags: Mapping[str, Any]) -> tuple[EstimateSpec, tuple[str, ...]]:
    """Return the specification of an estimate; see `_resolve`.

    Of optimizers that nobody named, those that do not run on shares of a model are left out where it is shared.
    """
    return _resolve(flags, DEFAULT_OPTIMIZERS, build_estimate_spec, _refuse_on_shares)


def resolve_search(flags: Mapping[str, Any]) -> tuple[SearchSpec, tuple[str, ...]]:
    """Return the specification of a search; see `_resolve`.

    Raises:
        UsageError: there is no card to search for.
    """
    if not (flags.get("loop") or {}).get("gpu"):
        raise UsageError("say what the settings must fit: --gpu 24GiB, or a card that `effcli gpus` lists")
    return _resolve(flags, SEARCHED_OPTIMIZERS, build_search_spec)


def _refuse_on_shares(spec: EstimateSpec, entry: OptimizerEntry) -> None:
    """Raise unless an optimizer runs on what each process holds.

    Raises:
        UsageError: see `effcli.pipeline.ranks.check_on_shares`.
    """
    if spec.loop.world_size > 1:
        check_on_shares(entry, registry.default_hyper(entry), spec.loop.shard)


def _resolve(
    flags: Mapping[str, Any],
    usual: Sequence[str],
    build: Callable[[Mapping[str, Any]], _Spec],
    refuse: Callable[[_Spec, OptimizerEntry], None] | None = None,
) -> tuple[_Spec, tuple[str, ...]]:
    """Return the specification of nested sections, `optim.name` a list, and what should be said about it.

    Settings of optimizers are shared out; see `shared_settings`. An optimizer that was not asked for by its name is
    left out, and named, where `refuse` raises.

    Raises:
        UsageError: an unknown name, or a value that is not allowed.
    """
    optim = dict(flags.get("optim") or {})
    asked = optim.pop("name", None) or ()
    values = {"model": {}, **{key: section for key, section in flags.items() if key != "optim"}}
    spec = build({**values, "optim": [optim]})  # so that a wrong value is said once, not for every optimizer
    each, notes = _each(optim, asked, usual, lambda entry: _is_refused(refuse, spec, entry))
    return build({**values, "optim": each}), notes


def _each(
    optim: Mapping[str, Any], asked: Sequence[str], usual: Sequence[str], is_refused: Callable[[OptimizerEntry], bool]
) -> tuple[list[dict[str, Any]], tuple[str, ...]]:
    """Return the settings of each optimizer that was asked for, and what should be said about them."""
    meant = {entry.name for name in asked if name != ALL for entry in _entries(name)}
    named = {entry.name: entry for name in asked or usual for entry in _entries(name)}
    kept = {name: entry for name, entry in named.items() if name in meant or not is_refused(entry)}
    shared, notes = shared_settings(optim, tuple(kept.values()))
    each = [{"name": name, **own} for name, own in zip(kept, shared, strict=True)]
    return each, (*notes, *_about([name for name in named if name not in kept]))


def _about(left_out: Sequence[str]) -> tuple[str, ...]:
    """Return what should be said about optimizers that are left out."""
    if not left_out:
        return ()
    why = f"--optim {left_out[0]} says why"
    return (f"Left out, for they do not run on shares of a model: {listed(left_out)}; {why}.",)


def _is_refused(refuse: Callable[[_Spec, OptimizerEntry], None] | None, spec: _Spec, entry: OptimizerEntry) -> bool:
    if refuse is None:
        return False
    try:
        refuse(spec, entry)
    except UsageError:
        return True
    return False


def _entries(name: str) -> tuple[OptimizerEntry, ...]:
    return registry.entries() if name == ALL else (registry.find(name),)
