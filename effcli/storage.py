"""True storage behind tensors, and the tensors inside nested state. Needs torch."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from types import FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any

import torch

_OPAQUE = (type, FunctionType, MethodType, ModuleType, torch.nn.Module, torch.optim.Optimizer)
_BY_ROW = (torch.sparse_csr, torch.sparse_bsr)
_BY_COLUMN = (torch.sparse_csc, torch.sparse_bsc)


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """One storage: what tells it from others, its bytes, the dtype under which it was met, and its device type.

    `part` is the attribute of a tensor subclass that holds it, empty for a plain tensor. `handle` keeps the storage
    alive, so that no other one can take its address while it is being counted.
    """

    identity: Hashable
    num_bytes: int
    dtype: str
    device: str
    part: str
    handle: Any


def storages(tensor: torch.Tensor, part: str = "") -> Iterator[Storage]:
    """Yield the storages behind a tensor: whole ones also for a view, those of the inner tensors for a subclass.

    Wrapper subclasses (torchao, DTensor) are opened by `__tensor_flatten__`, sparse tensors into indices and values. A
    tensor that shows no storage (MKL-DNN's layout) takes the bytes of its elements.
    """
    if type(tensor) is not torch.Tensor and hasattr(tensor, "__tensor_flatten__"):
        parts = {name: getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]}
        inner = {name: held for name, held in parts.items() if isinstance(held, torch.Tensor)}  # not DTensor's mesh
    else:
        inner = {name: read() for name, read in _sparse_parts(tensor).items()}
    if inner:
        for name, held in inner.items():
            yield from storages(held, name)
        return
    try:
        handle: Any = tensor.untyped_storage()
        identity, num_bytes = _identity(handle), handle.nbytes()
    except NotImplementedError:
        handle, identity, num_bytes = tensor, ("object", id(tensor)), tensor.numel() * tensor.element_size()
    yield Storage(
        identity=identity,
        num_bytes=num_bytes,
        dtype=str(tensor.dtype).removeprefix("torch."),
        device=tensor.device.type,
        part=part,
        handle=handle,
    )


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return what this process holds of a tensor: of one that is divided among processes (DTensor) its shard."""
    to_local = getattr(tensor, "to_local", None)
    return tensor if to_local is None else to_local()


def _sparse_parts(tensor: torch.Tensor) -> dict[str, Callable[[], torch.Tensor]]:
    if tensor.layout is torch.sparse_coo:
        return {"indices": tensor._indices, "values": tensor._values}
    if tensor.layout in _BY_ROW:
        return {"crow_indices": tensor.crow_indices, "col_indices": tensor.col_indices, "values": tensor.values}
    if tensor.layout in _BY_COLUMN:
        return {"ccol_indices": tensor.ccol_indices, "row_indices": tensor.row_indices, "values": tensor.values}
    return {}


def _identity(storage: torch.UntypedStorage) -> Hashable:
    """Return the address of the bytes, or that of the storage object where there are none.

    On the meta device, which fake tensors sit on too, all data pointers are alike.
    """
    if storage.device.type == "meta" or storage.nbytes() == 0:
        return ("object", storage._cdata)
    return (str(storage.device), storage.data_ptr())


def leaves(value: Any, part: str) -> Iterator[tuple[str, torch.Tensor | int | float]]:
    """Yield the tensors and numbers inside nested mappings, sequences and plain objects, each with its innermost name.

    `part` is the name of `value` itself. Modules, optimizers, classes and functions are not entered, and each object
    only once; of objects only what they store is read, so that no property runs. NumPy arrays are passed over.
    """
    entered: dict[int, Any] = {}
    waiting = [(part, value)]
    while waiting:
        name, item = waiting.pop()
        if isinstance(item, torch.Tensor) or (isinstance(item, int | float) and not isinstance(item, bool)):
            yield name, item
        elif id(item) not in entered:
            entered[id(item)] = item  # kept, so that no other object can take its id
            waiting += reversed(list(_children(item, name)))


def label(key: Any, otherwise: str) -> str:
    """Return a key of a mapping as a name; a tensor, whose text would be its values, is named `otherwise`."""
    return otherwise if isinstance(key, torch.Tensor) else str(key)


def _children(value: Any, part: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        yield from ((label(key, part), inner) for key, inner in value.items())
    elif isinstance(value, list | tuple | set | frozenset | deque):
        yield from ((part, inner) for inner in value)
    elif not isinstance(value, _OPAQUE):
        yield from _attributes(value)


def _attributes(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield what an instance stores in its dict and its slots; no code of its class runs."""
    with suppress(AttributeError):
        yield from object.__getattribute__(value, "__dict__").items()
    for cls in type(value).__mro__:
        for name, slot in vars(cls).items():
            if isinstance(slot, MemberDescriptorType):
                with suppress(AttributeError):  # not set
                    yield name, slot.__get__(value)
