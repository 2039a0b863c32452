"""The columns of a comparison: optimizers with settings of their own, and what is asked of each. No torch.

The one exception is an optimizer by its path, whose class has to be looked at.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from effcli.errors import UsageError
from effcli.optim import registry
from effcli.optim.entry import OptimizerEntry
from effcli.packages import require_installed
from effcli.pipeline.resolve import resolve_spec
from effcli.pipeline.shared_settings import shared_settings
from effcli.recipes import overlay
from effcli.spec import OptimSpec, RunSpec, build_spec

_WRITTEN_APART = ("name", "args", "overrides")
_OWN_FIELDS = tuple(name for name in OptimSpec.model_fields if name not in _WRITTEN_APART)
_SEVERAL = ("keep_32bit",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One optimizer as it was asked for: its name with its settings, and the section that these make."""

    name: str
    entry: OptimizerEntry
    own: Mapping[str, Any]


def column_of(text: str) -> Column:
    """Return the optimizer and the settings of `adam8bit,lr=1e-4,keep_32bit=embed`.

    Raises:
        UsageError: there is no such optimizer, or a setting is none.
        MissingExtraError: its package is not installed.
    """
    name, *settings = (part.strip() for part in text.split(","))
    entry = registry.find(name)
    if entry.package is not None:
        require_installed(entry.package, f"optimizer '{entry.name}'", pip=entry.pip)
    own: dict[str, Any] = {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        key = key.strip().replace("-", "_")
        if not (key and equals) or key in _WRITTEN_APART:
            raise UsageError(
                f"'{text}': '{setting}' is no setting with a value of one optimizer; write KEY=VALUE, as in "
                f"{entry.name},lr=1e-4,weight_decay=0.1"
            )
        if key in _SEVERAL:
            own.setdefault(key, []).append(value)
            continue
        section = own if key in _OWN_FIELDS else own.setdefault("args", {})
        if key in section:
            raise UsageError(f"'{text}': '{key}' is given twice; keep one")
        section[key] = value
    return Column(name=",".join([entry.name, *settings]), entry=entry, own=own)


def column_specs(columns: Sequence[Column], given: Mapping[str, Any]) -> tuple[list[RunSpec], tuple[str, ...]]:
    """Return what is asked of each column, and what should be said about it."""
    layers, notes = column_layers(columns, given)
    specs = []
    for column, layer in zip(columns, layers, strict=True):
        spec, said = settled(resolve_spec(layer), column.entry)
        specs.append(spec)
        notes += said
    return specs, tuple(notes)


def column_layers(columns: Sequence[Column], given: Mapping[str, Any]) -> tuple[list[dict[str, Any]], list[str]]:
    """Return what is asked of each column above what lies below, and what should be said about it."""
    optim = {key: value for key, value in (given.get("optim") or {}).items() if key != "name" and _is_given(value)}
    build_spec({**given, "optim": optim})  # so that a wrong value is said once, and before its optimizer's
    shared, notes = shared_settings(optim, [column.entry for column in columns])
    return [
        overlay({**given, "optim": {"name": column.entry.name, **taken}}, {"optim": column.own})
        for column, taken in zip(columns, shared, strict=True)
    ], list(notes)


def _is_given(value: Any) -> bool:
    """Return whether a value says something; a recipe that was written by a run has every field."""
    return value is not None and value not in ((), [], {})


def settled(spec: RunSpec, entry: OptimizerEntry) -> tuple[RunSpec, list[str]]:
    """Return the specification with the schedule that its optimizer bears, and what should be said about it.

    Raises:
        UsageError: a hyperparameter that the optimizer lacks, or a value that it refuses.
    """
    bears = entry.schedule(registry.resolve_hyper(entry, spec.optim))
    loop, left_out = spec.loop, {}
    if bears != "any" and "scheduler" in loop.model_fields_set and loop.scheduler != "constant":
        left_out["scheduler"] = f"--scheduler {loop.scheduler}"
    if bears == "own" and loop.warmup_ratio:
        left_out["warmup_ratio"] = f"--warmup-ratio {loop.warmup_ratio:g}"
    if not left_out:
        return spec, []
    values = spec.model_dump(mode="json", exclude_unset=True)
    values["loop"] = {key: value for key, value in values["loop"].items() if key not in left_out}
    return build_spec(values), [f"{flag} is not for {entry.name}." for flag in left_out.values()]
