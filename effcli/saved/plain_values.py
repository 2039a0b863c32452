"""Plain values that pickles write as calls: containers, paths, bytes and NumPy's numbers."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np

from effcli.saved.checks import RefusedPickleError, checked_key

_DTYPE = re.compile(r"[<>|=]?[biufc]\d{1,2}|\?")


class SavedArray:
    """An array of NumPy, which no optimizer's state is made of: its values are not kept."""

    __slots__ = ()

    def take_pickled(self, state: Any) -> None:
        """Pass over the pickled state: version, shape, dtype, order and bytes."""


class SavedDtype:
    """A dtype of NumPy for numbers."""

    __slots__ = ("value",)

    def __init__(self, code: Any, *_: Any) -> None:
        if not isinstance(code, str) or not _DTYPE.fullmatch(code):
            raise RefusedPickleError("it holds NumPy values that are no numbers")
        self.value = np.dtype(code)

    def take_pickled(self, state: Any) -> None:
        """Take the pickled state, of which the byte order matters."""
        if state[1] in ("<", ">"):
            self.value = self.value.newbyteorder(state[1])


def _scalar(dtype: Any, raw: Any) -> Any:
    if not isinstance(dtype, SavedDtype) or not isinstance(raw, bytes):
        raise RefusedPickleError("it holds NumPy values that are no numbers")
    return np.frombuffer(raw, dtype.value, count=1)[0].item()


def _encoded(text: str, encoding: str) -> bytes:
    if encoding not in ("latin1", "latin-1"):
        raise RefusedPickleError("its pickle is damaged")
    return text.encode("latin-1")


def _mapping(items: Any = ()) -> dict[Any, Any]:
    pairs = items.items() if isinstance(items, dict) else items
    return {checked_key(key): value for key, value in pairs}


def _buffer(value: Any = b"", *_: Any) -> bytes:
    if isinstance(value, str):
        return value.encode("latin-1")
    if not isinstance(value, bytes | list):  # a number would ask for so many bytes
        raise RefusedPickleError("its pickle is damaged")
    return bytes(value)


def _tuple(value: Any = (), *_: Any) -> tuple[Any, ...]:
    if not isinstance(value, list | tuple):
        raise RefusedPickleError("its pickle is damaged")
    return tuple(value)


def _device(kind: Any = "", index: Any = None) -> str:
    if not isinstance(kind, str) or not isinstance(index, int | None):
        raise RefusedPickleError("its pickle is damaged")
    return kind if index is None else f"{kind}:{index}"


def _path(*parts: Any) -> str:
    if not all(isinstance(part, str) for part in parts):
        raise RefusedPickleError("its pickle is damaged")
    return "/".join(parts)


def _decimal(text: Any, *_: Any) -> str:
    if not isinstance(text, str):
        raise RefusedPickleError("its pickle is damaged")
    return text


def _moment(*_: Any) -> str:
    return "a date or time"


def _value_of_member(value: Any) -> Any:
    return value


def _module_names(name: str) -> tuple[str, str]:
    return f"numpy._core.multiarray.{name}", f"numpy.core.multiarray.{name}"  # NumPy 2 and 1


PLAIN: dict[str, Callable[..., Any]] = {
    "collections.OrderedDict": _mapping,
    "collections.Counter": _mapping,
    "collections.defaultdict": lambda *_: {},
    "collections.deque": lambda items=(), *_: list(_tuple(items)),
    "builtins.set": lambda items=(): {checked_key(item) for item in _tuple(items)},
    "builtins.frozenset": lambda items=(): frozenset(checked_key(item) for item in _tuple(items)),
    "builtins.tuple": _tuple,
    "builtins.complex": lambda real=0.0, imaginary=0.0: complex(real, imaginary),
    "builtins.bytearray": _buffer,
    "_codecs.encode": _encoded,
    **dict.fromkeys(("pathlib.PosixPath", "pathlib.WindowsPath", "pathlib.PurePosixPath"), _path),
    **dict.fromkeys(("datetime.datetime", "datetime.date", "datetime.timedelta"), _moment),
    "decimal.Decimal": _decimal,
    "torch.Size": _tuple,
    "torch.device": _device,
    "deepspeed.runtime.zero.config.ZeroStageEnum": _value_of_member,
    "torch.distributed.checkpoint.metadata._MEM_FORMAT_ENCODING": _value_of_member,
}
"""Name in a pickle -> what makes the plain value."""

NUMPY: dict[str, Callable[..., Any]] = {
    **PLAIN,
    "numpy.dtype": SavedDtype,
    **dict.fromkeys(_module_names("scalar"), _scalar),
    **dict.fromkeys(_module_names("_reconstruct"), lambda *_: SavedArray()),
    **dict.fromkeys(("numpy._core.numeric._frombuffer", "numpy.core.numeric._frombuffer"), lambda *_: SavedArray()),
}
"""`PLAIN` and NumPy's numbers and arrays."""
