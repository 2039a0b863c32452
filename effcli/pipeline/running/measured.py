"""What a run that has ended says about itself: the parts of a record that exist only then."""

from __future__ import annotations

from typing import TYPE_CHECKING

from effcli.measure.peak import peak_rss_bytes
from effcli.measure.record import EvalFacts, Measured, ProfiledUpdate

if TYPE_CHECKING:
    import torch

    from effcli.engines.session import Evaluation, TrainingSession
    from effcli.measure.device_monitor import DeviceMonitor
    from effcli.measure.optimizer_size import OptimizerSize
    from effcli.measure.peak import StepProbe
    from effcli.measure.precision import WeightChanges


def measured(
    session: TrainingSession,
    *,
    device: torch.device,
    monitor: DeviceMonitor,
    size: OptimizerSize,
    probe: StepProbe,
    weight_changes: WeightChanges,
    profiled: ProfiledUpdate | None,
) -> Measured:
    """Return the bytes, elements and counts of a run, read now; on a CPU the peak is that of the profiled update.

    Ends the sampling of the device, while everything that the run holds there is still in its place.
    """
    monitor.stop()
    allocator = monitor.allocator_facts()
    profiled = profiled if device.type == "cpu" else None
    counted = allocator or profiled
    return Measured(
        weights_bytes=probe.weights_bytes,
        gradients_bytes=probe.gradients_bytes,
        optimizer_state_bytes=size.state_bytes,
        optimizer_state_elements=size.state_elements,
        tensors=size.tensors,
        parameters_without_state=size.without_state,
        peak_allocated_bytes=counted.peak_allocated_bytes if counted else None,
        profiled=profiled,
        peak_rss_bytes=peak_rss_bytes(),
        allocator=allocator,
        nvml=monitor.nvml_facts(),
        skipped_updates=sum(line.skipped for line in session.history),
        weight_changes=weight_changes.result(),
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
