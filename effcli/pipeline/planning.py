"""From replays to a `MemoryPlan`: phases, peak, verdict, and what a change would buy."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from effcli.errors import UsageError
from effcli.history.context import Context
from effcli.memory.fit import LARGEST_BATCH, Need, largest_batch, largest_divisor, under_pressure, verdict
from effcli.memory.plan import Change, Fits, MemoryPlan, PeakPart
from effcli.memory.replay import LivePart, Moment, Replay, phases, timeline
from effcli.optim import registry
from effcli.optim.entry import OptimizerEntry
from effcli.optim.hyper import default_hyper
from effcli.optim.implementation import NAME as IMPLEMENTATION
from effcli.optim.implementation import has_implementation, with_implementation
from effcli.pipeline.launching import saving_fault
from effcli.pipeline.predicting import Choice, Predictor, Settings
from effcli.spec import OptimSpec
from effcli.trace.kinds import LIBRARY
from effcli.units import Basis, Category, ParamInfo, Phase, format_bytes, listed

NUM_MODULES = 10
"""How many modules a plan names."""

FIRST, LATER = 0, 1

NCCL = "What NCCL takes of each card for itself, beside torch's allocator, is not counted: leave some room."


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a plan is held against: the device's bytes, None for nothing; `context_bytes` lie beside the allocator."""

    budget_bytes: int | None
    context_bytes: int
    context_basis: Basis = Basis.ASSUMED
    context_source: str | None = None

    @classmethod
    def of(cls, *, budget_bytes: int | None, context: Context | None) -> Limits:
        """Return the limits with a context as it is known; None where there is none, as on a CPU."""
        if context is None:
            return cls(budget_bytes=budget_bytes, context_bytes=0)
        return cls(
            budget_bytes=budget_bytes,
            context_bytes=context.num_bytes,
            context_basis=context.basis,
            context_source=context.source,
        )


def plan_memory(predictor: Predictor, settings: Settings, choice: Choice, limits: Limits) -> MemoryPlan:
    """Return the plan of the first and of a later update, without what needs further predictions.

    What is reserved is held within the budget where the run gets through that way. On a CPU nothing is reserved beside
    what is allocated, and what the interpreter and its libraries hold is left out.

    Raises:
        TraceError: the model's code cannot be traced.
    """
    played = _played(predictor, settings, choice, limits)
    steps = predictor.steps(settings, choice)
    device_total_bytes = played.reserved_bytes + limits.context_bytes
    has_many = settings.sharding.has_many
    at_peak = steps.basis if played.peak.phase is Phase.STEP else Basis.TRACED
    basis = _basis(choice.entry, at_peak, limits, has_many=has_many)
    return MemoryPlan(
        phases=phases(played, LATER),
        first_phases=phases(played, FIRST),
        basis=_basis(choice.entry, steps.basis, limits, has_many=has_many),
        device=predictor.device,
        peak_phase=played.peak.phase,
        peak_update="first" if played.peak.update == FIRST else "later",
        peak_allocated_bytes=played.peak.total_bytes,
        peak_reserved_bytes=played.reserved_bytes,
        first_step_bytes=played.first_step_bytes if predictor.device == "cuda" else None,
        context_bytes=limits.context_bytes,
        context_source=limits.context_source,
        device_total_bytes=device_total_bytes,
        budget_bytes=limits.budget_bytes,
        fits=_fits(device_total_bytes, limits),
        parts=_parts(played.kinds, basis),
        modules=_parts(played.modules, basis)[:NUM_MODULES],
        timeline=timeline(played),
        notes=(
            *_unreached(predictor.without_gradient(settings), settings),
            *steps.notes,
            *([NCCL] if has_many and predictor.device == "cuda" else []),
        ),
    )


