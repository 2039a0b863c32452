"""The plan of a run, from the same prediction as an estimate. Imports torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from effcli.devices import available_bytes
from effcli.errors import TraceError
from effcli.memory.cards import CONTEXT_BYTES
from effcli.memory.fit import SPARE
from effcli.memory.plan import Change, MemoryPlan
from effcli.pipeline.planning import Limits, combined_changes, plan_memory, with_changes, with_largest_batch
from effcli.pipeline.predicting import Choice, Predictor, Settings
from effcli.pipeline.subjects import prepared_run, present

if TYPE_CHECKING:
    import torch

    from effcli.engines.base import Progress
    from effcli.pipeline.prepare import Prepared


@dataclass(frozen=True, slots=True, kw_only=True)
class FailurePlan:
    """What is planned for a run that ran out of memory.

    `there` is the plan at the shape that failed; `whole` that of the run's longest batch, with what changes would buy
    within its budget; `combined` are several changes at once, where none is enough alone.
    """

    there: MemoryPlan
    whole: MemoryPlan
    combined: tuple[Change, ...]


def present_limits(device: torch.device) -> Limits:
    """Return what the device has free now for a run."""
    context_bytes = CONTEXT_BYTES if device.type == "cuda" else 0
    free_bytes = available_bytes(device)
    return Limits(
        budget_bytes=None if free_bytes is None else free_bytes + context_bytes,  # the context is there already
        context_bytes=context_bytes,
    )


def run_plan(prepared: Prepared, limits: Limits, progress: Progress) -> MemoryPlan | None:
    """Return the plan of the longest batch of the training data, held against what the device has free now.

    With verdict, largest batch and what changes would buy where the run hardly fits or doesn't. None, said aloud, where
    the model's code cannot be traced. All engines are taken for the bare loop.
    """
    try:
        predictor, settings, choice = _question(prepared)
        plan = plan_memory(predictor, settings, choice, limits)
        if plan.fits in (None, "fits"):  # what is free just now is no property of the run
            return plan.model_copy(update={"budget_bytes": None, "fits": None})
        plan = with_changes(plan, predictor, settings, choice)
        return with_largest_batch(plan, predictor, settings, choice, limits)
    except TraceError as error:
        progress.note(f"{str(error)[0].upper()}{str(error)[1:]}.")
        return None


def failure_plan(
    prepared: Prepared, limits: Limits, *, rows: int | None, tokens: int | None, doing: str, first: bool
) -> FailurePlan:
    """Return the plan of a run that ran out of memory with a batch of this shape (None: with its longest).

    `limits` are those from before the run, `doing` is what failed, in the run's first update or in a later one. The
    device gave less than that was to take, whatever was free before: changes count as fitting only where they need a
    tenth less.

    Raises:
        TraceError: the model's code cannot be traced.
    """
    predictor, settings, choice = _question(prepared)
    shape = settings if rows is None or tokens is None else replace(settings, batch_size=rows, max_length=tokens)
    there = plan_memory(predictor, replace(shape, padded=shape.padded and shape.batch_size > 1), choice, limits)
    less_bytes = int((1 - SPARE) * _need_bytes(there, limits, doing=doing, first=first))
    budget_bytes = less_bytes if limits.budget_bytes is None else min(limits.budget_bytes, less_bytes)
    limits = replace(limits, budget_bytes=budget_bytes)
    whole = with_changes(plan_memory(predictor, settings, choice, limits), predictor, settings, choice)
    whole = with_largest_batch(whole, predictor, settings, choice, limits)
    return FailurePlan(there=there, whole=whole, combined=tuple(combined_changes(whole, predictor, settings, choice)))


def _need_bytes(plan: MemoryPlan, limits: Limits, *, doing: str, first: bool) -> int:
    """Return what a part of an update takes of the device, at most what the whole update takes."""
    whole, phase = plan.device_total_bytes or 0, (plan.first_phases if first else plan.phases).get(doing)
    return min(whole, phase.total_bytes + limits.context_bytes) if phase and phase.total_bytes else whole


def _question(prepared: Prepared) -> tuple[Predictor, Settings, Choice]:
    """Return what predicts the run, the settings of its longest batch, and its optimizer."""
    loop, data = prepared.spec.loop, prepared.data
    subject, hyper = prepared_run(prepared)
    batch_size = min(loop.batch_size, data.train_rows)
    settings = replace(
        Settings.of(loop, max_length=data.longest, max_target_length=data.longest_target),
        batch_size=batch_size,
        padded=batch_size > 1 and data.shortest < data.longest,
    )
    choice = Choice.of(prepared.entry, hyper, prepared.spec.optim)
    return Predictor(subject, present(prepared.device)), settings, choice
