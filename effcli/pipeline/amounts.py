"""Facts about a model and an optimizer that follow from shapes alone; the same for an estimate and for a run."""

from __future__ import annotations

from collections.abc import Sequence

from effcli.measure.record import ModelFacts, OptimizerFacts
from effcli.memory.plan import MemoryPlan
from effcli.memory.state import StateSummary
from effcli.optim.entry import Hyper, OptimizerEntry
from effcli.units import ParamInfo, Placement


def model_facts(*, name: str, architecture: str, task: str, parameters: Sequence[ParamInfo]) -> ModelFacts:
    """Return counts of a model's parameters, and the bytes of its weights and gradients."""
    trainable = [parameter for parameter in parameters if parameter.trainable]
    return ModelFacts(
        name=name,
        architecture=architecture,
        task=task,
        num_parameters=sum(parameter.num_elements for parameter in parameters),
        num_trainable_parameters=sum(parameter.num_elements for parameter in trainable),
        num_parameter_tensors=len(parameters),
        weights_bytes=sum(parameter.num_bytes for parameter in parameters),
        gradients_bytes=sum(parameter.num_bytes for parameter in trainable),
    )


def optimizer_facts(
    entry: OptimizerEntry,
    hyper: Hyper,
    state: StateSummary,
    model: ModelFacts,
    *,
    device: str,
    plan: MemoryPlan | None = None,
    per_parameter: bool = False,
) -> OptimizerFacts:
    """Return an optimizer's predicted state beside the rule of thumb, and the total with weights and gradients.

    `device` is cpu or cuda. On a CPU nothing is paged, and host and device are one.
    """
    rule, on_cpu = entry.rule_of_thumb_bytes, device == "cpu"
    placements = {Placement.DEVICE: state.state_bytes} if on_cpu and state.state_bytes else state.placements
    return OptimizerFacts(
        name=entry.name,
        state_bytes=state.state_bytes,
        state_elements=state.state_elements,
        rule_of_thumb_bytes=rule(model.num_trainable_parameters, hyper) if rule else None,
        basis=state.basis,
        tensors=state.tensors,
        placements={str(placement): num_bytes for placement, num_bytes in placements.items()},
        allocator_state_bytes=None if on_cpu else state.allocator_state_bytes,
        by_parameter=state.by_parameter if per_parameter else None,
        total_before_activations_bytes=model.weights_bytes + model.gradients_bytes + state.state_bytes,
        plan=plan,
    )
