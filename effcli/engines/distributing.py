"""A model spread over the processes of a run, by torch's own means, and the proof that it is."""

from __future__ import annotations

import warnings
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers.modeling_layers import GradientCheckpointingLayer

from effcli.engines.base import Loop
from effcli.errors import DeviceError, UsageError
from effcli.ranks.group import world_size


def replica_settings(loop: Loop) -> dict[str, Any]:
    """Return the keyword arguments of `DistributedDataParallel`, the same in every engine.

    Gradients are views into the buckets that are exchanged, so that these take nothing beside them. Parameters without
    gradient, such as a pooler's that does not run, are looked for only where there may be some.
    """
    return {"gradient_as_bucket_view": True, "find_unused_parameters": loop.may_lack_gradients}


def shard(model: torch.nn.Module, device: torch.device) -> None:
    """Shard the parameters over all processes in place, layer by layer, and what is no layer as one (FSDP2).

    Every parameter becomes a `DTensor` on `device`, which holds rows of dimension 0. Call it before the optimizer is
    made: it must step these.

    Raises:
        UsageError: a parameter has no dimension, which `fully_shard` cannot divide (torch 2.13).
        DeviceError: a parameter was not sharded.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    scalars = [name for name, parameter in model.named_parameters() if not parameter.dim()]
    if scalars:
        raise UsageError(f"--shard fsdp: {scalars[0]} has no dimension that could be divided; use --shard ddp")
    # T5's family returns views of its position biases, to which it then adds out of place (transformers 5.24).
    warnings.filterwarnings("ignore", message=r"FSDP2-wrapped module \(FSDP\w*T5Block\) returned a view")
    mesh = init_device_mesh(device.type, (world_size(),))
    for layer in layers_of(model):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    check_sharded(model)


def layers_of(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the repeated layers of a transformers model, each of which is gathered as one."""
    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


def check_sharded(model: torch.nn.Module) -> None:
    """Prove that every parameter is divided among all processes.

    Raises:
        DeviceError: one is not: each process would train a copy of its own.
    """
    for name, parameter in model.named_parameters():
        if not isinstance(parameter, DTensor) or parameter.device_mesh.size() != world_size():
            raise DeviceError(
                f"--shard fsdp: {name} is not sharded over the {world_size()} processes, which would train copies; "
                "use --engine pytorch, or --shard ddp"
            )


def replicated(model: torch.nn.Module, loop: Loop) -> torch.nn.Module:
    """Return what runs forward and backward: a replica whose gradients are averaged over all processes, or the model.

    Parameters stay what they are.
    """
    if world_size() == 1 or loop.shard != "ddp":
        return model
    where = [loop.device] if loop.device.type == "cuda" else None
    return DistributedDataParallel(model, device_ids=where, **replica_settings(loop))


def exchanging(model: torch.nn.Module, *, is_last: bool) -> AbstractContextManager[Any]:
    """Return the surroundings of a micro-batch: replicas exchange gradients in the last of a window alone.

    A shard exchanges them in each one, because holding them back would mean to hold all of them (FSDP2).
    """
    if is_last or not isinstance(model, DistributedDataParallel):
        return nullcontext()
    synchronised: AbstractContextManager[Any] = model.no_sync()
    return synchronised


def whole(value: torch.Tensor) -> torch.Tensor:
    """Return a tensor with what all processes hold of it; collective for a `DTensor`."""
    return value.full_tensor() if isinstance(value, DTensor) else value
