"""The plan of a run, from the same prediction as an estimate. Imports torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from effcli.devices import available_bytes
from effcli.errors import TraceError
from effcli.history.context import context_for
from effcli.memory.fit import SPARE
from effcli.memory.plan import Change, MemoryPlan
from effcli.pipeline.planning import LATER, Limits, combined_changes, plan_memory, with_changes, with_largest_batch
from effcli.pipeline.predicting import Choice, Predictor, Settings, Unlike
from effcli.pipeline.subjects import prepared_run, present

if TYPE_CHECKING:
    import torch

    from effcli.engines.base import Progress
    from effcli.measure.device_record import Doing
    from effcli.measure.out_of_memory_record import OutOfMemoryFacts
    from effcli.pipeline.prepare import Prepared
    from effcli.pipeline.running.profiled_window import MicroBatch, Window


@dataclass(frozen=True, slots=True, kw_only=True)
class FailurePlan:
    """What is planned for a run that ran out of memory.

    `there` is the plan at the shape that failed; `whole` that of the run's longest batch, with what changes would buy
    within its budget; `combined` are several changes at once, where none is enough alone.
    """

    there: MemoryPlan
    whole: MemoryPlan
    combined: tuple[Change, ...]


def _present_limits(device: torch.device) -> Limits:
    """Return what the device has free now for a run, and on CUDA what of the context is there already.

    All of it is taken to be there, but no more than the device has in use. That is too much by the kernels that are
    still to be loaded.
    """
    if device.type != "cuda":
        return Limits.of(budget_bytes=available_bytes(device), context=None)
    import torch

    context = context_for(torch.cuda.get_device_name(device))
    free_bytes, whole_bytes = torch.cuda.mem_get_info(device)
    return Limits.of(budget_bytes=min(free_bytes + context.num_bytes, whole_bytes), context=context)


class RunPlanner:
    """Plans one run, whatever the sizes of its batches: what was traced for one plan serves the next.

    Plans are held against what the device had free when this was made. All engines are taken for the bare loop.
    """

    def __init__(self, prepared: Prepared) -> None:
        self._prepared = prepared
        self._limits = _present_limits(prepared.device)

    def plan(self, prepared: Prepared, progress: Progress) -> MemoryPlan | None:
        """Return the plan of the longest batch of the training data.

        With verdict, largest batch and what changes would buy where the run hardly fits or doesn't. None, said aloud,
        where the model's code cannot be traced.
        """
        try:
            asked = self._question(prepared)
            plan = plan_memory(*asked, self._limits)
            if plan.fits in (None, "fits"):  # what is free just now is no property of the run
                return plan.model_copy(update={"budget_bytes": None, "fits": None})
            return with_largest_batch(with_changes(plan, *asked), *asked, self._limits)
        except TraceError as error:
            progress.note(f"{str(error)[0].upper()}{str(error)[1:]}.")
            return None

    def plan_failure(self, prepared: Prepared, facts: OutOfMemoryFacts) -> FailurePlan:
        """Return the plan of a run that ran out of memory with a batch of that shape, or with its longest.

        The device gave less than that was to take, whatever was free before: changes count as fitting only where they
        need a tenth less.

        Raises:
            TraceError: the model's code cannot be traced.
        """
        limits, asked = self._limits, self._question(prepared)
        predictor, shape, choice = asked
        if facts.rows is not None and facts.tokens is not None:
            padded = shape.padded and facts.rows > 1
            shape = replace(shape, batch_size=facts.rows, max_length=facts.tokens, padded=padded)
        there = plan_memory(predictor, shape, choice, limits)
        less_bytes = int((1 - SPARE) * _need_bytes(there, limits, doing=facts.doing, first=facts.update == 1))
        budget_bytes = less_bytes if limits.budget_bytes is None else min(limits.budget_bytes, less_bytes)
        limits = replace(limits, budget_bytes=budget_bytes)
        whole = with_largest_batch(with_changes(plan_memory(*asked, limits), *asked), *asked, limits)
        return FailurePlan(there=there, whole=whole, combined=tuple(combined_changes(whole, *asked)))

    def plan_window(self, prepared: Prepared, window: Window, held_bytes: int) -> int | None:
        """Return the peak in bytes that is planned for a warm update whose batches take `held_bytes`.

        Of its micro-batches the first and the largest later one decide. None where the model's code cannot be traced.
        """
        predictor, settings, choice = self._question(prepared)
        later = _shaped(replace(settings, accum=len(window.batches)), window.largest_later)
        unlike = Unlike(first=_shaped(settings, window.batches[0]), held_bytes=held_bytes)
        try:
            played = predictor.play(predictor.program(later, choice, unlike))
        except TraceError:
            return None
        return max(moment.total_bytes for moment in played.moments if moment.update == LATER)

    def may_lack_gradients(self, prepared: Prepared) -> bool:
        """Return whether the loss leaves out a trained parameter, or may: where the model's code cannot be traced."""
        predictor, settings, _ = self._question(prepared)
        try:
            return bool(predictor.without_gradient(settings))
        except TraceError:
            return True

    def _question(self, prepared: Prepared) -> tuple[Predictor, Settings, Choice]:
        """Return what predicts the run, the settings of its longest batch, and its optimizer."""
        loop, data = prepared.spec.loop, prepared.data
        batch_size = min(loop.batch_size, -(-data.train_rows // prepared.launch.world_size))
        settings = replace(
            Settings.of(
                loop,
                max_length=data.longest,
                max_target_length=data.longest_target,
                sharding=prepared.sharding,
            ),
            batch_size=batch_size,
            padded=batch_size > 1 and data.shortest < data.longest,
        )
        predictor, choice = self._predicted
        return predictor, settings, choice

    @cached_property
    def _predicted(self) -> tuple[Predictor, Choice]:
        """Return what predicts updates of the model, and its optimizer, which are the same with other batches."""
        subject, hyper = prepared_run(self._prepared)
        choice = Choice.of(self._prepared.entry, hyper, self._prepared.spec.optim)
        return Predictor(subject, present(self._prepared.device)), choice


def _shaped(settings: Settings, batch: MicroBatch) -> Settings:
    """Return the settings with the shape of a micro-batch."""
    return replace(
        settings,
        batch_size=batch.rows,
        max_length=batch.tokens,
        max_target_length=batch.target_tokens,
        padded=batch.padded,
    )


def _need_bytes(plan: MemoryPlan, limits: Limits, *, doing: Doing, first: bool) -> int:
    """Return what a part of an update takes of the device, at most what the whole update takes."""
    whole, phase = plan.device_total_bytes or 0, (plan.first_phases if first else plan.phases).get(doing)
    return min(whole, phase.total_bytes + limits.context_bytes) if phase and phase.total_bytes else whole
