"""Forward and backward of one micro-batch, traced."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from effcli.collector import collector_paused
from effcli.devices import autocast_dtype
from effcli.memory.tape import BATCH, GRADIENT, OUTPUTS, Alloc, Event, Free, Mark, MicroTape
from effcli.trace.kernels import Kernels
from effcli.trace.kinds import COPIED, GRADIENTS, LAYERS, LIBRARY, LOGITS, PASSING, landmarks
from effcli.trace.marks import watched
from effcli.trace.recorder import Recorder
from effcli.units import Category, Phase

Batch = Mapping[str, torch.Tensor]
Forward = Callable[[torch.nn.Module, Batch], Any]
"""Model and batch on the device -> what the loop holds until the next micro-batch."""
Loss = Callable[[Any, Batch], torch.Tensor]
"""What the forward returned, and the batch -> the loss."""


def trace_micro(
    model: torch.nn.Module,
    batch: Batch,
    *,
    forward: Forward,
    loss: Loss,
    kernels: Kernels,
    precision: str = "fp32",
    keep_outputs: bool = False,
    layers: Mapping[str, torch.nn.ModuleList] | None = None,
    padded: bool = False,
) -> MicroTape:
    """Return what forward and backward of one micro-batch allocate.

    Model and batch are fake (`effcli.trace.fake`), and no parameter has a gradient. Under `precision` `bf16` and `fp16`
    the forward runs in autocast, the loss does not. The forward's results are gone once there is a loss; `keep_outputs`
    keeps them as a loop does that binds them to a name; `layers` are the lists whose elements are marked.
    `padded` says whether the batch's mask has padding in it, so that models keep it.
    """
    recorder = Recorder(kernels, padded=padded, known=landmarks(model))
    for tensor in (*model.parameters(), *model.buffers()):
        recorder.known(tensor)
    gradients: dict[str, int] = {}
    libraries: set[int] = set()
    dtype = autocast_dtype(precision)
    with (
        _only_new_garbage(),
        recorder,
        kernels.chosen(),
        watched(model, recorder, layers or {}),
        _gradients_noted(model, recorder, gradients),
    ):
        recorder.mark(Phase.FORWARD)
        inputs = {
            name: recorder.allocated(tensor, source="batch", kind=BATCH, category=Category.ACTIVATIONS)
            for name, tensor in batch.items()
        }
        libraries |= _taken_by_libraries(recorder, kernels, Phase.FORWARD)
        with torch.autocast("cpu", dtype=getattr(torch, dtype)) if dtype else nullcontext():
            held = forward(model, batch)
        recorder.mark(OUTPUTS)
        recorder.source = LOGITS
        value = loss(held, batch)
        recorder.source = ""
        if not keep_outputs:
            del held
        recorder.mark(Phase.BACKWARD)
        recorder.in_backward = True
        libraries |= _taken_by_libraries(recorder, kernels, Phase.BACKWARD)
        value.backward()
        if not keep_outputs:
            del value
        gc.collect()
        events = [*recorder.events, *(Free(block) for block in inputs.values())]
    model.zero_grad(set_to_none=True)
    return MicroTape(
        events=_categorised(events, frozenset(gradients.values())),
        gradients=gradients,
        copied=_copied(events, frozenset(gradients.values())),
        libraries=frozenset(libraries),
    )


@contextmanager
def _only_new_garbage() -> Iterator[None]:
    """Keep the collector from running by itself, and from looking at what was there before: seconds, with torch."""
    with collector_paused():
        gc.freeze()
        try:
            yield
        finally:
            gc.unfreeze()


def _taken_by_libraries(recorder: Recorder, kernels: Kernels, phase: Phase) -> set[int]:
    return {recorder.workspace(num_bytes, LIBRARY) for num_bytes in kernels.lasting_bytes().get(phase, ())}


@contextmanager
def _gradients_noted(model: torch.nn.Module, recorder: Recorder, gradients: dict[str, int]) -> Iterator[None]:
    """Note, while open, the block of each parameter's gradient when it is complete."""

    def noting(name: str) -> Callable[[torch.Tensor], None]:
        def note(parameter: torch.Tensor) -> None:
            assert parameter.grad is not None
            gradients[name] = recorder.block_of(parameter.grad)
            recorder.mark(GRADIENT, gradients[name])

        return note

    handles = [
        parameter.register_post_accumulate_grad_hook(noting(name))
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _categorised(events: list[Event], gradients: frozenset[int]) -> tuple[Event, ...]:
    """Return the events with categories that only the whole tape tells.

    What the forward made and freed again is temporary; what it left behind is an activation. In the backward pass what
    was made with gradients on is a recomputed activation, a parameter's gradient is one, and the rest is temporary.
    """
    middle = next((place for place, event in enumerate(events) if event == Mark(Phase.BACKWARD)), len(events))
    passing = {event.block for event in events[:middle] if isinstance(event, Free)}
    found: list[Event] = []
    for place, event in enumerate(events):
        if isinstance(event, Alloc):
            if event.block in gradients:
                event = event._replace(category=Category.GRADIENTS, kind=GRADIENTS)
            elif place < middle and event.block in passing:
                kind = PASSING if event.kind == LAYERS else event.kind
                event = event._replace(category=Category.TEMPORARIES, kind=kind)
        found.append(event)
    return tuple(found)


def _copied(events: list[Event], gradients: frozenset[int]) -> frozenset[int]:
    return frozenset(
        event.block
        for event in events
        if isinstance(event, Alloc) and event.block in gradients and event.kind == COPIED
    )
