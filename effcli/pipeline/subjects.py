"""Models as a `Predictor` takes them: of an estimate, and of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from effcli.memory.allocator import PlainAllocator
from effcli.memory.caching_allocator import CachingAllocator
from effcli.models.build import recompute_activations
from effcli.models.known import KnownModel, config_object
from effcli.models.shapes import changed_model
from effcli.pipeline.predicting import Subject, Target
from effcli.trace.cpu import CpuKernels
from effcli.trace.cuda import CudaKernels

if TYPE_CHECKING:
    import torch

    from effcli.estimate_spec import EstimateSpec
    from effcli.memory.cards import Card


def estimated(known: KnownModel, spec: EstimateSpec) -> Subject:
    """Return the model of an estimate as its settings change it."""
    config = config_object(known.name, known.config)

    def build(dtype: str, recompute: bool) -> torch.nn.Module:
        changed = changed_model(
            config, known.shapes.task, spec.model, dtype, name=known.name, num_labels=spec.model.num_labels
        )
        if recompute:
            recompute_activations(changed.model, known.name)
        return changed.model

    return Subject(build=build, config=config, task=known.shapes.task)


def target(device: str, card: Card | None) -> Target:
    """Return the device that is imitated; of a CUDA device without a name, one with flash attention and no Hopper."""
    if device == "cpu":
        return Target(device="cpu", kernels=CpuKernels(), allocator=PlainAllocator)
    kernels = CudaKernels() if card is None else CudaKernels(capability=card.capability)
    return Target(device="cuda", kernels=kernels, allocator=CachingAllocator)