def with_changes(plan: MemoryPlan, predictor: Predictor, settings: Settings, choice: Choice) -> MemoryPlan:
    """Return the plan with what each single change of a setting would do to its peak."""
    changes = (
        _change(name, flags, plan, predictor.replay(changed, other).peak)
        for name, flags, changed, other in (
            *_of_the_loop(predictor, settings, choice),
            *_of_the_optimizer(predictor, settings, choice),
        )
    )
    return plan.model_copy(update={"changes": tuple(changes)})


def with_largest_batch(
    plan: MemoryPlan, predictor: Predictor, settings: Settings, choice: Choice, limits: Limits
) -> MemoryPlan:
    """Return the plan with the largest micro-batch whose verdict is not "no"; as it is without a budget.

    The answer is traced itself, and looked for again with that trace where it was worked out from others.
    """
    if limits.budget_bytes is None:
        return plan

    def need(batch_size: int) -> Need:
        played = _played(predictor, replace(settings, batch_size=batch_size), choice, limits)
        device_total_bytes = played.reserved_bytes + limits.context_bytes
        return Need(
            num_bytes=played.peak.total_bytes + limits.context_bytes,
            fits=_fits(device_total_bytes, limits) != "no",
        )

    largest = largest_batch(need, budget_bytes=limits.budget_bytes, start=settings.batch_size)
    while 0 < largest < LARGEST_BATCH and predictor.trace(replace(settings, batch_size=largest)):
        largest = largest_batch(need, budget_bytes=limits.budget_bytes, start=largest)
    return plan.model_copy(update={"largest_batch_size": largest})


def combined_changes(plan: MemoryPlan, predictor: Predictor, settings: Settings, choice: Choice) -> Iterator[Change]:
    """Yield what several changes at once would do to a plan's peak: first those that leave the result as it is."""
    size, accum = settings.batch_size, settings.accum
    changed = replace(settings, batch_size=1, accum=size * accum)
    flags = f"--batch-size 1 --accum {size * accum}"
    if predictor.can_recompute and not settings.gradient_checkpointing:
        changed, flags = replace(changed, gradient_checkpointing=True), f"{flags} --gradient-checkpointing"
        yield _change("no more than must be", flags, plan, predictor.replay(changed, choice).peak)
    for name, more, same, other in (
        *_of_the_optimizer(predictor, changed, choice),
        *_least_state(predictor, changed, choice),
    ):
        yield _change(name, f"{flags} {more}", plan, predictor.replay(same, other).peak)


def _change(name: str, flags: str, plan: MemoryPlan, peak: Moment) -> Change:
    assert plan.peak_allocated_bytes is not None
    return Change(
        name=name,
        flags=flags,
        peak_allocated_bytes=peak.total_bytes,
        saved_bytes=plan.peak_allocated_bytes - peak.total_bytes,
        peak_phase=peak.phase,
    )


