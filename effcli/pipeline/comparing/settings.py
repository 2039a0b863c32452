"""Optimizers, flags and a recipe -> the runs of a comparison; what can be refused is refused here. No torch.

The one exception is an optimizer by its path, whose class has to be looked at.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from effcli.errors import UsageError
from effcli.flags import field_label
from effcli.optim import registry
from effcli.optim.entry import OptimizerEntry
from effcli.packages import require_installed
from effcli.pipeline.comparing.folder import saved_comparison
from effcli.pipeline.resolve import changed_fields, resolve_spec
from effcli.pipeline.shared_settings import shared_settings
from effcli.recipes import overlay, parse_set, read_recipe
from effcli.run_folder import dated_name
from effcli.spec import OptimSpec, RunSpec, build_spec

COMPARED_OPTIMIZERS = ("adamw", "adafactor", "adam8bit")
"""What is compared when nothing is asked for."""

_WRITTEN_APART = ("name", "args", "overrides")
_OWN_FIELDS = tuple(name for name in OptimSpec.model_fields if name not in _WRITTEN_APART)
_SEVERAL = ("keep_32bit",)
_MAY_CHANGE = {"output.out", "output.keep", "output.save_every", "output.logging_steps"}
"""Fields that a resumed comparison may change: what its runs measure stays comparable."""
_LONGEST_NAME = 80
"""Characters of a folder's name that come from an optimizer and its settings."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WantedRun:
    """One run: its name in the comparison, which seeds share, its folder there, and what is asked of it."""

    name: str
    seed: int
    folder: str
    spec: RunSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The runs in the order in which they are made, the folder that holds theirs, and what should be said."""

    out: str
    runs: tuple[WantedRun, ...]
    notes: tuple[str, ...]

    @property
    def logging_steps(self) -> int:
        """Return the updates between two lines of progress."""
        return self.runs[0].spec.output.logging_steps


@dataclass(frozen=True, slots=True, kw_only=True)
class _Column:
    """One optimizer as it was asked for: its name with its settings, and the section that these make."""

    name: str
    entry: OptimizerEntry
    own: Mapping[str, Any]


def resolve_comparison(
    optimizers: Sequence[str],
    flags: Mapping[str, Any],
    *,
    recipe: str | None = None,
    sets: Sequence[str] = (),
    seeds: int | None = None,
    resume: bool = False,
) -> Comparison:
    """Return the comparison that optimizers, flags (nested sections), a recipe and `a.b=c` texts add up to.

    An optimizer may carry settings of its own: `adamw,lr=1e-4`. Order for each run: defaults < demonstration < recipe
    < `--set` < flags < its own settings. With `resume` what was asked of the comparison in `--out` lies below them.

    Raises:
        UsageError: a name, key or value that is not allowed, or with `resume` one that differs from the saved one.
        MissingExtraError: the package of an optimizer is not installed.
    """
    texts = [parse_set(text) for text in sets]
    if any("name" in layer.get("optim", {}) for layer in texts):
        raise UsageError("--set optim.name: name the optimizers as arguments, as in effcli compare adamw adafactor")
    given = overlay({} if recipe is None else read_recipe(recipe), *texts, flags)
    output = dict(given.get("output") or {})
    out = output.pop("out", None)
    given = {**given, "output": output}
    columns = [_column(text) for text in optimizers]
    if resume:
        return _resumed(columns, given, out=out, seeds=seeds)
    columns = columns or [_column(name) for name in COMPARED_OPTIMIZERS]
    layers, notes = _layers(columns, given)
    specs = []
    for column, layer in zip(columns, layers, strict=True):
        spec, said = _settled(resolve_spec(layer), column.entry)
        specs.append(spec)
        notes += said
    names = distinct([column.name for column in columns])
    runs = []
    for offset in range(seeds or 1):  # outermost, so that a comparison that is cut short has all optimizers
        for name, spec in zip(names, specs, strict=True):
            seed = spec.loop.seed + offset
            values = overlay(spec.model_dump(mode="json", exclude_unset=True), {"loop": {"seed": seed}})
            runs.append((name, seed, build_spec(values)))
    folders = distinct([_folder_name(name, seed, several=(seeds or 1) > 1) for name, seed, _ in runs], mark="-{}")
    wanted = tuple(
        WantedRun(name=name, seed=seed, folder=folder, spec=spec)
        for (name, seed, spec), folder in zip(runs, folders, strict=True)
    )
    return Comparison(out=str(out or dated_name(datetime.now(), "compare")), runs=wanted, notes=tuple(notes))


def _resumed(columns: Sequence[_Column], given: Mapping[str, Any], *, out: Any, seeds: int | None) -> Comparison:
    """Return the comparison saved in `out`, with what may change as it is given now.

    Raises:
        UsageError: there is none, or something else is asked for than it has.
    """
    if out is None:
        raise UsageError("--resume needs --out with the folder of the comparison to complete")
    attempts = saved_comparison(str(out)).attempts
    names = list(dict.fromkeys(attempt.name for attempt in attempts))
    saved_seeds = list(dict.fromkeys(attempt.seed for attempt in attempts))
    asked = distinct([column.name for column in columns])
    loop = dict(given.get("loop") or {})
    seed = loop.pop("seed", saved_seeds[0])
    for what, wanted, has in (
        ("optimizers", ", ".join(asked or names), ", ".join(names)),
        ("--seed", str(seed), str(saved_seeds[0])),
        ("--seeds", str(seeds or len(saved_seeds)), str(len(saved_seeds))),
    ):
        if wanted != has:
            raise UsageError(
                f"--resume: the comparison in '{out}' has {what} {has}, not {wanted}; keep them, or start anew with "
                "--overwrite"
            )
    if not columns:
        first = {attempt.name: attempt for attempt in reversed(attempts)}
        columns = [_column(str(first[name].spec["optim"]["name"])) for name in names]
    layers, notes = _layers(columns, {**given, "loop": loop})
    runs = []
    for attempt in attempts:
        column = names.index(attempt.name)
        spec, _ = _settled(build_spec(overlay(attempt.spec, layers[column])), columns[column].entry)
        _refuse_changes(build_spec(attempt.spec), spec)
        runs.append(WantedRun(name=attempt.name, seed=attempt.seed, folder=str(attempt.folder), spec=spec))
    return Comparison(out=str(out), runs=tuple(runs), notes=tuple(notes))


def _refuse_changes(saved: RunSpec, now: RunSpec) -> None:
    changed = changed_fields(saved.model_dump(mode="json"), now.model_dump(mode="json"), may_change=_MAY_CHANGE)
    if changed:
        raise UsageError(
            f"--resume: the comparison was started with other values of {', '.join(map(field_label, changed))}; "
            "keep them, or start anew with --overwrite"
        )


def _layers(columns: Sequence[_Column], given: Mapping[str, Any]) -> tuple[list[dict[str, Any]], list[str]]:
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


def _column(text: str) -> _Column:
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
                f"'{text}': '{setting}' is no setting of one optimizer; write keys and values, as in "
                f"{entry.name},lr=1e-4,weight_decay=0.1"
            )
        if key in _SEVERAL:
            own.setdefault(key, []).append(value)
            continue
        section = own if key in _OWN_FIELDS else own.setdefault("args", {})
        if key in section:
            raise UsageError(f"'{text}': '{key}' is given twice; keep one")
        section[key] = value
    return _Column(name=",".join([entry.name, *settings]), entry=entry, own=own)


def _settled(spec: RunSpec, entry: OptimizerEntry) -> tuple[RunSpec, list[str]]:
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


def distinct(names: Sequence[str], mark: str = " ({})") -> list[str]:
    """Return the names in their order, each again with a number behind it where it comes again."""
    taken: list[str] = []
    for name in names:
        again, number = name, 1
        while again in taken:
            number += 1
            again = f"{name}{mark.format(number)}"
        taken.append(again)
    return taken


def _folder_name(name: str, seed: int, *, several: bool) -> str:
    plain = re.sub(r"[^A-Za-z0-9._=+-]+", "-", name).strip("-.")[:_LONGEST_NAME]
    return f"{plain}-seed-{seed}" if several else plain
