"""What of a pickle is refused: the error, bounds on what it takes, checks of keys and numbers that it gives."""

from __future__ import annotations

import math
from typing import IO, Any

MAX_PICKLE_BYTES = 256 << 20
"""A larger pickle is not read: the one of a thousand parameters takes under a megabyte, tensors lie outside it."""

_BYTES_PER_ITEM = 64  # of a container
_MAX_KEY_PARTS = 64  # the hash of nested tuples recurses in C, and takes what they hold as often as they hold it
_MAX_KEY_LENGTH = 4096  # of the text in a nested key, which is written out where the key is shown
_MAX_DIMENSIONS = 64  # torch has no more
_TOO_LARGE = 1 << 62
"""What no length, offset or stride reaches: in bytes it would no longer fit 64 bits."""


class RefusedPickleError(Exception):
    """A pickle asks for something that is never done, or is no pickle; the text says what."""


class BoundedFile:
    """A file that reads no more at a time than a pickle may have in all, whatever length it claims."""

    def __init__(self, file: IO[bytes]) -> None:
        self.tell, self.readline, self._read = file.tell, file.readline, file.read

    def read(self, size: int) -> bytes:
        """Return up to `size` bytes."""
        if size > MAX_PICKLE_BYTES:
            raise RefusedPickleError("its pickle is damaged or far larger than that of any optimizer")
        return self._read(size)


def weight_of(argument: Any) -> int:
    """Return about how many bytes a copy of an argument takes."""
    if isinstance(argument, str | bytes):
        return len(argument)
    return _BYTES_PER_ITEM * len(argument) if isinstance(argument, list | tuple | dict | set | frozenset) else 0


def checked_key(key: Any) -> Any:
    """Return a key of a mapping, or an element of a set.

    Raises:
        RefusedPickleError: it is nested further than any real one.
    """
    waiting, num_parts, length = [key], 0, 0
    while waiting:
        part = waiting.pop()
        num_parts += 1
        if isinstance(part, tuple | frozenset):
            num_parts += len(part)
            waiting += part if num_parts <= _MAX_KEY_PARTS else ()
        elif part is not key and isinstance(part, str | bytes):
            length += len(part)
        if num_parts > _MAX_KEY_PARTS or length > _MAX_KEY_LENGTH:
            raise RefusedPickleError("a key in its pickle is nested too deeply")
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
