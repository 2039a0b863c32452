"""True storage behind tensors, and the tensors inside nested state. Needs torch."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch

_OPAQUE = (type, FunctionType, MethodType, ModuleType, torch.nn.Module, torch.optim.Optimizer)


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """One storage: what tells it from others, its bytes, and the dtype under which it was met.

    `handle` keeps the storage alive, so that no other one can take its address while it is being counted.
    """

    identity: Hashable
    num_bytes: int
    dtype: str
    handle: Any


def storages(tensor: torch.Tensor) -> Iterator[Storage]:
    """Yield the storages behind a tensor: whole ones also for a view, those of the inner tensors for a subclass.

    Wrapper subclasses (torchao, DTensor) are opened by `__tensor_flatten__`, sparse tensors into indices and values.
    """
    dtype = str(tensor.dtype).removeprefix("torch.")
    if type(tensor) is not torch.Tensor and hasattr(tensor, "__tensor_flatten__"):
        for name in tensor.__tensor_flatten__()[0]:
            yield from storages(getattr(tensor, name))
    elif tensor.layout is torch.sparse_coo:
        yield from storages(tensor._indices())
        yield from storages(tensor._values())
    else:
        storage = tensor.untyped_storage()
        yield Storage(identity=_identity(storage), num_bytes=storage.nbytes(), dtype=dtype, handle=storage)


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
    only once.
    """
    yield from _leaves(value, part, {})


def _leaves(value: Any, part: str, entered: dict[int, Any]) -> Iterator[tuple[str, torch.Tensor | int | float]]:
    if isinstance(value, torch.Tensor):
        yield part, value
    elif isinstance(value, bool):
        return
    elif isinstance(value, int | float):
        yield part, value
    elif id(value) in entered:
        return
    else:
        entered[id(value)] = value
        for name, inner in _children(value, part):
            yield from _leaves(inner, name, entered)


def _children(value: Any, part: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        yield from ((str(name), inner) for name, inner in value.items())
    elif isinstance(value, list | tuple | set | frozenset | deque):
        yield from ((part, inner) for inner in value)
    elif not isinstance(value, _OPAQUE):
        yield from getattr(value, "__dict__", {}).items()
        for slot in (name for cls in type(value).__mro__ for name in _slots(cls)):
            if hasattr(value, slot):
                yield slot, getattr(value, slot)


def _slots(cls: type) -> tuple[str, ...]:
    slots = cls.__dict__.get("__slots__", ())
    names = (slots,) if isinstance(slots, str) else slots
    return tuple(name for name in names if name not in ("__dict__", "__weakref__"))
