"""Plans of an estimate: its settings handed to the predictor. Imports torch."""

from __future__ import annotations

from collections.abc import Sequence

from effcli.estimate_spec import EstimateSpec
from effcli.history.context import context_for
from effcli.memory.plan import MemoryPlan
from effcli.memory.sharding.share import Sharding
from effcli.models.known import KnownModel
from effcli.optim.entry import Hyper, OptimizerEntry
from effcli.pipeline.peak_settings import Room
from effcli.pipeline.planning import Limits, plan_memory, with_changes, with_largest_batch
from effcli.pipeline.predicting import Choice, Predictor, Settings
from effcli.pipeline.settling import quiet_transformers
from effcli.pipeline.subjects import estimated, target


def plans(
    known: KnownModel, spec: EstimateSpec, entries: Sequence[OptimizerEntry], settled: Sequence[Hyper], given: Room
) -> tuple[MemoryPlan, ...]:
    """Return the plan of an update with each optimizer; changes of settings are tried for the first one alone.

    Raises:
        TraceError: the model's code cannot be traced.
    """
    quiet_transformers()
    loop = spec.loop
    predictor = Predictor(estimated(known, spec), target(loop.device, given.capability))
    data = spec.data
    settings = Settings.of(
        loop,
        max_length=data.max_length or 0,
        max_target_length=data.max_target_length,
        sharding=Sharding(shard=loop.shard, world_size=loop.world_size),
    )
    limits = Limits.of(
        budget_bytes=given.num_bytes,
        context=context_for(given.card.key if given.card else None) if loop.device == "cuda" else None,
    )
    found: list[MemoryPlan] = []
    for entry, hyper, optim in zip(entries, settled, spec.optim, strict=True):
        choice = Choice.of(entry, hyper, optim)
        plan = plan_memory(predictor, settings, choice, limits)
        plan = plan if found else with_changes(plan, predictor, settings, choice)
        found.append(with_largest_batch(plan, predictor, settings, choice, limits))
    return tuple(found)
