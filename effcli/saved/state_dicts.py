"""Finds optimizers inside what a file holds, and gives their states labels and plain groups."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import torch

from effcli.errors import DataError
from effcli.saved.effort import is_endless
from effcli.saved.optimizer import READ
from effcli.saved.plain_values import SavedArray
from effcli.saved.safe_text import safe
from effcli.units import count, listed

_DEPTH = 5
_MOST_VALUES = 1_000_000  # of all groups' settings; a list that stands in many places counts in each
_MOST_PARAMETERS = 4_000_000
PART = "::"
"""Between a path and the dotted key of one of several optimizers in the file."""
_WRAPPED = "base_optimizer"
"""Key under which wrappers such as Lookahead save the optimizer inside (pytorch_optimizer 4.1)."""
_NAMES = ("param_names", "names")
"""Keys of a group that hold its parameters' names: torch's own (2.6 and later), and effcli's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundState:
    """A mapping with `state` and `param_groups`, and the keys that lead to it.

    `wrapped_in` are states of an optimizer around it, by number of the group and of the parameter in it.
    """

    keys: tuple[str, ...]
    state_dict: Mapping[Any, Any]
    wrapped_in: tuple[Mapping[tuple[int, int], Any], ...] = ()


def find_optimizers(value: Any) -> list[FoundState]:
    """Return the optimizers inside nested mappings and lists, outermost first."""
    return list(_search(value, (), set()))


def _search(value: Any, keys: tuple[str, ...], seen: set[int]) -> Iterator[FoundState]:
    if id(value) in seen:
        return
    seen.add(id(value))
    own: tuple[str, ...] = ()
    if isinstance(value, Mapping) and is_optimizer(value):
        yield FoundState(keys=keys, state_dict=value)
        own = ("state", "param_groups")
    if len(keys) >= _DEPTH:
        return
    items = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list | tuple) else ()
    for key, inner in items:
        if isinstance(inner, Mapping | list | tuple) and key not in own:
            for found in _search(inner, (*keys, safe(str(key))), seen):
                yield (
                    replace(found, wrapped_in=_around(value))
                    if key == _WRAPPED and inner is found.state_dict
                    else found
                )


def _around(value: Mapping[Any, Any]) -> tuple[Mapping[tuple[int, int], Any], ...]:
    """Return the states that a wrapper keeps beside what it wraps."""
    return tuple(
        held for held in value.values() if isinstance(held, Mapping) and held and all(_is_position(key) for key in held)
    )


def _is_position(key: Any) -> bool:
    return isinstance(key, tuple) and len(key) == 2 and all(type(number) is int for number in key)


def is_optimizer(value: Mapping[Any, Any]) -> bool:
    """Return whether a mapping is the `state_dict` of an optimizer."""
    groups = value.get("param_groups")
    return isinstance(value.get("state"), Mapping) and isinstance(groups, list | tuple)


def choose(found: list[FoundState], wanted: str | None, what: str, value: Any) -> tuple[FoundState, tuple[str, ...]]:
    """Return the optimizer to take, and a note where there are others; `wanted` is the dotted key of one.

    Raises:
        DataError: there is none, or none under that key.
    """
    if not found:
        raise DataError(f"{what} holds no optimizer state: {held_instead(value)}; give {READ}")
    names = [".".join(each.keys) for each in found]
    if wanted is not None:
        if wanted not in names:
            raise DataError(f"{what} holds no optimizer under '{safe(wanted)}'; it has {_quoted(names)}")
        return found[names.index(wanted)], ()
    if len(found) == 1:
        return found[0], ()
    others = f"Add '{PART}{safe(names[1], 200)}' to the path for another."
    return found[0], (f"It holds {len(found)} optimizers: {_quoted(names)}; this is the first. {others}",)


def _quoted(names: list[str]) -> str:
    return listed([f"'{safe(name)}'" if name else "one at its top" for name in names], 6)


def held_instead(value: Any) -> str:
    """Return in words what a file holds that is no optimizer."""
    if isinstance(value, torch.Tensor):
        return "it is a tensor"
    if not isinstance(value, Mapping):
        return f"it is {'a list' if isinstance(value, list | tuple) else 'an object'} of something else"
    tensors = sum(isinstance(inner, torch.Tensor) for inner in value.values())
    if tensors and tensors * 2 >= len(value):
        return f"it holds weights, {count(tensors, 'tensor')}"
    keys = [f"'{safe(str(key), 30)}'" for key in list(value)[:64] if isinstance(key, str | int)]
    return f"its keys are {listed(keys, 6)}" if keys else "it is empty"


