"""What each process of a run holds: its share of the model, and each optimizer's state of that. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import get_args

from effcli.errors import UsageError
from effcli.measure.rank_record import DistributionFacts, ModeAmounts, RankAmounts
from effcli.memory.sharding.share import Sharding, Share, is_zero
from effcli.memory.sharding.shares import shares
from effcli.memory.state import StateSummary, predict_state
from effcli.optim import registry
from effcli.optim.entry import Hyper, OptimizerEntry
from effcli.optim.overrides import Override
from effcli.pipeline.launching import training_faults
from effcli.spec import Precision, Shard
from effcli.units import ParamInfo


def distribution(sharding: Sharding) -> DistributionFacts | None:
    """Return how a run is spread, for its record; None for one process."""
    if not sharding.has_many:
        return None
    return DistributionFacts(world_size=sharding.world_size, shard=sharding.shard)


def check_processes(sharding: Sharding) -> None:
    """Raise unless there is somebody to share with.

    Raises:
        UsageError: shares of one process.
    """
    if not sharding.has_many and sharding.shard != "ddp":
        raise UsageError(
            f"--shard {sharding.shard}: one process has nobody to share with; say how many there are, such as "
            "--world-size 8"
        )


def mode_notes(
    sharding: Sharding, precision: Precision, optimizers: Iterable[tuple[OptimizerEntry, Hyper]]
) -> tuple[str, ...]:
    """Return a sentence on each thing that is estimated and that `effcli train` refuses."""
    if not sharding.has_many:
        return ()
    faults = (fault for pair in optimizers for fault in training_faults(*pair, sharding.shard, precision))
    return tuple(f"Estimated, and not trained: {fault}." for fault in dict.fromkeys(faults))


def check_layers(sharding: Sharding) -> None:
    """Raise unless what a rank holds can be told by layer.

    Raises:
        UsageError: the optimizer is given flat tensors.
    """
    if sharding.is_flat:
        raise UsageError(
            f"--per-layer and --top: with --shard {sharding.shard} a process holds flat tensors that belong to no "
            "layer; leave them out, or choose --shard fsdp"
        )


def spread(parameters: Sequence[ParamInfo], sharding: Sharding, precision: Precision) -> tuple[Share, ...]:
    """Return what each rank holds of a model; nothing for one process.

    Raises:
        UsageError: a parameter cannot be sharded so.
    """
    return () if not sharding.has_many else shares(parameters, sharding, precision)


def check_on_shares(entry: OptimizerEntry, hyper: Hyper, shard: Shard) -> None:
    """Raise unless an optimizer can be given what a rank holds.

    Raises:
        UsageError: it does not run on such parameters, or an override names one that it does not see.
    """
    registry.check_shards(entry, shard, hyper)
    overrides: tuple[Override, ...] = tuple(hyper.get("overrides", ()))
    if is_zero(shard) and overrides:
        raise UsageError(
            f"{overrides[0].flag} '{overrides[0].pattern}': with --shard {shard} an optimizer steps flat tensors that "
            "many parameters share, and sees no names; leave it out, or choose --shard fsdp"
        )


def rank_amounts(entry: OptimizerEntry, hyper: Hyper, held: Sequence[Share]) -> tuple[RankAmounts, ...]:
    """Return what each rank holds before activations, in bytes, in the order of the shares.

    Ranks whose shares have the same tuple of parameters are computed once.
    """
    states: dict[int, StateSummary] = {}
    for share in held:
        if id(share.parameters) not in states:
            states[id(share.parameters)] = predict_state(entry, share.parameters, hyper)
    return tuple(_amounts(share, states[id(share.parameters)]) for share in held)


def _amounts(share: Share, state: StateSummary) -> RankAmounts:
    state_bytes = state.state_bytes + share.master_bytes
    return RankAmounts(
        rank=share.rank,
        weights_bytes=share.weights_bytes,
        gradients_bytes=share.gradients_bytes,
        optimizer_state_bytes=state_bytes,
        optimizer_state_elements=state.state_elements,
        communication_bytes=share.communication_bytes,
        total_before_activations_bytes=(
            share.weights_bytes + share.gradients_bytes + state_bytes + share.communication_bytes
        ),
    )


def mode_amounts(
    entry: OptimizerEntry, hyper: Hyper, parameters: Sequence[ParamInfo], world_size: int, precision: Precision
) -> tuple[ModeAmounts, ...]:
    """Return what the fullest rank holds in each mode that runs with an optimizer; nothing for one process."""
    if world_size == 1:
        return ()
    found = []
    for shard in get_args(Shard):
        try:
            check_on_shares(entry, hyper, shard)
            held = spread(parameters, Sharding(shard=shard, world_size=world_size), precision)
        except UsageError:
            continue
        ranks = rank_amounts(entry, hyper, held)
        fullest = max(ranks, key=lambda rank: rank.total_before_activations_bytes)
        found.append(ModeAmounts(shard=shard, optimizer=entry.name, fullest=fullest))
    return tuple(found)
