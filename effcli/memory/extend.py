"""Lengthens a tape of a model with few layers to that of the whole model, by repeating one that is like its neighbours.

A list of L equal layers is traced with five units (a unit is one layer, or one period of a pattern of layers): the
first three, the fourth, and the last. Units 1, 2 and 3 must look the same, event by event; then unit 2, whose
neighbours on both sides are like itself, is repeated as often as the model needs. Nothing is scaled: the result has
the very events that tracing every layer gives. No torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import groupby
from typing import NamedTuple

from effcli.memory.tape import END, GRADIENT, Alloc, Event, Free, Mark, MicroTape
from effcli.units import Phase

UNITS = 5
_TEMPLATE = 2


class NotPeriodicError(Exception):
    """The layers in the middle differ; the whole model has to be traced."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Repetition:
    """A list of layers and how it was shortened: `length` layers became `kept`; a unit has `period` of them.

    Kept are the first four units and the last one, which also has what is left over where `period` does not divide
    `length`.
    """

    name: str
    length: int
    period: int = 1

    @property
    def kept(self) -> tuple[int, ...]:
        """Return the places of the layers that are traced; all of them where there is nothing to save."""
        head, last = (UNITS - 1) * self.period, self.length // self.period - 1
        if last * self.period <= head:
            return tuple(range(self.length))
        return (*range(head), *range(last * self.period, self.length))

    @property
    def copies(self) -> int:
        """Return how often the middle unit has to be repeated."""
        return (self.length - len(self.kept)) // self.period


class _Address(NamedTuple):
    """Where a block was allocated: the unit, the pass, and which block there, counted from 0."""

    unit: int
    section: str
    ordinal: int


class _Part(NamedTuple):
    """Events of one unit in one pass, or (`unit` None) between units."""

    unit: int | None
    section: str
    events: list[Event]


def extended(tape: MicroTape, repetition: Repetition) -> MicroTape:
    """Return the tape of the whole list of layers.

    Raises:
        NotPeriodicError: the units in the middle are not alike.
    """
    if not repetition.copies or not any(
        event.name == repetition.name for event in tape.events if isinstance(event, Mark)
    ):
        return tape  # nothing was left out, or the list does not run, as a tower for images without images
    return _Extension(tape, repetition).tape()


