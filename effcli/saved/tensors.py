"""The functions and names that pickles of tensors need, rewritten to build mapped tensors and check every number.

Their signatures are those of `torch._utils` (2.13), under whose names pickles ask for them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from effcli.saved.checks import RefusedPickleError, checked_size, numel_of
from effcli.saved.pickle_reader import Machine, Name
from effcli.saved.plain_values import NUMPY
from effcli.saved.stand_ins import stand_in

_MOST_NESTED = 64
"""Tensors within one of a subclass: the deepest is a quantised one, of three tensors, in a sharded one."""
_SPARSE = ("indices", "values")  # methods of every tensor, which nothing here calls
_STORAGE_TYPES = {
    "DoubleStorage": torch.float64, "FloatStorage": torch.float32, "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16, "LongStorage": torch.int64, "IntStorage": torch.int32,
    "ShortStorage": torch.int16, "CharStorage": torch.int8, "ByteStorage": torch.uint8, "BoolStorage": torch.bool,
    "ComplexDoubleStorage": torch.complex128, "ComplexFloatStorage": torch.complex64,
    "UntypedStorage": torch.uint8, "storage.UntypedStorage": torch.uint8,
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageType:
    """A class of storages, as a pickle names it; an untyped one counts in bytes."""

    dtype: torch.dtype


def _is_old(dtype: torch.dtype) -> bool:
    """Return whether it is a dtype of quantised tensors that torch has given up (`qint8`, ...)."""
    return str(dtype).startswith(("torch.qint", "torch.quint"))


CONSTANTS: dict[str, Any] = {
    **{str(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype) and not _is_old(dtype)},
    **{
        f"torch{device}.{name}": StorageType(dtype=dtype)
        for name, dtype in _STORAGE_TYPES.items()
        for device in ("", ".cuda")
    },
}
"""Name in a pickle -> its value: dtypes and classes of storages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedStorage:
    """A storage of a file, mapped, and the dtype under which a pickle refers to it."""

    storage: torch.UntypedStorage
    dtype: torch.dtype


class SavedTensor(torch.Tensor):
    """An instance of a tensor subclass that was not imported: its outer shape and dtype, and the tensors inside it.

    The name of its type is that of the class. Nothing can be computed with it.
    """

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        """Return the names of the attributes that hold tensors, as torch's wrapper subclasses do."""
        return list(vars(self)), None

    def __repr__(self) -> str:
        """Return class, shape and dtype."""
        return f"{type(self).__name__}(shape={tuple(self.shape)}, dtype={self.dtype})"

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Refuse: what the class would do is not known."""
        raise NotImplementedError(f"a saved {cls.__name__} is a description; nothing can be computed with it")


def saved_tensor(name: str, shape: tuple[int, ...], dtype: torch.dtype, inner: Mapping[str, torch.Tensor]) -> Any:
    """Return a stand-in for an instance of the tensor subclass `name` that holds the tensors `inner`."""
    numel_of(shape)
    if sum(map(_num_nested, inner.values())) > _MOST_NESTED:
        raise RefusedPickleError("it holds tensors within tensors, further than any class nests them")
    tensor = torch.Tensor._make_wrapper_subclass(stand_in(name, SavedTensor), shape, dtype=dtype, device="cpu")
    for key, value in inner.items():
        is_taken = key.startswith("__") or (hasattr(torch.Tensor, key) and key not in _SPARSE)
        vars(tensor)[f"of{key}" if is_taken else key] = value
    return tensor


def _num_nested(tensor: torch.Tensor) -> int:
    """Return how many tensors there are in one, with itself."""
    return 1 + sum(map(_num_nested, vars(tensor).values())) if isinstance(tensor, SavedTensor) else 1


def view(saved: Any, offset: Any, shape: Any, stride: Any, dtype: Any = None) -> torch.Tensor:
    """Return a tensor on a mapped storage.

    Raises:
        RefusedPickleError: it reaches behind the storage, or is none.
    """
    if not isinstance(saved, SavedStorage) or not isinstance(stride, tuple):
        raise RefusedPickleError("it holds a tensor without a storage")
    dtype = saved.dtype if dtype is None else dtype
    count = numel_of(shape)
    for number in (offset, *stride):
        checked_size(number)
    last = offset + sum((side - 1) * step for side, step in zip(shape, stride, strict=True)) if count else offset - 1
    if (last + 1) * dtype.itemsize > saved.storage.nbytes():
        raise RefusedPickleError("it holds a tensor that reaches behind its bytes")
    tensor = torch.empty(0, dtype=dtype, device=saved.storage.device)
    with torch.no_grad():
        tensor.set_(saved.storage, offset, shape, stride)
    return tensor


def _tensor_v2(saved: Any, offset: Any, shape: Any, stride: Any, *_: Any) -> torch.Tensor:
    return view(saved, offset, shape, stride)


def _tensor_v3(saved: Any, offset: Any, shape: Any, stride: Any, _grad: Any, _hooks: Any, dtype: Any, *_: Any) -> Any:
    if not isinstance(dtype, torch.dtype):
        raise RefusedPickleError("it holds a tensor without a dtype")
    return view(saved, offset, shape, stride, dtype)


def _meta_tensor(dtype: Any, shape: Any, stride: Any, *_: Any) -> torch.Tensor:
    numel_of(shape)
    return torch.empty_strided(shape, stride, dtype=dtype, device="meta")


def _layout(name: Any) -> str:
    if not isinstance(name, str):
        raise RefusedPickleError("its pickle is damaged")
    return name


def _sparse_tensor(layout: Any, data: Any) -> Any:
    """Return a stand-in for a sparse tensor: indices, values and shape by coordinates, else two kinds of indices."""
    names = ("indices", "values") if layout == "torch.sparse_coo" else ("compressed_indices", "plain_indices", "values")
    *parts, shape = data[: len(names) + 1]
    inner = {name: _checked(part) for name, part in zip(names, parts, strict=True)}
    return saved_tensor("torch.sparse", tuple(shape), inner["values"].dtype, inner)


def _checked(tensor: Any) -> torch.Tensor:
    if not isinstance(tensor, torch.Tensor):
        raise RefusedPickleError("it holds something that is no tensor where one belongs")
    return tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class _Wrapper:
    """What `_rebuild_wrapper_subclass` is given, until the attributes are known."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


