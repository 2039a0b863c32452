"""What of a pickle is refused: the error, and checks of keys and numbers that it gives."""

from __future__ import annotations

import math
from typing import Any

_MAX_KEY_DEPTH = 8  # the hash of nested tuples recurses in C, without a check
_MAX_DIMENSIONS = 64  # torch has no more
_TOO_LARGE = 1 << 62
"""What no length, offset or stride reaches: in bytes it would no longer fit 64 bits."""


class RefusedPickleError(Exception):
    """A pickle asks for something that is never done, or is no pickle; the text says what."""


def checked_key(key: Any, depth: int = 0) -> Any:
    """Return a key of a mapping.

    Raises:
        RefusedPickleError: it is nested deeper than any real one.
    """
    if isinstance(key, tuple):
        if depth > _MAX_KEY_DEPTH:
            raise RefusedPickleError("a key in its pickle is nested too deeply")
        for part in key:
            checked_key(part, depth + 1)
    return key


def checked_size(number: Any) -> int:
    """Return a length, an offset or a stride.

    Raises:
        RefusedPickleError: it is no whole number, negative, or larger than that of any tensor.
    """
    if type(number) is not int or not 0 <= number < _TOO_LARGE:
        raise RefusedPickleError("it holds a tensor of an impossible shape")
    return number


def numel_of(shape: Any) -> int:
    """Return the number of elements of a shape.

    Raises:
        RefusedPickleError: it is no shape, or one that no tensor can have.
    """
    if not isinstance(shape, tuple) or len(shape) > _MAX_DIMENSIONS:
        raise RefusedPickleError("it holds a tensor of an impossible shape")
    return checked_size(math.prod(map(checked_size, shape)))
