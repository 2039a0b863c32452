"""Whether a plan fits into a budget, and the largest batch that does. No torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from effcli.memory.caching_allocator import CachingAllocator, CapacityError
from effcli.memory.plan import Change, Fits, MemoryPlan
from effcli.memory.replay import Replay, replay
from effcli.memory.tape import Program

SPARE = 0.1
"""The share of a budget that a plan must leave free to be more than tight."""

LARGEST_BATCH = 2**31 - 1
"""The largest batch that can be asked for."""

RISK = 16
"""How many times the largest batch that is known to fit the next guess may be."""

FRAGMENTS = 0.02
"""The share of a budget that guesses go down at once where a batch fails that needs less than the budget."""

GUESSES = 8
"""After so many guesses the bracket is halved instead."""


def verdict(*, device_total_bytes: int, budget_bytes: int) -> Fits:
    """Return whether reserved bytes and context fit: `tight` is under `SPARE` of the budget to spare."""
    if device_total_bytes <= (1 - SPARE) * budget_bytes:
        return "fits"
    return "tight" if device_total_bytes <= budget_bytes else "no"


def lacking_bytes(plan: MemoryPlan) -> int:
    """Return the bytes that a plan needs beyond its budget; negative where there is room."""
    return (plan.device_total_bytes or 0) - (plan.budget_bytes or 0)


def is_enough(change: Change, plan: MemoryPlan) -> bool:
    """Return whether a change alone makes a plan fit, or leaves more room where it hardly does."""
    return change.saved_bytes > 0 and change.saved_bytes >= lacking_bytes(plan)


def largest_divisor(effective: int, *, at_most: int) -> int:
    """Return the largest micro-batch that divides the `effective` rows of an update, which stays the same with it.

    0 where `at_most` allows not even 1 row.
    """
    return next((size for size in range(at_most, 0, -1) if effective % size == 0), 0)


def under_pressure(program: Program, played: Replay, capacity_bytes: int) -> Replay:
    """Return the replay on a CUDA device that has `capacity_bytes` for the allocator; `played` was not limited.

    What an allocator reserves on an empty device is not all needed: near the limit it gives segments back that are
    wholly free and asks again. A program that does not get through that way is returned as it was played: it would run
    out of memory, though another order of addresses might save one that fails by fragments alone.
    """
    if played.reserved_bytes <= capacity_bytes:
        return played
    try:
        return replay(program, CachingAllocator(capacity_bytes))
    except CapacityError:
        return played


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """What a run with one batch size needs.

    `num_bytes` should grow evenly with the batch (allocated bytes and context): guesses are made along it. Whether the
    run `fits` is the verdict's word alone.
    """

    num_bytes: int
    fits: bool


def largest_batch(
    predict: Callable[[int], Need], *, budget_bytes: int, start: int, largest: int = LARGEST_BATCH
) -> int:
    """Return the largest batch size that fits, at most `largest`, and 0 where not even 1 does.

    Every answer is verified: `predict` was asked for it and, unless it is `largest`, for the next one, which does not
    fit. A batch fits where a larger one does, which is taken for granted. Peaks are nearly a line in the batch size or,
    where the step is the peak for small batches, two; so the first guess scales from `start` and the others follow the
    line through the two known points that are nearest to the budget. About four predictions are enough.
    """
    known: dict[int, Need] = {}
    fitting, failing = 0, largest + 1
    guess = min(start, largest)
    while failing - fitting > 1:
        known[guess] = predict(guess)
        if known[guess].fits:
            fitting = guess
        else:
            failing = guess
        guess = _guess(known, fitting, failing, budget_bytes)
    return fitting


def _guess(known: Mapping[int, Need], fitting: int, failing: int, budget_bytes: int) -> int:
    """Return the batch to try next, which lies between the two."""
    target = _target_bytes(known, fitting, budget_bytes)
    near = sorted(known, key=lambda batch: abs(known[batch].num_bytes - target))[:2]
    guess = _on_line(known, min(near), max(near), target)
    if len(known) > GUESSES:
        guess = (fitting + failing) // 2
    elif failing not in known:
        guess = min(guess, RISK * fitting)
    elif guess >= failing:
        # The line is too flat: it starts where the step is the peak, whatever the batch. The bend is convex, so that a
        # line from there to the failing point is too low, while one from the origin is too high.
        least = _on_line(known, fitting, failing, target) if fitting in known else 0
        guess = (least + _on_line(known, failing, failing, target)) // 2
    return max(fitting + 1, min(guess, failing - 1))


def _on_line(known: Mapping[int, Need], batch: int, larger: int, target: int) -> int:
    """Return where a line through two known points, or through one and the origin, reaches the target."""
    if batch == larger:
        return batch * target // known[batch].num_bytes
    rise = known[larger].num_bytes - known[batch].num_bytes
    return batch + (target - known[batch].num_bytes) * (larger - batch) // rise if rise > 0 else LARGEST_BATCH


def _target_bytes(known: Mapping[int, Need], fitting: int, budget_bytes: int) -> int:
    """Return the need to aim at: the budget, or less where a batch that needs less failed already, by fragments."""
    failed = min((need.num_bytes for need in known.values() if not need.fits), default=budget_bytes)
    if failed >= budget_bytes:
        return budget_bytes
    fitted = known[fitting].num_bytes if fitting in known else 0
    return max((failed + fitted) // 2, failed - int(FRAGMENTS * budget_bytes))
