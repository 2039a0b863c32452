"""What is said about a run that ran out of memory: where, what was planned and measured, and what would fit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from effcli.devices import available_bytes
from effcli.errors import OutOfMemoryError, TraceError
from effcli.measure import device_monitor
from effcli.measure.device_record import Doing, OthersFacts
from effcli.measure.others import held_by_others
from effcli.measure.out_of_memory_record import BatchSizes, OutOfMemoryFacts
from effcli.measure.peak import peak_rss_bytes
from effcli.memory.fit import is_enough
from effcli.memory.plan import MemoryPlan
from effcli.pipeline.run_plan import FailurePlan, RunPlanner
from effcli.pipeline.running.auto_batch import sizes_of
from effcli.pipeline.verdicts import fitting_changes
from effcli.units import count, format_bytes

if TYPE_CHECKING:
    import torch

    from effcli.measure.cuda_allocator import Peaks
    from effcli.measure.whereabouts import Whereabouts
    from effcli.pipeline.prepare import Prepared

_ELSEWHERE = "a shorter --max-length, --lora-r 8, a smaller model, or a device with more memory"


class RunOutOfMemoryError(OutOfMemoryError):
    """Memory ran out while a model was loaded, trained or evaluated."""

    def __init__(self, facts: OutOfMemoryFacts) -> None:
        super().__init__(sentence(facts))
        self.facts = facts


def facts_of(
    prepared: Prepared, error: str, *, updates_done: int, whereabouts: Whereabouts, peaks: Peaks | None
) -> OutOfMemoryFacts:
    """Return where memory ran out, in the update after those done or in the evaluation, and what was measured.

    `peaks` are those of torch's CUDA allocator, None on a CPU.
    """
    doing = whereabouts.doing
    update = updates_done if doing == "evaluation" else updates_done + 1
    return _facts(prepared, error, peaks, doing=doing, update=update, rows=whereabouts.rows, tokens=whereabouts.tokens)


def loading_facts(prepared: Prepared, error: str, plan: MemoryPlan | None, peaks: Peaks | None) -> OutOfMemoryFacts:
    """Return that memory ran out while the model was loaded, and what its weights take by the plan of the run."""
    alone = f"the weights alone take {format_bytes(plan.phases['forward'].weights_bytes)}; " if plan else ""
    facts = _facts(prepared, error, peaks, doing="loading", update=0)
    return facts.model_copy(update={"advice": f"{alone}use {_ELSEWHERE}"})


def _facts(
    prepared: Prepared,
    error: str,
    peaks: Peaks | None,
    *,
    doing: Doing,
    update: int,
    rows: int | None = None,
    tokens: int | None = None,
) -> OutOfMemoryFacts:
    device: torch.device = prepared.device
    return OutOfMemoryFacts(
        device=str(device),
        doing=doing,
        update=update,
        sizes=sizes_of(prepared.spec.loop),
        rows=rows,
        tokens=tokens,
        peak_allocated_bytes=peaks.allocated_bytes if peaks else None,
        peak_reserved_bytes=peaks.reserved_bytes if peaks else None,
        peak_rss_bytes=peak_rss_bytes(),
        available_bytes=_available_bytes(device),
        others=held_by_others(device_monitor.cuda_device(device)),
        error=error,
    )


def _available_bytes(device: torch.device) -> int | None:
    """Return what the device has free now; None where it does not answer, as after a fault of CUDA."""
    try:
        return available_bytes(device)
    except RuntimeError:
        return None


def going_on(facts: OutOfMemoryFacts, sizes: BatchSizes) -> OutOfMemoryFacts:
    """Return the facts with the sizes that the run begins again with."""
    return facts.model_copy(update={"next_sizes": sizes, "advice": f"beginning again with {_words(sizes)}"})


def explained(facts: OutOfMemoryFacts, prepared: Prepared, planner: RunPlanner) -> OutOfMemoryFacts:
    """Return the facts with what was planned at the failing shape and the cheapest change that would fit."""
    if facts.doing == "evaluation":
        return facts.model_copy(update={"advice": _evaluation_advice(facts)})
    try:
        plan = planner.plan_failure(prepared, facts)
    except (TraceError, RuntimeError, MemoryError):  # the original error matters more than why it is not explained
        advice = f"use a smaller --batch-size, --gradient-checkpointing, {_ELSEWHERE}"
        return facts.model_copy(update={"advice": advice})
    return facts.model_copy(
        update={
            "planned": plan.there.at_peak,
            "planned_phase": plan.there.peak_phase,
            "budget_bytes": plan.whole.budget_bytes,
            "changes": (*plan.whole.changes, *plan.combined),
            "largest_batch_size": plan.whole.largest_batch_size,
            "advice": training_advice(facts, plan),
        }
    )


def training_advice(facts: OutOfMemoryFacts, plan: FailurePlan) -> str:
    """Return the cheapest change that fits: one alone, several at once, or that there is none."""
    sizes, whole = facts.sizes, plan.whole
    alone = fitting_changes(whole, batch_size=sizes.micro, accum=sizes.accum)
    if alone:
        others = f" (or {', or '.join(alone[1:])})" if alone[1:] else ""
        return f"the cheapest change that should fit is {alone[0]}{others}"
    for change in plan.combined:
        if is_enough(change, whole):
            return f"no single change would be enough; together these should fit: {change.flags}"
    saving = [change for change in plan.combined if change.saved_bytes > 0]
    least = min(saving, key=lambda change: change.peak_allocated_bytes, default=None)
    even = f", even {least.flags} takes {format_bytes(least.peak_allocated_bytes)}" if least else ""
    return f"none of the changes of batch and optimizer that were tried fits{even}; use {_ELSEWHERE}"


def _evaluation_advice(facts: OutOfMemoryFacts) -> str:
    """Return a batch for the evaluation: that of the training, which went through, or half of what did not."""
    size = facts.rows or facts.sizes.eval_batch
    if size > facts.sizes.micro:
        return f"use --eval-batch-size {facts.sizes.micro}, as many rows as the training takes at once"
    return f"use --eval-batch-size {size // 2}" if size > 1 else f"use {_ELSEWHERE}"


def sentence(facts: OutOfMemoryFacts) -> str:
    """Return the whole explanation in one line, the allocator's own words last."""
    return ". ".join(
        (
            f"out of memory on {facts.device} {where(facts)}",
            *_planned(facts),
            f"Measured: {', '.join(_measured(facts))}",
            facts.advice[:1].upper() + facts.advice[1:],
            f"The allocator said: {facts.error}",
        )
    )


