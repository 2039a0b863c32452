"""What page and picture say first: one sentence of numbers, what was run, and what went wrong."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from effcli.report.charts.names import Named
from effcli.report.number_text import amount, number, ratio
from effcli.report.text import plain
from effcli.setting_texts import mapping
from effcli.units import count, listed

if TYPE_CHECKING:
    from effcli.measure.comparison_record import ComparisonRecord
    from effcli.measure.record import RunRecord

_MOST_TOLD = 3
"""So many names are told one by one; of more, only the ends."""


def headline(names: Sequence[Named]) -> str:
    """Return how much state each optimizer held, beside the first's; as predicted where nothing was measured."""
    measured = [named for named in names if named.summary.measured_state_bytes is not None]
    known = measured or [named for named in names if named.summary.predicted_state_bytes is not None]
    if not known:
        return "No optimizer of this comparison left a number."
    held = "held" if measured else "would hold"
    first, *others = known
    if not others:
        return f"{first.short} {held} {amount(_state_bytes(first))} of optimizer state{_peak(first)}."
    if _state_bytes(first) == 0:
        beside = listed([_plainly(named) for named in _told(others)], last="and")
        return f"{first.short} {held} no optimizer state; {beside}."
    if len(_models(names)) > 1:
        return f"Optimizer state {held}: {'; '.join(_plainly(named) for named in (first, *_told(others)))}."
    told = [_beside(named, first, "" if place else f"{held} ") for place, named in enumerate(_told(others))]
    return f"Of {first.short}'s {amount(_state_bytes(first))} of optimizer state, {'; '.join(told)}."


def title_of(names: Sequence[Named]) -> str:
    """Return the names side by side and the model, for the tab of the browser."""
    shown = [named.short for named in names[:_MOST_TOLD]]
    more = f" and {len(names) - _MOST_TOLD} more" if len(names) > _MOST_TOLD else ""
    return f"{', '.join(shown)}{more} on {_model(names)}"


def what_ran(names: Sequence[Named]) -> str:
    """Return model, batch, updates, precision, engine and device, each where all runs have the same, else that not."""
    runs = [run for named in names for _, run, _ in named.runs]
    if not runs:
        return "No run left a record."
    told = [_facts(run) for run in runs]
    shared = [own[0] for own in zip(*(facts.values() for facts in told), strict=True) if len(set(own)) == 1]
    differing = [key for key in told[0] if len({facts[key] for facts in told}) > 1]
    parts = ", ".join(fact for fact in shared if fact)
    apart = f"runs differ in {listed(differing, None, last='and')}" if differing else ""
    return "; ".join(filter(None, (parts, apart)))


def _facts(run: RunRecord) -> dict[str, str]:
    """Return what a run was, by what that is called; nothing where the record does not say."""
    loop, batch = mapping(run.spec.get("loop")), run.batch
    rows = f"{batch.micro} x {batch.accum}" if batch.accum > 1 else str(batch.micro)
    rows += f" x {batch.world_size}" if batch.world_size > 1 else ""
    facts = {
        "model": run.model.name,
        "trained parameters": count(run.model.num_trainable_parameters, "trained parameter"),
        "batch": f"{rows} rows an update",
        "updates": count(run.total_updates, "update"),
        "precision": str(loop.get("precision", "")),
        "engine": f"engine {loop['engine']}" if loop.get("engine") else "",
        "device": f"on {run.environment.get('device')}",
    }
    return {key: plain(fact) for key, fact in facts.items()}


def failures(record: ComparisonRecord) -> list[str]:
    """Return a line for each run that did not end well."""
    several = len({attempt.seed for attempt in record.attempts}) > 1
    lines = []
    for attempt in record.attempts:
        if not attempt.ended_well:
            seed = f" (seed {attempt.seed})" if several else ""
            told = "was not run" if attempt.status == "missing" else attempt.status
            why = f": {plain(attempt.failure)}" if attempt.failure else ""
            lines.append(f"{plain(attempt.name)}{seed} {told}{why}")
    return lines


def _told(others: Sequence[Named]) -> list[Named]:
    """Return the names to tell: all, or those with the least and the most state."""
    if len(others) <= _MOST_TOLD:
        return list(others)
    ordered = sorted(others, key=_state_bytes)
    return [ordered[0], ordered[-1]]


def _beside(named: Named, first: Named, verb: str) -> str:
    share = _state_bytes(named) / _state_bytes(first)
    if share == 0:
        return f"{named.short} {verb}none"
    of_it = " of it" if verb else ""
    return f"{named.short} {verb}{ratio(share)}{of_it} ({amount(_state_bytes(named))})"


def _plainly(named: Named) -> str:
    return f"{named.short} {amount(_state_bytes(named))}"


def _state_bytes(named: Named) -> int:
    line = named.summary
    measured = line.measured_state_bytes
    return measured if measured is not None else line.predicted_state_bytes or 0


def _peak(named: Named) -> str:
    line = named.summary
    if line.peak_allocated_bytes is not None:
        is_planned = line.update_peak_allocated_bytes == line.peak_allocated_bytes
        beside = line.predicted_peak_allocated_bytes if is_planned else None
        return f" and peaked at {amount(line.peak_allocated_bytes)}" + (
            f" ({amount(beside)} predicted)" if beside is not None else ""
        )
    speed = line.seconds_per_update
    return f" and took {number(speed, 3)} seconds an update" if speed is not None else ""


def _models(names: Sequence[Named]) -> list[str]:
    return list(dict.fromkeys(plain(run.model.name) for named in names for _, run, _ in named.runs))


def _model(names: Sequence[Named]) -> str:
    models = _models(names)
    return "no model" if not models else models[0] if len(models) == 1 else f"{len(models)} models"