@dataclass(frozen=True, slots=True, kw_only=True)
class Labelled:
    """States by label, groups without `params`, the labels of each group, and whether they are names."""

    states: dict[str, dict[str, Any]]
    groups: tuple[dict[str, Any], ...]
    members: tuple[tuple[str, ...], ...]
    names_known: bool


def labelled(found: FoundState, what: str) -> Labelled:
    """Return the states of a `state_dict` by the names of their parameters, or by their numbers.

    Names come from the groups' `param_names` or `names`, or are the keys themselves, as `get_optimizer_state_dict`
    writes them.

    Raises:
        DataError: its groups are none, or it would take too long.
    """
    groups: list[Mapping[Any, Any]] = list(found.state_dict["param_groups"])
    if not all(isinstance(group, Mapping) and isinstance(group.get("params", []), list | tuple) for group in groups):
        raise DataError(f"{what} is damaged: its param_groups are no groups of parameters")
    if sum(len(group.get("params", ())) for group in groups) > _MOST_PARAMETERS:
        raise DataError(f"{what} is damaged: its param_groups have more parameters than any model")
    names: dict[Any, str] = {}
    members: list[tuple[str, ...]] = []
    known = bool(groups)
    for group in groups:
        params = [key for key in group.get("params", []) if isinstance(key, str | int)]
        given = next((group[key] for key in _NAMES if _are_names(group.get(key), len(params))), None)
        known = known and (given is not None or all(isinstance(key, str) for key in params))
        labels = given if given is not None else [str(key) for key in params]
        names.update(zip(params, labels, strict=True))
        members.append(tuple(labels))
    if len(set(names.values())) < len(names):  # names that tell nothing apart
        names, known = {key: str(key) for key in names}, False
        members = [tuple(str(key) for key in group.get("params", [])) for group in groups]
    states = _states(found, names, members)
    if is_endless(states.values()):
        raise DataError(f"{what} was not read: going through its states would take far longer than its size")
    return Labelled(
        states=states,
        groups=plain_groups(groups),
        members=tuple(members),
        names_known=known,
    )


def _are_names(value: Any, length: int) -> bool:
    return isinstance(value, list) and len(value) == length and all(isinstance(name, str) for name in value)


def _states(found: FoundState, names: Mapping[Any, str], members: list[tuple[str, ...]]) -> dict[str, dict[str, Any]]:
    """Return the states by label; what belongs to the whole optimizer is under its own key, as in a live one."""
    states: dict[str, dict[str, Any]] = {}
    for key, own in found.state_dict["state"].items():
        name = names.get(key) if isinstance(key, str | int) else None
        label = name if name is not None else str(key) if isinstance(key, str | int) else "other"
        _put(states, label, own)
    for around in found.wrapped_in:
        for (group, position), own in around.items():
            known = 0 <= group < len(members) and 0 <= position < len(members[group])
            _put(states, members[group][position] if known else "other", own)
    return states


def _put(states: dict[str, dict[str, Any]], label: str, own: Any) -> None:
    """Add what one state holds to a label; where a key has a value already, both are kept."""
    held = states.setdefault(label, {})
    for key, value in own.items() if isinstance(own, Mapping) else ((label, own),):
        held[key] = [held[key], value] if key in held else value


def plain_groups(groups: Sequence[Mapping[Any, Any]]) -> tuple[dict[str, Any], ...]:
    """Return the settings of groups as plain values: without parameters and their names."""
    plain = _PlainValues()
    return tuple(
        {
            key: plain.of(value)
            for key, value in group.items()
            if isinstance(key, str) and key not in ("params", *_NAMES)
        }
        for group in groups
    )


class _PlainValues:
    """Makes settings plain, as long as there is room: what a pickle repeats takes more than the pickle."""

    def __init__(self) -> None:
        self._room = _MOST_VALUES

    def of(self, value: Any, depth: int = 0) -> Any:
        """Return a plain value; a tensor of one element as its number, anything odd as its kind."""
        self._room -= 1
        if value is None or isinstance(value, bool | int | float | str):
            return value
        if isinstance(value, torch.Tensor):
            lone = type(value) is torch.Tensor and value.numel() == 1 and value.device.type != "meta"
            return value.item() if lone else f"tensor of shape {tuple(value.shape)}"
        if depth >= 4 or self._room <= 0:
            return "..."
        if isinstance(value, list | tuple):
            items = [self.of(item, depth + 1) for item in value[: self._room]]
            return tuple(items) if isinstance(value, tuple) else items
        if isinstance(value, Mapping):
            items = list(islice(value.items(), self._room))
            return {
                safe(str(key)) if isinstance(key, str | int) else "...": self.of(inner, depth + 1)
                for key, inner in items
            }
        return "array" if isinstance(value, SavedArray) else type(value).__name__
