"""Optimizers, flags and a recipe -> the runs of a comparison; what can be refused is refused here. No torch.

The one exception is an optimizer by its path: see `effcli.pipeline.comparing.columns`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from effcli.errors import UsageError
from effcli.files import at_home
from effcli.flags import field_label
from effcli.pipeline.comparing.columns import Column, column_layers, column_of, column_specs, settled
from effcli.pipeline.comparing.folder import PAGE, saved_comparison
from effcli.pipeline.resolve import changed_fields
from effcli.recipes import overlay, parse_set, read_recipe
from effcli.run_folder import dated_name
from effcli.spec import RunSpec, build_spec
from effcli.tracking.services import require_services

COMPARED_OPTIMIZERS = ("adamw", "adafactor", "adam8bit")
"""What is compared when nothing is asked for."""
MOST_SEEDS = 1000
"""Far more than anybody waits for: a larger number is a mistake."""

_MAY_CHANGE = {
    "output.out",
    "output.keep",
    "output.save_every",
    "output.logging_steps",
    "output.tolerance",
    "loop.nvml_interval",
}
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

    @property
    def asked(self) -> dict[str, Any]:
        """Return the sections of its specification without what was left to defaults."""
        return self.spec.model_dump(mode="json", exclude_unset=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The runs in the order in which they are made, the folder that holds theirs, and what should be said."""

    out: str
    runs: tuple[WantedRun, ...]
    notes: tuple[str, ...]

    @property
    def page(self) -> Path:
        """Return where its page lies where nobody names another place."""
        return at_home(self.out) / PAGE

    @property
    def logging_steps(self) -> int:
        """Return the updates between two lines of progress."""
        return self.runs[0].spec.output.logging_steps

    @property
    def tolerance(self) -> float | None:
        """Return by how many per cent measured memory may be off its prediction; None for whatever it is."""
        return self.runs[0].spec.output.tolerance


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
        MissingExtraError: the package of an optimizer or a service is not installed.
    """
    if seeds is not None and not 1 <= seeds <= MOST_SEEDS:
        raise UsageError(f"--seeds: {seeds} is not between 1 and {MOST_SEEDS}")
    given, out = _layered(flags, recipe, sets)
    columns = [column_of(text) for text in optimizers]
    if resume:
        return _resumed(columns, given, out=out, seeds=seeds)
    columns = columns or [column_of(name) for name in COMPARED_OPTIMIZERS]
    specs, notes = column_specs(columns, given)
    require_services(specs[0].output.track)
    runs = _runs(distinct([column.name for column in columns]), specs, num_seeds=seeds or 1)
    return Comparison(out=out or dated_name(datetime.now(), "compare"), runs=runs, notes=notes)


def _layered(flags: Mapping[str, Any], recipe: str | None, sets: Sequence[str]) -> tuple[dict[str, Any], str | None]:
    """Return what is asked of all runs, and the folder of the comparison where one is named."""
    texts = [parse_set(text) for text in sets]
    if any("name" in layer.get("optim", {}) for layer in texts):
        raise UsageError("--set optim.name: name the optimizers as arguments, as in effcli compare adamw adafactor")
    given = overlay({} if recipe is None else read_recipe(recipe), *texts, flags)
    output = dict(given.get("output") or {})
    out = output.pop("out", None)
    return {**given, "output": output}, None if out is None else str(out)


def _runs(names: Sequence[str], specs: Sequence[RunSpec], *, num_seeds: int) -> tuple[WantedRun, ...]:
    """Return a run for each name and seed; seeds are outermost, so that what is cut short has all optimizers."""
    seeded = [
        (name, _with_seed(spec, spec.loop.seed + offset))
        for offset in range(num_seeds)
        for name, spec in zip(names, specs, strict=True)
    ]
    folders = distinct([_folder_name(name, spec.loop.seed, several=num_seeds > 1) for name, spec in seeded], mark="-{}")
    return tuple(
        WantedRun(name=name, seed=spec.loop.seed, folder=folder, spec=spec)
        for (name, spec), folder in zip(seeded, folders, strict=True)
    )


def _with_seed(spec: RunSpec, seed: int) -> RunSpec:
    return build_spec(overlay(spec.model_dump(mode="json", exclude_unset=True), {"loop": {"seed": seed}}))


def _resumed(columns: Sequence[Column], given: Mapping[str, Any], *, out: str | None, seeds: int | None) -> Comparison:
    """Return the comparison saved in `out`, with what may change as it is given now.

    Raises:
        UsageError: there is none, or something else is asked for than it has.
    """
    if out is None:
        raise UsageError("--resume needs --out with the folder of the comparison to complete")
    attempts = saved_comparison(out).attempts
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
        columns = [column_of(build_spec(first[name].spec).optim.name) for name in names]
    layers, notes = column_layers(columns, {**given, "loop": loop})
    runs = []
    for attempt in attempts:
        column = names.index(attempt.name)
        spec, _ = settled(build_spec(overlay(attempt.spec, layers[column])), columns[column].entry)
        _refuse_changes(build_spec(attempt.spec), spec)
        runs.append(WantedRun(name=attempt.name, seed=attempt.seed, folder=str(attempt.folder), spec=spec))
    return Comparison(out=out, runs=tuple(runs), notes=tuple(notes))


def _refuse_changes(saved: RunSpec, now: RunSpec) -> None:
    changed = changed_fields(saved.model_dump(mode="json"), now.model_dump(mode="json"), may_change=_MAY_CHANGE)
    if changed:
        raise UsageError(
            f"--resume: the comparison was started with other values of {', '.join(map(field_label, changed))}; "
            "keep them, or start anew with --overwrite"
        )


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