def _of_the_loop(
    predictor: Predictor, settings: Settings, choice: Choice
) -> Iterator[tuple[str, str, Settings, Choice]]:
    size, accum = settings.batch_size, settings.accum
    if settings.gradient_checkpointing:
        kept = replace(settings, gradient_checkpointing=False)
        yield "keep activations", "without --gradient-checkpointing", kept, choice
    elif predictor.can_recompute:
        recomputed = replace(settings, gradient_checkpointing=True)
        yield "recompute activations", "--gradient-checkpointing", recomputed, choice
    if size > 1:
        smaller = largest_divisor(size * accum, at_most=(size + 1) // 2)
        name = "half the micro-batch" if 2 * smaller == size else "a smaller micro-batch"
        times = size * accum // smaller
        flags = f"--batch-size {smaller} --accum {times}"
        yield name, flags, replace(settings, batch_size=smaller, accum=times), choice
    yield "one more accumulation step", f"--accum {accum + 1}", replace(settings, accum=accum + 1), choice


def _of_the_optimizer(
    predictor: Predictor, settings: Settings, choice: Choice
) -> Iterator[tuple[str, str, Settings, Choice]]:
    entry, hyper = choice.entry, choice.hyper
    one_by_one = settings.sharding.has_rows
    if (
        not one_by_one
        and predictor.device == "cuda"
        and has_implementation(entry, "fused")
        and hyper[IMPLEMENTATION] != "fused"
    ):
        fused = replace(choice, hyper=with_implementation(entry, hyper, "fused"))
        yield "fused instead of foreach", f"--optim-arg {IMPLEMENTATION}=fused", settings, fused
    small = next((other for other in registry.entries() if other.name == f"{entry.name}8bit"), None)
    if small is not None and _runs(small, settings):
        asked = OptimSpec(name=small.name, lr=hyper.get("lr"), weight_decay=choice.weight_decay)
        yield (
            "8-bit state",
            f"--optim {small.name}",
            settings,
            Choice.of(small, registry.resolve_hyper(small, asked), asked),
        )


def _runs(entry: OptimizerEntry, settings: Settings) -> bool:
    """Return whether an optimizer can be given what a process holds, and is trained with it."""
    shard = settings.sharding.shard if settings.sharding.has_many else "ddp"
    try:
        registry.check_shards(entry, shard)
    except UsageError:
        return False
    return saving_fault(entry, default_hyper(entry), shard) is None


def _least_state(
    predictor: Predictor, settings: Settings, choice: Choice
) -> Iterator[tuple[str, str, Settings, Choice]]:
    """Yield what Adafactor does, which is another optimizer: its factored state is little beside any weights."""
    entry = registry.find("adafactor")
    if entry.name != choice.entry.name and _runs(entry, settings):
        asked = OptimSpec(name=entry.name, lr=choice.hyper.get("lr"), weight_decay=choice.weight_decay)
        other = Choice.of(entry, registry.resolve_hyper(entry, asked), asked)
        yield "factored state", f"--optim {entry.name}", settings, other


def _played(predictor: Predictor, settings: Settings, choice: Choice, limits: Limits) -> Replay:
    """Return the replay on a device of the budget's size, where there is one."""
    program = predictor.program(settings, choice)
    played = predictor.play(program)
    if predictor.device != "cuda" or limits.budget_bytes is None:
        return played
    return under_pressure(program, played, limits.budget_bytes - limits.context_bytes)


def _fits(device_total_bytes: int, limits: Limits) -> Fits | None:
    if limits.budget_bytes is None:
        return None
    return verdict(device_total_bytes=device_total_bytes, budget_bytes=limits.budget_bytes)


def _unreached(parameters: Sequence[ParamInfo], settings: Settings) -> Iterator[str]:
    if parameters:
        names = listed([param.name for param in parameters])
        num_bytes = format_bytes(sum(param.num_bytes for param in parameters))
        without = "no state of theirs" if settings.sharding.is_replicated else "neither gradients nor state of theirs"
        yield f"The task gives {names} no gradient ({num_bytes}): the peak has {without}."


def _basis(entry: OptimizerEntry, temporaries: Basis, limits: Limits, *, has_many: bool) -> dict[str, str]:
    """Return where numbers come from; what is exchanged is read from the libraries' source, not seen in a trace."""
    exchange: dict[str, str] = {Category.COMMUNICATION: Basis.ASSUMED} if has_many else {}
    return {
        **exchange,
        Category.WEIGHTS: Basis.EXACT,
        Category.GRADIENTS: Basis.EXACT,
        Category.OPTIMIZER_STATE: entry.basis,
        Category.ACTIVATIONS: Basis.TRACED,
        Category.TEMPORARIES: temporaries,
        "context": limits.context_basis,
    }


def _parts(live: Iterable[LivePart], basis: Mapping[str, str]) -> tuple[PeakPart, ...]:
    """Return the parts with their basis: what cuBLAS keeps is known from its source, but not seen in the trace."""
    return tuple(
        PeakPart(
            name=part.name,
            category=part.category,
            num_bytes=part.num_bytes,
            basis=Basis.ASSUMED if part.name == LIBRARY else basis[part.category],
        )
        for part in live
    )
