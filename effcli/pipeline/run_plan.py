"""The plan of a run, from the same prediction as an estimate. Imports torch."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from effcli.devices import available_bytes
from effcli.errors import TraceError
from effcli.memory.cards import CONTEXT_BYTES
from effcli.memory.plan import MemoryPlan
from effcli.pipeline.planning import Limits, plan_memory, with_changes, with_largest_batch
from effcli.pipeline.predicting import Choice, Predictor, Settings
from effcli.pipeline.subjects import prepared_run, present

if TYPE_CHECKING:
    from effcli.engines.base import Progress
    from effcli.pipeline.prepare import Prepared


def run_plan(prepared: Prepared, progress: Progress) -> MemoryPlan | None:
    """Return the plan of the longest batch of the training data, held against what the device has free now.

    None, said aloud, where the model's code cannot be traced. All engines are taken for the bare loop.
    """
    try:
        return _traced(prepared)
    except TraceError as error:
        progress.note(f"{str(error)[0].upper()}{str(error)[1:]}.")
        return None


def _traced(prepared: Prepared) -> MemoryPlan:
    """Return the plan; with verdict, largest batch and what changes would buy where the run hardly fits or doesn't."""
    loop, device, data = prepared.spec.loop, prepared.device, prepared.data
    subject, hyper = prepared_run(prepared)
    predictor = Predictor(subject, present(device))
    batch_size = min(loop.batch_size, data.train_rows)
    settings = replace(
        Settings.of(loop, max_length=data.longest),
        batch_size=batch_size,
        padded=batch_size > 1 and data.shortest < data.longest,
    )
    context_bytes = CONTEXT_BYTES if device.type == "cuda" else 0
    free_bytes = available_bytes(device)
    limits = Limits(
        budget_bytes=None if free_bytes is None else free_bytes + context_bytes,  # the context is there already
        context_bytes=context_bytes,
    )
    choice = Choice.of(prepared.entry, hyper, prepared.spec.optim)
    plan = plan_memory(predictor, settings, choice, limits)
    if plan.fits in (None, "fits"):  # what is free just now is no property of the run
        return plan.model_copy(update={"budget_bytes": None, "fits": None})
    plan = with_changes(plan, predictor, settings, choice)
    return with_largest_batch(plan, predictor, settings, choice, limits)
