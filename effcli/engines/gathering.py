"""Whole tensors of what the processes of a run hold in shares, and shares of whole tensors.

What is saved is whole, so that it does not say how the run was spread, and any number of processes can go on from it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_model, save_model
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard

from effcli.ranks.group import is_main

STEP = "step"
"""Key of a count in the state of a parameter, which every process holds: a tensor of one element is no share then."""


def is_sharded(model: torch.nn.Module) -> bool:
    """Return whether `fully_shard` spread the parameters over the processes."""
    return isinstance(model, FSDPModule)


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
    values = model.state_dict(keep_vars=True)  # the parameters themselves, so that tied ones are known
    gathered = {id(value): _on_main(value) for value in values.values()}
    return {name: gathered[id(value)] for name, value in values.items()}


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
    is that of this process; every one holds the same.
    """
    state: dict[str, Any] = optimizer.state_dict()
    return _changed(state, _on_main) if _steps_shares(optimizer) else state


def load_state(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    """Load what `whole_state` returned, of which each process takes its shares, each tensor in its dtype.

    torch gives state the dtype of its parameter, by which the fp32 factors of transformers' Adafactor over bf16
    weights would lose bits (torch 2.13).
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    shares = {
        index: {key: _share(value, parameters[index]) if key != STEP else value for key, value in entries.items()}
        for index, entries in saved["state"].items()
    }
    optimizer.load_state_dict({**saved, "state": shares})
    for index, entries in shares.items():
        state = optimizer.state[parameters[index]]
        for key, value in entries.items():
            loaded = state.get(key)
            if isinstance(loaded, torch.Tensor) and isinstance(value, torch.Tensor) and loaded.dtype != value.dtype:
                state[key] = value.to(loaded.device)


def _steps_shares(optimizer: torch.optim.Optimizer) -> bool:
    return any(isinstance(parameter, DTensor) for group in optimizer.param_groups for parameter in group["params"])


def _on_main(value: Any) -> Any:
    """Return a value that rank 0 can write, with the whole tensor of a share; None elsewhere for a tensor."""
    if not isinstance(value, torch.Tensor):
        return value
    value = value.detach()
    if isinstance(value, DTensor):
        value = value.full_tensor()
    return value.to("cpu", copy=True) if is_main() else None  # a view into what was gathered with its padding


def _share(value: Any, parameter: torch.Tensor) -> Any:
    """Return this process's share of a tensor that has an element for each one of a sharded parameter."""
    if not (isinstance(parameter, DTensor) and isinstance(value, torch.Tensor) and value.shape == parameter.shape):
        return value
    return DTensor.from_local(
        value[_rows(parameter)].clone().to(parameter.device),
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


def _changed(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return nested dictionaries and sequences with every leaf changed, in their order, the same in all processes."""
    if isinstance(value, Mapping):
        return {key: _changed(inner, change) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_changed(inner, change) for inner in value)
    return change(value)


def fingerprints(model: torch.nn.Module) -> Iterator[tuple[str, int]]:
    """Yield the name of each parameter and a number that its bits decide: their sum, as integers."""
    names, sums = [], []
    for name, parameter in model.named_parameters():
        bits = parameter.detach().contiguous().flatten().view(_INTEGERS[parameter.element_size()])
        names.append(name)
        sums.append(bits.sum(dtype=torch.int64))
    yield from zip(names, torch.stack(sums).tolist() if sums else [], strict=True)


_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers that are as wide as an element."""
