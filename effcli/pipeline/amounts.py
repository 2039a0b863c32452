"""Facts about a model and an optimizer that follow from shapes alone; the same for an estimate and for a run."""

from __future__ import annotations

from collections.abc import Sequence

from effcli.measure.record import ModelFacts, OptimizerFacts
from effcli.memory.plan import MemoryPlan
from effcli.memory.sharding.share import Share
from effcli.memory.state import StateSummary
from effcli.optim.entry import Hyper, OptimizerEntry
from effcli.pipeline.ranks import rank_amounts
from effcli.units import ParamInfo, Placement, StateAmount

MASTER_WEIGHTS = "master_weights"
"""Key of the 32-bit copies of weights that DeepSpeed steps; they count no elements of statistics."""


def model_facts(
    *, name: str, architecture: str, task: str, parameters: Sequence[ParamInfo], share: Share | None = None
) -> ModelFacts:
    """Return counts of a model's parameters, and the bytes of its weights and gradients.

    Of several processes these are the bytes of `share`; the counts stay the whole model's.
    """
    trainable = [parameter for parameter in parameters if parameter.trainable]
    return ModelFacts(
        name=name,
        architecture=architecture,
        task=task,
        num_parameters=sum(parameter.num_elements for parameter in parameters),
        num_trainable_parameters=sum(parameter.num_elements for parameter in trainable),
        num_parameter_tensors=len(parameters),
        weights_bytes=share.weights_bytes if share else sum(parameter.num_bytes for parameter in parameters),
        gradients_bytes=share.gradients_bytes if share else sum(parameter.num_bytes for parameter in trainable),
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
    held: Sequence[Share] = (),
) -> OptimizerFacts:
    """Return an optimizer's predicted state beside the rule of thumb, and the total with weights and gradients.

    `device` is cpu or cuda. On a CPU nothing is paged, and host and device are one. `held` are the shares of several
    processes; `state` and `model` are then those of the first, the rule is for what it trains, and the total has what
    it holds to exchange with others. No rule is known that counts master weights.
    """
    on_cpu, own = device == "cpu", held[0] if held else None
    master_bytes = own.master_bytes if own else 0
    state_bytes = state.state_bytes + master_bytes
    placements = {Placement.DEVICE: state.state_bytes} if on_cpu else dict(state.placements)
    placements[Placement.DEVICE] = placements.get(Placement.DEVICE, 0) + master_bytes
    master = {MASTER_WEIGHTS: StateAmount(elements=0, bytes=master_bytes)} if master_bytes else {}
    trained = model.num_trainable_parameters
    if own:
        trained = sum(parameter.num_elements for parameter in own.parameters if parameter.trainable)
    rule = None if master_bytes else entry.rule_of_thumb_bytes
    exchanged_bytes = own.communication_bytes if own else 0
    return OptimizerFacts(
        name=entry.name,
        state_bytes=state_bytes,
        state_elements=state.state_elements,
        rule_of_thumb_bytes=rule(trained, hyper) if rule else None,
        basis=state.basis,
        tensors={**state.tensors, **master},
        placements={str(placement): num_bytes for placement, num_bytes in placements.items() if num_bytes},
        allocator_state_bytes=None if on_cpu or master_bytes else state.allocator_state_bytes,
        by_parameter=state.by_parameter if per_parameter else None,
        total_before_activations_bytes=model.weights_bytes + model.gradients_bytes + state_bytes + exchanged_bytes,
        plan=plan,
        per_rank=rank_amounts(entry, hyper, held),
    )
