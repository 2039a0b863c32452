"""What a run that has ended says about itself: the parts of a record that exist only then."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from effcli.engines.flat_partitions import FlatPartitions
from effcli.measure.optimizer_size import inspect_optimizer
from effcli.measure.peak import peak_rss_bytes, storage_bytes
from effcli.measure.precision import added_up
from effcli.measure.rank_record import RankMeasured
from effcli.measure.record import EvalFacts, Measured, ProfiledUpdate, WeightChangeFacts
from effcli.pipeline.amounts import MASTER_WEIGHTS
from effcli.ranks.group import gathered, rank
from effcli.units import StateAmount

if TYPE_CHECKING:
    import torch

    from effcli.engines.session import Evaluation, TrainingSession
    from effcli.measure.device_monitor import DeviceMonitor
    from effcli.measure.optimizer_size import OptimizerSize
    from effcli.measure.peak import StepProbe
    from effcli.measure.precision import WeightChanges


@dataclass(frozen=True, slots=True, kw_only=True)
class OfAll:
    """What all processes held after an update, in the order of their ranks."""

    update: int
    ranks: tuple[RankMeasured, ...]
    weight_changes: WeightChangeFacts | None


def gather(own: RankMeasured, weight_changes: WeightChanges, *, update: int) -> OfAll:
    """Return what all processes hold after an update. Collective."""
    ranks, changes = zip(*gathered((own, weight_changes.result())), strict=True)
    return OfAll(
        update=update, ranks=ranks, weight_changes=added_up(changes) if weight_changes.is_sharded else changes[rank()]
    )


def held_by(optimizer: torch.optim.Optimizer) -> OptimizerSize:
    """Return what the optimizer's state holds, with the 32-bit weights that DeepSpeed lets it step beside the model's.

    They are no statistic, and count no elements.
    """
    size, partitions = inspect_optimizer(optimizer), FlatPartitions.of(optimizer)
    if partitions is None:
        return size
    num_bytes = storage_bytes(flat.partition for flat in partitions.flats)
    masters = {MASTER_WEIGHTS: StateAmount(elements=0, bytes=num_bytes)}
    return replace(size, state_bytes=size.state_bytes + num_bytes, tensors={**size.tensors, **masters})


def on_this_rank(
    device: torch.device, *, size: OptimizerSize, probe: StepProbe, peak_allocated_bytes: int | None
) -> RankMeasured:
    """Return what this process holds, and its peaks so far."""
    return RankMeasured(
        rank=rank(),
        device=str(device),
        weights_bytes=probe.weights_bytes,
        gradients_bytes=probe.gradients_bytes,
        optimizer_state_bytes=size.state_bytes,
        optimizer_state_elements=size.state_elements,
        peak_allocated_bytes=peak_allocated_bytes,
        peak_rss_bytes=peak_rss_bytes(),
    )


def _with(own: RankMeasured, ranks: Sequence[RankMeasured]) -> tuple[RankMeasured, ...]:
    """Return the ranks with this process as it is now."""
    return tuple(own if other.rank == own.rank else other for other in ranks)


def measured(
    session: TrainingSession,
    *,
    device: torch.device,
    monitor: DeviceMonitor,
    size: OptimizerSize,
    probe: StepProbe,
    weight_changes: WeightChanges,
    profiled: ProfiledUpdate | None,
    of_all: OfAll | None,
) -> Measured:
    """Return the bytes, elements and counts of a run, read now; on a CPU the peak is that of the profiled update.

    `of_all` is what all processes held after the last update; None where they were not asked then, or there is one.
    Ends the sampling of the device, while everything that the run holds there is still in its place.
    """
    monitor.stop()
    allocator = monitor.allocator_facts()
    profiled = profiled if device.type == "cpu" else None
    counted = allocator or profiled
    peak_bytes = counted.peak_allocated_bytes if counted else None
    own = on_this_rank(device, size=size, probe=probe, peak_allocated_bytes=peak_bytes)
    return Measured(
        weights_bytes=probe.weights_bytes,
        gradients_bytes=probe.gradients_bytes,
        optimizer_state_bytes=size.state_bytes,
        optimizer_state_elements=size.state_elements,
        tensors=size.tensors,
        parameters_without_state=size.without_state,
        peak_allocated_bytes=peak_bytes,
        profiled=profiled,
        peak_rss_bytes=own.peak_rss_bytes,
        allocator=allocator,
        nvml=monitor.nvml_facts(),
        skipped_updates=sum(line.skipped for line in session.history),
        weight_changes=of_all.weight_changes if of_all else weight_changes.result(),
        per_rank=_with(own, of_all.ranks) if of_all else (),
    )


def eval_facts(evaluation: Evaluation) -> EvalFacts:
    """Return an evaluation as the record has it."""
    result = evaluation.result
    return EvalFacts(
        epoch=evaluation.epoch,
        update=evaluation.update,
        eval_loss=result.loss,
        eval_accuracy=result.accuracy,
        eval_f1=result.f1,
        eval_perplexity=result.perplexity,
    )
