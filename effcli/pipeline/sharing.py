"""How a search shares a model among several cards: which ways are tried, and with what they do not run. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from effcli.errors import UsageError
from effcli.measure.rank_record import RankAmounts
from effcli.memory.sharding.share import Sharding
from effcli.memory.sharding.shares import shares
from effcli.optim.entry import Hyper, OptimizerEntry
from effcli.pipeline.estimating import Described
from effcli.pipeline.launching import training_faults
from effcli.pipeline.ranks import check_on_shares, rank_amounts
from effcli.search_spec import SearchedLoopSpec
from effcli.spec import Shard
from effcli.units import ParamInfo

USUAL: tuple[Shard, ...] = ("ddp", "fsdp")

Faults = Mapping[tuple[int, str, Shard], str]
"""The place of an optimizer, a precision and a way of sharing -> why they do not run together."""


def shards_tried(loop: SearchedLoopSpec) -> tuple[Shard, ...]:
    """Return the ways of sharing that are tried, each once.

    Raises:
        UsageError: shares of one card, or an update whose rows the cards do not divide.
    """
    asked = tuple(dict.fromkeys(loop.shard))
    if loop.gpus == 1:
        if refused := [shard for shard in asked if shard != "ddp"]:
            raise UsageError(
                f"--shard {refused[0]}: one card has nobody to share with; say how many there are, such as --gpus 2"
            )
        return ("ddp",)
    rest = loop.effective_batch % loop.gpus
    if rest:
        below, above = loop.effective_batch - rest, loop.effective_batch - rest + loop.gpus
        near = f"--effective-batch {above}" if not below else f"--effective-batch {below} or {above}"
        raise UsageError(
            f"--gpus {loop.gpus}: {loop.effective_batch} rows per update cannot be divided evenly among as many cards; "
            f"give {near}"
        )
    return asked or USUAL


def shard_faults(
    described: Described, shards: Sequence[Shard], precisions: Sequence[str], world_size: int
) -> dict[tuple[int, str, Shard], str]:
    """Return what is left out of a search on several cards, and why; nothing on one."""
    if world_size == 1:
        return {}
    return {
        (place, precision, shard): fault
        for place, (entry, hyper) in enumerate(zip(described.entries, described.settled, strict=True))
        for precision in precisions
        for shard in shards
        if (
            fault := _fault(entry, hyper, precision, described.parameters, Sharding(shard=shard, world_size=world_size))
        )
    }


def left_out(faults: Faults) -> Iterator[str]:
    """Yield what should be said about what was left out, each reason once."""
    for fault in dict.fromkeys(faults.values()):
        yield f"Left out: {fault.partition('; ')[0]}."


def held_by_rank_0(
    entry: OptimizerEntry, hyper: Hyper, parameters: Sequence[ParamInfo], sharding: Sharding, precision: str
) -> RankAmounts:
    """Return what rank 0 holds before activations, in bytes."""
    (amounts,) = rank_amounts(entry, hyper, shares(parameters, sharding, precision)[:1])
    return amounts


def _fault(
    entry: OptimizerEntry, hyper: Hyper, precision: str, parameters: Sequence[ParamInfo], sharding: Sharding
) -> str | None:
    if fault := next(training_faults(entry, hyper, sharding.shard, precision), None):
        return fault
    try:
        check_on_shares(entry, hyper, sharding.shard)
        shares(parameters, sharding, precision)
    except UsageError as error:
        return str(error)
    return None