def _words(sizes: BatchSizes) -> str:
    """Return sizes as flags."""
    return f"--batch-size {sizes.micro} --accum {sizes.accum} --eval-batch-size {sizes.eval_batch}"


def where(facts: OutOfMemoryFacts) -> str:
    """Return in which part of the run memory ran out, and with which batch."""
    places: dict[Doing, str] = {
        "loading": "while the model was loaded",
        "forward": f"in the forward pass of update {facts.update}",
        "backward": f"in the backward pass of update {facts.update}",
        "step": f"in the optimizer's step of update {facts.update}",
        "evaluation": f"in the evaluation after update {facts.update}",
    }
    shape = f" with {count(facts.rows, 'row')} of {count(facts.tokens or 0, 'token')}" if facts.rows is not None else ""
    return f"{places[facts.doing]}{shape}"


def _planned(facts: OutOfMemoryFacts) -> Iterator[str]:
    if facts.planned is None:
        return
    part = facts.planned
    amounts = (
        ("weights", part.weights_bytes),
        ("gradients", part.gradients_bytes),
        ("optimizer state", part.optimizer_state_bytes),
        ("activations", part.activations_bytes or 0),
        ("temporaries", part.temporaries_bytes or 0),
        *([("exchange", part.communication_bytes)] if part.communication_bytes else []),
    )
    parts = " + ".join(f"{name} {format_bytes(num_bytes)}" for name, num_bytes in amounts)
    yield f"Planned there: {format_bytes(part.total_bytes or 0)} in the {facts.planned_phase} phase = {parts}"


def _measured(facts: OutOfMemoryFacts) -> Iterator[str]:
    if facts.peak_allocated_bytes is not None:
        yield f"{format_bytes(facts.peak_allocated_bytes)} allocated at most"
    if facts.peak_reserved_bytes is not None:
        yield f"{format_bytes(facts.peak_reserved_bytes)} reserved"
    else:
        yield f"{format_bytes(facts.peak_rss_bytes)} resident at most, Python and libraries included"
    if facts.available_bytes is not None:
        yield f"{format_bytes(facts.available_bytes)} free now"
    if facts.others is not None:
        yield from _others(facts.others)


def _others(others: OthersFacts) -> Iterator[str]:
    """Yield what others hold of the card, or all that is in use of it where that is not known."""
    if others.num_bytes is not None:
        held = format_bytes(others.num_bytes) if others.num_bytes else "nothing"
        yield f"other processes{' and the driver' if others.with_driver else ''} hold {held} of the card"
    elif others.device_bytes is not None:
        yield f"{format_bytes(others.device_bytes)} of the card are in use in all"
