"""What one of several processes holds beside activations, as events of its updates. No torch.

The tape of a micro-batch was traced of a whole model in one process: here its weights and gradients become those of a
rank, and what is exchanged with other ranks is put between its events.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from effcli.memory.compose import resident
from effcli.memory.sharding.gathering import with_gathering
from effcli.memory.sharding.share import Sharding, Share
from effcli.memory.sharding.zero import step_bytes
from effcli.memory.tape import GRADIENT, Alloc, Event, Free, Mark, MicroTape, StepTape
from effcli.units import Category, ParamInfo, Phase

BUCKETS = "buckets of gradients"
FRESH = "gradients before they are in buckets"
MASTER = "32-bit copies of weights"
EXCHANGED = "parameters and gradients in exchange"
STEPPED = "32-bit gradients and buffers of a step"


def held(parameters: Sequence[ParamInfo], buffers: Mapping[str, int], share: Share, sharding: Sharding) -> list[Alloc]:
    """Return what is live on a rank before training; see `effcli.memory.compose.resident` for one process.

    Replicas have their buckets from the start: `Reducer` makes them with the model and anew after the first backward
    pass, of the same bytes (torch 2.13, `torch/csrc/distributed/c10d/reducer.cpp`, `initialize_buckets`). They count as
    the gradients, which they hold from the end of a backward pass on.
    """
    if not sharding.has_many:
        return resident(parameters, buffers)
    if sharding.is_replicated:
        buckets = [
            Alloc(0, parameter.num_bytes, Category.GRADIENTS, parameter.name, BUCKETS)
            for parameter in parameters
            if parameter.trainable
        ]
        return _numbered([*resident(parameters, buffers), *buckets])
    before = resident(_weights(parameters, share, sharding), buffers)
    if share.master_bytes:
        before.append(Alloc(0, share.master_bytes, Category.OPTIMIZER_STATE, "", MASTER))
    return _numbered(before)


def exchanging(micro: MicroTape, share: Share, sharding: Sharding, *, device: str) -> MicroTape:
    """Return the tape of a micro-batch on a rank, with what it holds to exchange.

    Replicas: a gradient is made beside its bucket and copied into it (`updates` frees it, see `hands_over`).
    FSDP2: see `effcli.memory.sharding.gathering`. ZeRO: what the rank holds at most is there from the start of the
    forward pass to the end of the backward pass, and its gradients from the start of the backward pass on.
    """
    if not sharding.has_many:
        return micro
    if sharding.is_replicated:
        fresh = {*micro.gradients.values()}
        return replace(micro, events=tuple(_recategorised(micro.events, fresh)))
    if sharding.shard == "fsdp":
        return with_gathering(micro, share.parameters, sharding.world_size, copied=device == "cpu")
    return _with_the_most(micro, share)


def stepping(step: StepTape, share: Share, sharding: Sharding, precision: str) -> StepTape:
    """Return the tape of a step on a rank, with what DeepSpeed takes for it."""
    if not sharding.is_flat:
        return step
    block = 1 + max((event.block for event in step.events if isinstance(event, Alloc)), default=0)
    block = max([block, *(1 + number for number in (*step.gradients.values(), *step.state.values()))])
    taken = Alloc(block, step_bytes(share, sharding, precision), Category.COMMUNICATION, "", STEPPED)
    return replace(step, events=(taken, *step.events, Free(block)))


def _weights(parameters: Sequence[ParamInfo], share: Share, sharding: Sharding) -> list[ParamInfo]:
    """Return the rank's weights: of FSDP2 its rows of each parameter, of ZeRO all as one, in whole bytes."""
    if sharding.shard == "fsdp":
        return list(share.parameters)
    return [ParamInfo(name="", shape=(share.weights_bytes,), dtype="uint8", trainable=False)]


def _numbered(allocs: Sequence[Alloc]) -> list[Alloc]:
    return [alloc._replace(block=number) for number, alloc in enumerate(allocs, start=1)]


def _recategorised(events: Sequence[Event], fresh: set[int]) -> Iterator[Event]:
    for event in events:
        if isinstance(event, Alloc) and event.block in fresh:
            event = event._replace(category=Category.COMMUNICATION, kind=FRESH)
        yield event


def _with_the_most(micro: MicroTape, share: Share) -> MicroTape:
    """Return the tape with whole gradients freed where they are complete: what is kept of them is the rank's."""
    first = 1 + max(event.block for event in micro.events if isinstance(event, Alloc))
    whole = {*micro.gradients.values()}
    gradients = {info.name: first + place for place, info in enumerate(share.parameters, start=1)}
    sizes = dict.fromkeys(gradients, 0) | {share.parameters[0].name: share.gradients_bytes}
    events: list[Event] = []
    for event in _recategorised(micro.events, whole):
        if isinstance(event, Mark) and event.name == GRADIENT:
            events.append(Free(event.number))
            continue
        events.append(event)
        if event == Mark(Phase.FORWARD):
            events.append(Alloc(first, share.communication_bytes, Category.COMMUNICATION, "", EXCHANGED))
        elif event == Mark(Phase.BACKWARD):
            for name, block in gradients.items():
                events.append(Alloc(block, sizes[name], Category.GRADIENTS, name, "gradients"))
    events += [Mark(GRADIENT, block) for block in gradients.values()]
    events.append(Free(first))
    return replace(micro, events=tuple(events), gradients=gradients, copied=frozenset())
