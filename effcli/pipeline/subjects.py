"""Models as a `Predictor` takes them: of an estimate, and of a run."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from effcli.devices import weights_dtype
from effcli.memory.allocator import PlainAllocator
from effcli.memory.caching_allocator import CachingAllocator
from effcli.models.build import recompute_activations
from effcli.models.known import KnownModel
from effcli.models.kv_cache import leave_out_kv_cache
from effcli.models.lora import plain_model
from effcli.models.shapes import changed_model
from effcli.models.tasks import head_for
from effcli.pipeline.build import Built, build
from effcli.pipeline.predicting import Subject, Target
from effcli.trace.cpu import CpuKernels
from effcli.trace.cuda import CudaKernels
from effcli.trace.cuda_attention import Capability

if TYPE_CHECKING:
    import torch

    from effcli.estimate_spec import EstimateSpec
    from effcli.optim.entry import Hyper
    from effcli.pipeline.prepare import Prepared


def estimated(known: KnownModel, spec: EstimateSpec) -> Subject:
    """Return the model of an estimate as its settings change it."""
    config, task = known.config_object(), known.shapes.task

    def build(dtype: str, recompute: bool) -> torch.nn.Module:
        changed = changed_model(config, task, spec.model, dtype, name=known.name, num_labels=spec.model.num_labels)
        if recompute:
            recompute_activations(changed.model, known.name)
        return _without_kv_cache(changed.model)

    can_recompute = head_for(task).model_class(config).supports_gradient_checkpointing
    return Subject(build=build, config=config, task=task, can_recompute=can_recompute)


def prepared_run(prepared: Prepared) -> tuple[Subject, Hyper]:
    """Return the model of a run, and its hyperparameters with what the model adds to them."""
    spec = prepared.spec

    def built(dtype: str, recompute: bool) -> Built:
        precision = "bf16-pure" if dtype == "bfloat16" else "fp32"
        loop = spec.loop.model_copy(update={"precision": precision, "gradient_checkpointing": recompute})
        return build(replace(prepared, spec=spec.model_copy(update={"loop": loop})), meta=True)

    asked = (weights_dtype(spec.loop.precision), spec.loop.gradient_checkpointing)
    first = built(*asked)
    unused = {asked: first.model}  # who asks for a model changes it, so this one serves once

    def build_or_take(dtype: str, recompute: bool) -> torch.nn.Module:
        model = unused.pop((dtype, recompute), None)
        return _without_kv_cache(built(dtype, recompute).model if model is None else model)

    subject = Subject(
        build=build_or_take,
        config=prepared.source.config,
        task=prepared.problem.objective,
        can_recompute=plain_model(first.model).supports_gradient_checkpointing,
    )
    return subject, first.hyper


def _without_kv_cache(model: torch.nn.Module) -> torch.nn.Module:
    """Return the model, which is not to return keys and values: the engines never let it."""
    leave_out_kv_cache(model)
    return model


def target(device: str, capability: Capability | None = None) -> Target:
    """Return the device that is imitated; a CUDA device of unknown capability has flash attention and is no Hopper."""
    if device == "cpu":
        return Target(device="cpu", kernels=CpuKernels(), allocator=PlainAllocator)
    kernels = CudaKernels() if capability is None else CudaKernels(capability=capability)
    return Target(device="cuda", kernels=kernels, allocator=CachingAllocator)


def present(device: torch.device) -> Target:
    """Return the device that a run is on."""
    import torch

    return target(device.type, torch.cuda.get_device_capability(device) if device.type == "cuda" else None)