class _Extension:
    def __init__(self, tape: MicroTape, repetition: Repetition) -> None:
        self._tape, self._repetition, self._copies = tape, repetition, repetition.copies
        self._parts = _parts(tape.events, repetition)
        self._addresses = _addresses(self._parts)
        self._names = {block: name for name, block in tape.gradients.items()}
        self._next_block = 1 + max(event.block for event in tape.events if isinstance(event, Alloc))
        self._blocks: dict[tuple[int, _Address], int] = {}
        self._check()

    def tape(self) -> MicroTape:
        """Return the lengthened tape."""
        self._events: list[Event] = []
        self._gradients: dict[str, int] = {}
        self._copied: set[int] = set()
        for part in self._parts:
            if part.unit == _TEMPLATE and part.section == Phase.BACKWARD:
                for copy in range(self._copies, 0, -1):
                    self._add(part, _TEMPLATE + copy)
            self._add(part, None if part.unit is None else self._position(part.unit))
            if part.unit == _TEMPLATE and part.section == Phase.FORWARD:
                for copy in range(1, self._copies + 1):
                    self._add(part, _TEMPLATE + copy)
        return replace(
            self._tape, events=tuple(self._events), gradients=self._gradients, copied=frozenset(self._copied)
        )

    def _position(self, unit: int) -> int:
        return unit if unit <= _TEMPLATE else unit + self._copies

    def _add(self, part: _Part, position: int | None) -> None:
        """Append a part as it is at a place of the lengthened list."""
        for event in part.events:
            if isinstance(event, Alloc):
                block = self._made(event.block, position)
                self._events.append(event._replace(block=block, source=self._renamed(event.source, position)))
            elif isinstance(event, Free):
                self._events += map(Free, self._meant(event.block, part.unit, position))
            elif event.name == GRADIENT:
                (block,) = self._meant(event.number, part.unit, position)
                self._events.append(Mark(GRADIENT, block))
                self._gradients[self._renamed(self._names[event.number], position)] = block
                if event.number in self._tape.copied:
                    self._copied.add(block)
            elif event.name in (self._repetition.name, END + self._repetition.name):
                self._events.append(Mark(event.name, self._place(event.number, part.unit, position)))
            else:
                self._events.append(event)

    def _place(self, number: int, unit: int | None, position: int | None) -> int:
        """Return the place in the lengthened list of a layer that is marked in a part, its own or its neighbour's."""
        if unit is None or position is None:  # between units, where a pass leaves the list: by its first or last layer
            unit = min(number // self._repetition.period, UNITS - 1)
            position = self._position(unit)
        return number + (position - unit) * self._repetition.period

    def _made(self, block: int, position: int | None) -> int:
        address = self._addresses.get(block)
        if position is None or address is None:
            return block
        number = block
        if address.unit == _TEMPLATE and position != _TEMPLATE:
            number, self._next_block = self._next_block, self._next_block + 1
        self._blocks[position, address._replace(unit=-1)] = number
        return number

    def _meant(self, block: int, unit: int | None, position: int | None) -> list[int]:
        """Return the blocks that an event at a place means, which the traced one calls `block`.

        A neighbour's block is the neighbour's there; from outside the units a block of the repeated unit stands for
        those of all its copies.
        """
        address = self._addresses.get(block)
        if address is None:
            if unit == _TEMPLATE:
                raise NotPeriodicError
            return [block]
        if unit is None or position is None:
            places = [self._position(address.unit)]
            if address.unit == _TEMPLATE:
                places = list(range(_TEMPLATE, _TEMPLATE + self._copies + 1))
        elif abs(address.unit - unit) <= 1:
            places = [position + address.unit - unit]
        elif {unit, address.unit} == {0, UNITS - 1}:  # a sum that runs through all layers
            places = [self._position(address.unit)]
        else:
            raise NotPeriodicError
        try:
            return [self._blocks[place, address._replace(unit=-1)] for place in places]
        except KeyError as error:
            raise NotPeriodicError from error

    def _renamed(self, name: str, position: int | None) -> str:
        """Return the name of a module or parameter at its place in the whole list."""
        prefix = f"{self._repetition.name}."
        if position is None or not name.startswith(prefix):
            return name
        index, dot, rest = name[len(prefix) :].partition(".")
        period = self._repetition.period
        unit = min(int(index) // period, UNITS - 1)
        return f"{prefix}{int(index) + (position - unit) * period}{dot}{rest}"

    def _check(self) -> None:
        """Raise unless the three units in the middle are alike in both passes.

        What they free of their own and of each other must be the same; units 1 and 3 may differ in what they free of
        units 0 and 4, which need not be like them.
        """
        for section in (Phase.FORWARD, Phase.BACKWARD):
            if len(self._looks(_TEMPLATE, section, unlike=-1)) != 1:
                raise NotPeriodicError
            for unit, unlike in ((_TEMPLATE - 1, -1), (_TEMPLATE + 1, 1)):
                if self._looks(unit, section, unlike=unlike) != self._looks(_TEMPLATE, section, unlike=unlike):
                    raise NotPeriodicError

    def _looks(self, unit: int, section: str, *, unlike: int) -> list[list[tuple[object, ...]]]:
        """Return what happens in each part of a unit in a pass, apart from what is freed of the neighbour `unlike`.

        The order of what is freed at once makes no difference.
        """
        parts = [part.events for part in self._parts if part.unit == unit and part.section == section]
        looks = [[self._look(event, unit) for event in events if not isinstance(event, Mark)] for events in parts]
        return [list(_frees_in_order(look for look in part if look[:2] != ("free", unlike))) for part in looks]

    def _look(self, event: Alloc | Free, unit: int) -> tuple[object, ...]:
        if isinstance(event, Alloc):
            return ("alloc", event.num_bytes, event.category, event.kind)
        address = self._addresses.get(event.block)
        if address is None:
            return ("free", None, event.block)
        return ("free", address.unit - unit, address.section, address.ordinal)


def _frees_in_order(looks: Iterable[tuple[object, ...]]) -> Iterator[tuple[object, ...]]:
    """Yield looks as they come, those of frees in a row in one order."""
    for kind, run in groupby(looks, key=lambda look: look[0]):
        ran = list(run)
        yield from sorted(ran, key=repr) if kind == "free" else ran


def _parts(events: Iterable[Event], repetition: Repetition) -> list[_Part]:
    """Return the events cut at the marks of the list's elements."""
    last = len(repetition.kept) - 1
    section: str = Phase.FORWARD
    parts = [_Part(None, section, [])]
    for event in events:
        unit = parts[-1].unit
        if isinstance(event, Mark):
            if event.name == Phase.BACKWARD:
                section = Phase.BACKWARD
            elif event.name == repetition.name:
                unit = min(event.number // repetition.period, UNITS - 1)
            elif event == Mark(END + repetition.name, 0 if section == Phase.BACKWARD else last):
                unit = None
        if (unit, section) != (parts[-1].unit, parts[-1].section):
            parts.append(_Part(unit, section, []))
        parts[-1].events.append(event)
    return parts


def _addresses(parts: Iterable[_Part]) -> dict[int, _Address]:
    found: dict[int, _Address] = {}
    for unit, section, events in parts:
        if unit is not None:
            made = (event.block for event in events if isinstance(event, Alloc))
            found |= {block: _Address(unit, section, ordinal) for ordinal, block in enumerate(made)}
    return found
