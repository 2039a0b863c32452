"""How long going through saved states would take: a small pickle can put one large value into many places."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from effcli.saved.stand_ins import SavedObject

_MOST_VALUES = 20_000_000


def is_endless(values: Iterable[Any]) -> bool:
    """Return whether there are more values in these, counted in each place again, than any optimizer has."""
    sizes: dict[int, int] = {}
    total = 0
    for value in values:
        total += _size(value, sizes)
        if total > _MOST_VALUES:
            return True
    return False


def _size(value: Any, sizes: dict[int, int]) -> int:
    """Return how many values there are in one, with itself; `sizes` has those that are known, by identity.

    A value that holds itself counts once.
    """
    waiting = [(value, False)]
    while waiting:
        item, is_entered = waiting.pop()
        if is_entered:
            sizes[id(item)] = min(1 + sum(sizes[id(inner)] for inner in _within(item)), _MOST_VALUES + 1)
        elif id(item) not in sizes:
            sizes[id(item)] = 1
            waiting.append((item, True))
            waiting += [(inner, False) for inner in _within(item)]
    return sizes[id(value)]


def _within(value: Any) -> Iterable[Any]:
    if isinstance(value, Mapping):
        return value.values()
    if isinstance(value, SavedObject):
        return vars(value).values()
    return value if isinstance(value, list | tuple | set | frozenset) else ()
