"""Sentences about whether a plan fits, and what would make it fit; from the plan's own numbers."""

from __future__ import annotations

from collections.abc import Iterator

from effcli.errors import OverBudgetError
from effcli.measure.estimate_record import EstimateRecord
from effcli.measure.record import RunRecord
from effcli.measure.search_record import SearchRecord
from effcli.memory.fit import is_enough, largest_divisor
from effcli.memory.plan import MemoryPlan
from effcli.units import format_bytes


def check_budget(record: EstimateRecord) -> None:
    """Raise where the plan of an optimizer needs more than `--budget` allows.

    Raises:
        OverBudgetError: one line with the need of each optimizer that does, and what would make the first one fit.
    """
    budget = record.peak.budget_bytes if record.peak else None
    if budget is None:
        return
    over = [
        (optimizer.name, optimizer.plan, optimizer.plan.device_total_bytes)
        for optimizer in record.optimizers
        if optimizer.plan and optimizer.plan.device_total_bytes and optimizer.plan.device_total_bytes > budget
    ]
    if not over:
        return
    needs = ", ".join(f"{name} needs {format_bytes(need)}" for name, _, need in over)
    batch = record.peak.batch if record.peak else None
    ways = remedies(over[0][1], batch_size=batch.micro if batch else 1, accum=batch.accum if batch else 1)
    raise OverBudgetError(f"over the budget of {format_bytes(budget)}: {needs}; {ways}")


def check_found(record: SearchRecord) -> None:
    """Raise where a search found nothing that fits.

    Raises:
        OverBudgetError: one line with what is closest, and what would make it fit.
    """
    closest = record.closest
    if closest is None:
        return
    room = f"{format_bytes(record.allowed_bytes)} ({format_bytes(record.gpu.usable_bytes)} less the margin)"
    need = f"closest is {closest.flags}, which needs {format_bytes(closest.device_total_bytes)}"
    raise OverBudgetError(f"nothing fits in {room}: {need}; {_advice(record, closest.device_total_bytes)}")


def _advice(record: SearchRecord, need: int) -> str:
    if need <= record.gpu.usable_bytes:
        return "it fits without a margin: --margin 0"
    enough = [way for way in record.ways_out if way.device_total_bytes <= record.allowed_bytes]
    if enough:
        return ", or ".join(f"with {way.flags} {format_bytes(way.device_total_bytes)} suffice" for way in enough)
    tried = "".join(f", with {way.flags} {format_bytes(way.device_total_bytes)}" for way in record.ways_out)
    return f"a card with {format_bytes(need)} is needed{tried}; or a shorter --max-length"


def peak_sentences(record: RunRecord) -> tuple[str, ...]:
    """Return what is said about the peak before training; nothing where it could not be predicted."""
    plan, batch = record.optimizer.plan, record.batch
    if plan is None or plan.peak_allocated_bytes is None:
        return ()
    warning = fit_warning(plan, batch_size=batch.micro, accum=batch.accum)
    return (expected_peak(plan), *((warning,) if warning else ()))


def expected_peak(plan: MemoryPlan) -> str:
    """Return the sentence that is said before training: the planned peak, and what the device must have for it."""
    peak = format_bytes(plan.peak_allocated_bytes or 0)
    sentence = f"Planned peak: {peak} of tensors, in the {plan.peak_phase} phase"
    if plan.device_total_bytes is None or plan.device == "cpu":
        return f"{sentence}."
    return f"{sentence}; {format_bytes(plan.device_total_bytes)} of the device with the allocator's reserve and CUDA."


def fit_warning(plan: MemoryPlan, *, batch_size: int, accum: int) -> str | None:
    """Return a warning where a plan does not fit its budget, or hardly, and what would make it fit."""
    need, budget = plan.device_total_bytes, plan.budget_bytes
    if plan.fits in (None, "fits") or need is None or budget is None:
        return None
    ways = remedies(plan, batch_size=batch_size, accum=accum)
    if plan.fits == "tight":
        return f"This will be tight: {format_bytes(need)} of {format_bytes(budget)}; to be safe, {ways}."
    return f"This will not fit: it needs {format_bytes(need)} and there are {format_bytes(budget)}; {ways}."


def remedies(plan: MemoryPlan, *, batch_size: int, accum: int) -> str:
    """Return which single changes make a plan fit, or else which saves most."""
    enough = fitting_changes(plan, batch_size=batch_size, accum=accum)
    if enough:
        return f"try {', or '.join(enough)}"
    best = max(plan.changes, key=lambda change: change.saved_bytes, default=None)
    if best is None or best.saved_bytes <= 0:
        return "try a shorter --max-length, or effcli plan for what fits"
    return f"{best.flags} saves most, {format_bytes(best.saved_bytes)}, which is not enough alone; see effcli plan"


def fitting_changes(plan: MemoryPlan, *, batch_size: int, accum: int) -> list[str]:
    """Return the flags that make a plan fit, each alone: first those of a smaller micro-batch of the same update."""
    return list(dict.fromkeys(_enough(plan, batch_size, accum)))


def _enough(plan: MemoryPlan, batch_size: int, accum: int) -> Iterator[str]:
    """Yield flags that make the plan fit: a smaller micro-batch of the same update, and single changes."""
    effective = batch_size * accum
    smaller = largest_divisor(effective, at_most=min(plan.largest_batch_size or 0, batch_size - 1))
    if smaller:
        yield f"--batch-size {smaller} --accum {effective // smaller} (the same update)"
    for change in sorted(plan.changes, key=lambda change: -change.saved_bytes):
        if is_enough(change, plan) and "--batch-size" not in change.flags:
            yield change.flags
