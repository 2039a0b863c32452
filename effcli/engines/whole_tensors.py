"""Whole tensors of what the processes of a run hold in shares, and shares of whole tensors.

What is saved is whole, so that it does not say how the run was spread, and any number of processes can go on from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, load_model, save_model
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard

from effcli.engines.flat_partitions import STEP, FlatPartitions
from effcli.errors import TrainingFailedError
from effcli.ranks.group import gathered, is_main, largest

SHARES = "shares of ranks"
"""Key of state in few bits that was cut: its value are the shares, in the order of the ranks."""


def is_sharded(model: torch.nn.Module) -> bool:
    """Return whether `fully_shard` spread the parameters over the processes, or DeepSpeed what the optimizer steps."""
    return isinstance(model, FSDPModule) or FlatPartitions.of(model) is not None


def reshard(model: torch.nn.Module) -> None:
    """Let go of the parameters that are still gathered, so that the next forward pass gathers them as they are then.

    Without a backward pass, as after an evaluation, `fully_shard` keeps those that belong to no layer (torch 2.13).
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def whole_weights(model: torch.nn.Module) -> dict[str, Any]:
    """Return the state dict of a model with whole tensors, which share their storage where parameters are tied.

    Collective for a sharded model: tensor by tensor goes to the host memory of rank 0, the other ranks get none.
    """
    if not is_sharded(model):
        return dict(model.state_dict())
    if partitions := FlatPartitions.of(model):
        return partitions.weights()
    values = model.state_dict(keep_vars=True)  # the parameters themselves, so that tied ones are known
    wholes = {id(value): _on_main(value) for value in values.values()}
    return {name: wholes[id(value)] for name, value in values.items()}


def save_weights(weights: Mapping[str, Any], path: Path) -> None:
    """Write what `whole_weights` returned to a file, each storage once."""
    save_model(_Holder(weights), str(path))  # which asks for the state dict alone


class _Holder:
    """What `save_model` takes for a model."""

    def __init__(self, weights: Mapping[str, Any]) -> None:
        self._weights = weights

    def state_dict(self) -> dict[str, Any]:
        return dict(self._weights)


def load_weights(model: torch.nn.Module, path: Path) -> None:
    """Load a file of `save_weights`, of which each process takes its shares; nothing is exchanged.

    Raises:
        RuntimeError: names or shapes are not those of the model.
    """
    if not is_sharded(model):
        load_model(model, str(path))
        return
    if partitions := FlatPartitions.of(model):
        partitions.load_weights(load_file(str(path)))
        return
    values = model.state_dict(keep_vars=True)
    with safe_open(str(path), framework="pt") as file, torch.no_grad():
        names = set(file.keys())
        loaded = {id(value) for name, value in values.items() if name in names}
        if not names <= set(values) or any(id(value) not in loaded for value in values.values()):
            raise RuntimeError("the names of the weights are not those of the model")
        for name in names:
            value, saved = values[name], file.get_slice(name)
            if tuple(saved.get_shape()) != tuple(value.shape):
                raise RuntimeError(f"{name} has another shape")
            mine = value.to_local() if isinstance(value, DTensor) else value
            mine.copy_(saved[_rows(value)] if isinstance(value, DTensor) else file.get_tensor(name))


