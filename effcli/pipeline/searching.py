"""A search for settings that fit: optimizer, micro-batch, accumulation, precision, recomputation, and how several
processes share the model. No torch.

Pure: what a configuration takes is asked of `predict`. Memory grows with the micro-batch, and recomputation does not
add to it; both spare predictions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from effcli.memory.plan import MemoryPlan
from effcli.spec import Shard

ASSUMED = (
    "what recomputes nothing before what does",
    "larger micro-batches before smaller ones",
    "16-bit precision before fp32",
    "optimizers in the order given, those with 8-bit state last",
)
"""What is assumed about speed, the weightiest first; nothing of it is measured."""
EXCHANGE = "replicas before shards, which exchange parameters as well as gradients"
"""What is assumed of several processes before all that."""
_SLOWEST_PRECISION = "fp32"


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One configuration; `optimizer` is the place of the optimizer among those that are tried.

    Batch size and accumulation are those of each process.
    """

    optimizer: int
    precision: str
    batch_size: int
    accum: int
    recompute: bool
    shard: Shard = "ddp"


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A configuration with its plan."""

    candidate: Candidate
    plan: MemoryPlan

    @property
    def need_bytes(self) -> int:
        """Return what the device must have."""
        assert self.plan.device_total_bytes is not None
        return self.plan.device_total_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """What is tried. `eight_bit` has an entry per optimizer, `recompute` says whether with, without, or both.

    `world_size` divides the effective batch. `runs` says whether an optimizer, by its place, runs in a precision and
    with a way of sharing.
    """

    eight_bit: Sequence[bool]
    precisions: Sequence[str]
    effective_batch: int
    recompute: Sequence[bool] = (False, True)
    world_size: int = 1
    shards: Sequence[Shard] = ("ddp",)
    runs: Callable[[int, str, Shard], bool] = lambda optimizer, precision, shard: True

    @property
    def assumed(self) -> tuple[str, ...]:
        """Return what is assumed about speed, the weightiest first."""
        return ASSUMED if self.world_size == 1 else (EXCHANGE, *ASSUMED)

    @property
    def kinds(self) -> tuple[tuple[int, str, Shard], ...]:
        """Return what runs of each optimizer, precision and way of sharing."""
        each = product(range(len(self.eight_bit)), self.precisions, self.shards)
        return tuple(kind for kind in each if self.runs(*kind))


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What fits, the fastest by assumption first; `closest` takes least of all that were tried, fitting or not."""

    fitting: tuple[Planned, ...]
    closest: Planned
    num_predictions: int


Predict = Callable[[Candidate], MemoryPlan]


def search(space: Space, predict: Predict, allowed_bytes: int) -> Found:
    """Return, for each kind of `space` and way of keeping activations, the largest micro-batch that fits.

    A smaller micro-batch would fit as well and is slower by assumption, so it is left out; so is recomputation where
    it allows no larger micro-batch. The micro-batch, the accumulation and the number of processes multiply to the
    effective batch. Something runs in the space.
    """
    tried: dict[Candidate, Planned] = {}

    def plan(candidate: Candidate) -> Planned:
        if candidate not in tried:
            tried[candidate] = Planned(candidate=candidate, plan=predict(candidate))
        return tried[candidate]

    def fits(candidate: Candidate) -> bool:
        return plan(candidate).need_bytes <= allowed_bytes

    fitting = [plan(candidate) for candidate in _largest_of_each(space, fits)]
    return Found(
        fitting=tuple(sorted(fitting, key=lambda planned: _rank(space, planned.candidate))),
        closest=min(tried.values(), key=lambda planned: planned.need_bytes),
        num_predictions=len(tried),
    )


def _largest_of_each(space: Space, fits: Callable[[Candidate], bool]) -> Iterator[Candidate]:
    rows = space.effective_batch // space.world_size
    sizes = [size for size in range(1, rows + 1) if rows % size == 0]
    for optimizer, precision, shard in space.kinds:
        reached = 0
        for recompute in sorted(space.recompute):
            candidates = [
                Candidate(
                    optimizer=optimizer,
                    precision=precision,
                    batch_size=size,
                    accum=rows // size,
                    recompute=recompute,
                    shard=shard,
                )
                for size in sizes
                if size > reached
            ]
            if candidates and (largest := _last(candidates, fits)) is not None:
                reached = largest.batch_size
                yield largest


def _last(candidates: Sequence[Candidate], fits: Callable[[Candidate], bool]) -> Candidate | None:
    """Return the last of the candidates that fits, by bisection: those before one that fits do so too.

    The whole batch is tried first and by itself: with one micro-batch no gradients wait for the next one, so that it
    can fit where half of it does not.
    """
    *smaller, whole = candidates
    if fits(whole):
        return whole
    low, high = -1, len(smaller)  # the one at `low` fits, the one at `high` does not
    while high - low > 1:
        middle = (low + high) // 2 if low >= 0 else 0
        low, high = (middle, high) if fits(smaller[middle]) else (low, middle)
    return smaller[low] if low >= 0 else None


def _rank(space: Space, candidate: Candidate) -> tuple[bool, bool, int, bool, bool, int]:
    """Return the place of a configuration by the assumptions above."""
    return (
        candidate.shard != "ddp",
        candidate.recompute,
        -candidate.batch_size,
        candidate.precision == _SLOWEST_PRECISION,
        space.eight_bit[candidate.optimizer],
        candidate.optimizer,
    )
