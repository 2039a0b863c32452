"""Recorded updates of an optimizer made into tapes that can be played one after another, the last again and again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import count

from effcli.memory.tape import Alloc, Free, StepTape
from effcli.trace.step_recorder import Recorded
from effcli.units import Category

STATE = "optimizer state"
KEPT = "kept by the optimizer outside of its state"
_OUTSIDE = "optimizer"
"""Owner of what an optimizer keeps outside of its parameters' state."""


class UnusualStepError(Exception):
    """The step did something that no tape says: it kept a gradient, replaced a weight, or resized its state."""


class Numbering:
    """Numbers blocks so that what lasts has the same number in every tape.

    Where a storage follows another one in its role, as a norm that every update computes anew, the number stays. If the
    two live together for a while, the new one is taken for a guest that leaves when the old one dies, which is the same
    in bytes.
    """

    def __init__(self) -> None:
        self._unused = count(1)
        self._gradients: dict[str, int] = {}
        self._state: dict[str, int] = {}
        self._blocks: dict[str, int] = {}
        self._sizes: dict[int, int] = {}

    def tape(self, recorded: Recorded) -> StepTape:
        """Return the tape of one update, or of the making of the optimizer.

        Raises:
            UnusualStepError: no tape says what happened.
        """
        born = {event.block: place for place, event in enumerate(recorded.events) if isinstance(event, Alloc)}
        died = {event.block: place for place, event in enumerate(recorded.events) if isinstance(event, Free)}
        self._sizes |= {event.block: event.num_bytes for event in recorded.events if isinstance(event, Alloc)}
        state = {**recorded.state, **self._outside(recorded, born, died)}
        heirs = {old: state[name] for name, old in self._blocks.items() if old in died and name in state}
        if any(self._sizes[old] != self._sizes.get(new) for old, new in heirs.items()):
            raise UnusualStepError("its state changes size")
        if not died.keys() >= {*recorded.gradients.values()} or recorded.replaced_weights:
            raise UnusualStepError("it keeps gradients or replaces weights")

        for name in recorded.gradients:
            self._gradients.setdefault(name, next(self._unused))
        numbers = {block: self._gradients[name] for name, block in recorded.gradients.items()}
        numbers |= {block: self._state[name] for name, block in self._blocks.items()}
        owners = {block: name for name, block in state.items()}
        reborn = {new: old for old, new in heirs.items() if died[old] < born[new]}
        guests = {old: new for old, new in heirs.items() if new not in reborn}
        events = tuple(self._renamed(recorded.events, numbers, reborn, guests, owners))
        self._blocks = state
        self._state = {name: self._state.get(name, numbers[block]) for name, block in state.items()}
        return StepTape(events=events, gradients=dict(self._gradients), state=dict(self._state))

    def _renamed(
        self,
        events: tuple[Alloc | Free, ...],
        numbers: dict[int, int],
        reborn: Mapping[int, int],
        guests: Mapping[int, int],
        owners: Mapping[int, str],
    ) -> Iterator[Alloc | Free]:
        for event in events:
            if isinstance(event, Free):
                yield Free(numbers[guests.get(event.block, event.block)])
                continue
            old = reborn.get(event.block)
            numbers[event.block] = next(self._unused) if old is None else numbers[old]
            named = event._replace(block=numbers[event.block])
            if event.block in owners:
                named = _lasting(named, owners[event.block].partition(" ")[0])
            yield named

    def _outside(self, recorded: Recorded, born: Mapping[int, int], died: Mapping[int, int]) -> dict[str, int]:
        """Return by name what outlives the update without being state; equals follow each other in their order."""
        before = {name: block for name, block in self._blocks.items() if name.startswith(f"{_OUTSIDE} ")}
        vacant = {name: self._sizes[block] for name, block in before.items() if block in died}
        kept = {name: block for name, block in before.items() if block not in died}
        named = {*recorded.state.values()}
        for block in (block for block in born if block not in died and block not in named):
            alike = [name for name, num_bytes in vacant.items() if num_bytes == self._sizes[block]]
            name = alike[0] if alike else f"{_OUTSIDE} {len(before) + len(kept)}"
            vacant.pop(name, None)
            kept[name] = block
        return kept


def _lasting(alloc: Alloc, owner: str) -> Alloc:
    if owner == _OUTSIDE:
        return alloc._replace(source=owner, kind=KEPT)
    return alloc._replace(category=Category.OPTIMIZER_STATE, source=owner, kind=STATE)