def whole_state(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the state dict of an optimizer with whole tensors.

    Collective where it steps sharded parameters: tensor by tensor goes to the host memory of rank 0. What is no share
    is that of this process; every one holds the same. State in few bits, whose blocks end with each share, cannot be
    put together, and is kept as a list of the shares under `SHARES`.

    Raises:
        TrainingFailedError: state is sharded that has not the shape of its parameter.
    """
    if partitions := FlatPartitions.of(optimizer):
        return partitions.state()
    state: dict[str, Any] = optimizer.state_dict()
    parameters = _parameters(optimizer)
    if not any(isinstance(parameter, DTensor) for parameter in parameters):
        return state
    tensors = [value for entries in optimizer.state.values() for value in entries.values()]
    (packed,) = largest([any(isinstance(value, DTensor) and _is_packed(value.to_local()) for value in tensors)])
    entries_of = {
        index: {key: _whole_entry(value, parameters[index], packed=bool(packed)) for key, value in entries.items()}
        for index, entries in state["state"].items()
    }
    return {**state, "state": entries_of}


def _whole_entry(value: Any, parameter: torch.Tensor, *, packed: bool) -> Any:
    """Return what rank 0 writes of an entry of state, None elsewhere for a tensor; collective, see `whole_state`.

    Raises:
        TrainingFailedError: it is sharded and has not the shape of its parameter.
    """
    if not isinstance(value, DTensor):
        return _on_main(value)
    if value.shape != parameter.shape:
        raise TrainingFailedError(
            "the optimizer shards state of another shape than its parameter, from which no run could go on; use "
            "--shard ddp"
        )
    if not packed:
        return _on_main(value)
    written = BytesIO()
    torch.save(value.detach().to_local().to("cpu", copy=True), written)  # pickle alone knows no fp8 (torch 2.13)
    of_all = gathered(written.getvalue())
    if not is_main():
        return None
    shares = [torch.load(BytesIO(of_one), weights_only=True) for of_one in of_all]
    return {SHARES: shares} if any(map(_is_packed, shares)) else torch.cat(shares)


def load_state(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    """Load what `whole_state` returned, of which each process takes its shares, each tensor in its dtype.

    torch gives state the dtype of its parameter, by which the fp32 factors of transformers' Adafactor over bf16
    weights would lose bits (torch 2.13).

    Raises:
        RuntimeError: shares in few bits of as many processes as there were cannot be made into others.
    """
    if partitions := FlatPartitions.of(optimizer):
        partitions.load_state(saved)
        return
    parameters, states = _parameters(optimizer), saved["state"]
    uncut = {
        index: {key: value for key, value in entries.items() if not _is_cut(key, value, parameters[index])}
        for index, entries in states.items()
    }
    optimizer.load_state_dict({**saved, "state": uncut})
    for index, entries in states.items():
        parameter = parameters[index]
        loaded = optimizer.state[parameter]
        for key, value in entries.items():
            if key not in uncut[index]:
                with torch.no_grad():
                    loaded[key] = _share(value, parameter, optimizer)
                continue
            if key not in loaded:  # bitsandbytes has unpacked what it wraps its tensors in (0.50)
                continue
            now = loaded.pop(key)  # put back, so that the keys come in the order in which they were saved
            is_cast = isinstance(now, torch.Tensor) and isinstance(value, torch.Tensor) and now.dtype != value.dtype
            loaded[key] = value.to(now.device) if is_cast else now


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _is_packed(value: Any) -> bool:
    """Return whether a tensor is one of torchao's, of codes and their scales."""
    return isinstance(value, torch.Tensor) and type(value) not in (torch.Tensor, torch.nn.Parameter, DTensor)


def _is_cut(key: str, value: Any, parameter: torch.Tensor) -> bool:
    """Return whether a saved value is to be cut into shares, or was."""
    if isinstance(value, dict) and SHARES in value:
        return True
    is_tensor = isinstance(parameter, DTensor) and isinstance(value, torch.Tensor)
    return is_tensor and key != STEP and value.shape == parameter.shape


def _on_main(value: Any) -> Any:
    """Return a value that rank 0 can write, with the whole tensor of a share; None elsewhere for a tensor."""
    if not isinstance(value, torch.Tensor):
        return value
    value = value.detach()
    if isinstance(value, DTensor):
        value = value.full_tensor()
    return value.to("cpu", copy=True) if is_main() else None  # a view into what was gathered with its padding


def _share(value: Any, parameter: torch.Tensor, optimizer: torch.optim.Optimizer) -> torch.Tensor:
    """Return this process's state of a parameter, made of the whole or of all shares.

    Raises:
        RuntimeError: shares in few bits cannot be cut otherwise.
    """
    shares = value[SHARES] if isinstance(value, dict) else [value]
    sharded = isinstance(parameter, DTensor)
    if isinstance(value, dict) and sharded and len(shares) == parameter.device_mesh.size():
        return _placed(shares[parameter.device_mesh.get_local_rank()], parameter)
    held = _rows(parameter) if isinstance(parameter, DTensor) else slice(None)
    if not any(map(_is_packed, shares)):
        return _placed(torch.cat(shares)[held].clone(), parameter)
    if not hasattr(optimizer, "_new_buffer"):
        raise RuntimeError(f"its state in few bits is that of {len(shares)} processes, and cannot be cut otherwise")
    signed = getattr(next(filter(_is_packed, shares)), "signed", True)  # fp8 has its sign in every code
    state: torch.Tensor = optimizer._new_buffer(parameter, signed)  # of torchao, which knows where it packs
    mine = state.to_local() if isinstance(state, DTensor) else state
    if not _copy_codes(shares, mine, parameter[0].numel() * (held.start or 0)):
        whole = torch.cat([share.dequantize() if _is_packed(share) else share for share in shares])
        mine.copy_(whole[held].to(mine.device))  # packed anew, in other blocks
    return state


def _copy_codes(shares: list[Any], mine: Any, first: int) -> bool:
    """Copy codes and scales from element `first` on; return whether that is possible, since all blocks are the same."""
    if not all(map(_is_packed, [*shares, mine])) or first % mine.block_size:
        return False
    for values, each in (("codes", mine.numel() // mine.codes.numel()), ("scale", mine.block_size)):
        whole = torch.cat([getattr(share, values).flatten() for share in shares])
        target = getattr(mine, values)
        target.copy_(whole[first // each : (first + mine.numel()) // each].view_as(target))
    return True


def _placed(mine: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Return this process's share as one of a tensor like the parameter, on its device."""
    mine = mine.to(parameter.device)
    if not isinstance(parameter, DTensor):
        return mine
    return DTensor.from_local(
        mine,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def _rows(value: DTensor) -> slice:
    """Return which rows of dimension 0 this process holds: ceil(rows / processes) each, the last ones what is left."""
    assert value.placements == (Shard(0),), value.placements
    each = -(-value.shape[0] // value.device_mesh.size())
    first = min(each * value.device_mesh.get_local_rank(), value.shape[0])
    return slice(first, first + value.to_local().shape[0])
