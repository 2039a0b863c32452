"""Operators on tensors without values, answered by shape alone: all that counting storages needs of their arithmetic.

A step calls the same few operators on the same few shapes thousands of times, and on the meta device many of them are
Python code that takes a millisecond (torch/_refs, 2.13).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum, auto
from functools import cache
from typing import Any

import torch

Shape = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]
"""Sizes, strides and dtype of a tensor."""


class _Effect(Enum):
    """What an operator does to storages, by its schema."""

    WRITES = auto()
    MAKES = auto()
    MAKES_EACH = auto()
    OTHER = auto()


class ByShape:
    """Runs an operator on meta tensors once for each combination of shapes.

    One that only writes to its arguments is not run at all. Views, and whatever works on tensors that have values, run
    as they are.
    """

    def __init__(self) -> None:
        self._made: dict[Any, Any] = {}

    def answer(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Return what the operator would."""
        effect = _effect(func)
        if effect is _Effect.OTHER or not args or not self.takes(_first(args)):
            return func(*args, **kwargs)
        if effect is _Effect.WRITES:
            return args[0] if func._schema.returns else None
        if effect is _Effect.MAKES_EACH:
            return [self._element(func, args, kwargs, place) for place in range(len(args[0]))]
        return self._remembered(func, args, kwargs)

    def takes(self, argument: Any) -> bool:
        """Return whether an operator with this first argument is answered by shape."""
        return isinstance(argument, torch.Tensor) and argument.is_meta

    def made(self, shape: Shape, argument: Any) -> torch.Tensor:
        """Return a new tensor of a shape, stride and dtype, of the kind that the argument is of."""
        return torch.empty_strided(shape[0], shape[1], dtype=shape[2], device="meta")

    def _like(self, shapes: Any, argument: Any) -> Any:
        if isinstance(shapes, list):
            return [self._like(item, argument) for item in shapes]
        return None if shapes is None else self.made(shapes, argument)

    def _element(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], place: int) -> torch.Tensor:
        """Return one element of what a foreach operator returns; it depends on what is at its place in the lists."""
        num = len(args[0])
        own = tuple(arg[place : place + 1] if isinstance(arg, list) and len(arg) == num else arg for arg in args)
        element: torch.Tensor = self._remembered(func, own, kwargs)[0]
        return element

    def _remembered(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        key = (func, _key(args), tuple((name, _key(value)) for name, value in kwargs.items()))
        if key in self._made:
            return self._like(self._made[key], _first(args))
        result = func(*args, **kwargs)
        self._made[key] = _shapes(result)
        return result


@cache
def _effect(func: Any) -> _Effect:
    schema = func._schema
    written = [argument for argument in schema.arguments if argument.alias_info and argument.alias_info.is_write]
    aliased = [value for value in schema.returns if value.alias_info]
    if written:
        # An `out` may be resized, and a tensor's own shape by an in-place view.
        keeps_shapes = not any(argument.kwarg_only for argument in written) and torch.Tag.inplace_view not in func.tags
        return _Effect.WRITES if keeps_shapes and len(aliased) == len(schema.returns) <= 1 else _Effect.OTHER
    kinds = {str(value.type) for value in schema.returns}
    if aliased or not kinds or not kinds <= {"Tensor", "List[Tensor]"}:
        return _Effect.OTHER
    return _Effect.MAKES_EACH if schema.name.startswith("aten::_foreach_") else _Effect.MAKES


def _first(args: Sequence[Any]) -> Any:
    """Return the first argument, or the first of a list."""
    return args[0][0] if isinstance(args[0], list | tuple) and args[0] else args[0]


def _key(value: Any) -> Any:
    """Return what of an argument a result's shape depends on: of a number with a fraction only that it is one."""
    if isinstance(value, torch.Tensor):
        return (value.shape, value.stride(), value.dtype, value.is_meta)
    if isinstance(value, list | tuple):
        return tuple(map(_key, value))
    return float if isinstance(value, float) else (type(value), value)


def _shapes(result: Any) -> Any:
    if result is None:  # a gradient that nobody needs
        return None
    if isinstance(result, torch.Tensor):
        return (result.shape, result.stride(), result.dtype)
    return [_shapes(item) for item in result]