def _wrapper(cls: Any, dtype: Any, shape: Any, *_: Any) -> _Wrapper:
    if not isinstance(cls, Name) or not isinstance(dtype, torch.dtype):
        raise RefusedPickleError("it holds a tensor of a class without a name")
    return _Wrapper(name=cls.text, dtype=dtype, shape=tuple(shape))


def tensor_functions(machine: Callable[[], Machine]) -> dict[str, Callable[..., Any]]:
    """Return the functions that pickles of tensors call, by name; `machine` returns the one that runs them."""

    def of_type(function: Any, _cls: Any, arguments: Any, state: Any) -> Any:
        """Return a tensor with attributes; for a wrapper those that are tensors are what it holds."""
        if not isinstance(arguments, tuple):
            raise RefusedPickleError("its pickle is damaged")
        made = machine().call(function, arguments)
        if not isinstance(made, _Wrapper):
            return _checked(made)
        parts = state if isinstance(state, tuple) and len(state) == 2 else (state,)
        attributes = {name: value for part in parts if isinstance(part, dict) for name, value in part.items()}
        inner = {
            name: value
            for name, value in attributes.items()
            if isinstance(name, str) and isinstance(value, torch.Tensor)
        }
        machine().meet(made.name)
        return saved_tensor(made.name, made.shape, made.dtype, inner)

    return {
        **NUMPY,
        "torch._utils._rebuild_tensor": _tensor_v2,
        "torch._utils._rebuild_tensor_v2": _tensor_v2,
        "torch._utils._rebuild_tensor_v3": _tensor_v3,
        "torch._utils._rebuild_parameter": lambda data, *_: _checked(data),
        "torch._utils._rebuild_parameter_with_state": lambda data, *_: _checked(data),
        "torch._utils._rebuild_device_tensor_from_cpu_tensor": lambda data, *_: _checked(data),
        "torch._utils._rebuild_meta_tensor_no_storage": _meta_tensor,
        "torch._utils._rebuild_sparse_tensor": _sparse_tensor,
        "torch._utils._rebuild_wrapper_subclass": _wrapper,
        "torch._tensor._rebuild_from_type_v2": of_type,
        "torch.serialization._get_layout": _layout,
    }
