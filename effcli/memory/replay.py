"""`replay`: plays a program of several updates to an allocator and keeps its highest moments. No torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from effcli.memory.allocator import Allocator
from effcli.memory.plan import PhaseBytes, TimelinePoint
from effcli.memory.tape import Alloc, Begin, Free, Program
from effcli.units import Category, Phase

ROUNDING = "rounding of the allocator"
_EXACT = frozenset({Category.WEIGHTS, Category.GRADIENTS, Category.OPTIMIZER_STATE})

NUM_POINTS = 200
"""How many points a timeline has at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """What is live right after event number `event` of a program, in bytes as the allocator counts them.

    `num_bytes` is in the order of `Category`; `update` and `micro` count from 0.
    """

    update: int
    micro: int
    phase: Phase
    event: int
    num_bytes: tuple[int, ...]
    total_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LivePart:
    """What is live at the peak of one kind of storage, or of one module or parameter."""

    name: str
    category: Category
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """What a program did to an allocator.

    `moments` has the highest one of every short stretch, in order; no stretch is longer than a phase. `peak` is the
    highest of all, the first of equals. `kinds` and `modules` each add up to the peak, the largest first.
    `reserved_bytes` is the most that the allocator ever held, `first_step_bytes` what the first step took and left
    behind: the state as the allocator counts it, in whole blocks; 0 without a step.
    """

    moments: tuple[Moment, ...]
    peak: Moment
    kinds: tuple[LivePart, ...]
    modules: tuple[LivePart, ...]
    reserved_bytes: int
    first_step_bytes: int = 0


def replay(program: Program, allocator: Allocator) -> Replay:
    """Return the highest moments of a program on a fresh allocator.

    What comes before the first `Begin` is live before training, and no moment of it.

    Raises:
        ValueError: no phase begins in the program.
        CapacityError: the allocator has a capacity and the program does not fit.
    """
    player = _Player(allocator)
    player.play(program, stretch=len(program) // NUM_POINTS + 1)
    if not player.moments:
        raise ValueError("no phase begins in the program")
    peak = _highest(player.moments)
    live = _live(program, player.counted, peak.event)
    return Replay(
        moments=tuple(player.moments),
        peak=peak,
        kinds=_parts(_named(live, lambda event: event.kind)),
        modules=_parts(_named(live, lambda event: event.source)),
        reserved_bytes=player.reserved_bytes,
        first_step_bytes=player.first_step_bytes,
    )


def phases(played: Replay, update: int) -> dict[str, PhaseBytes]:
    """Return the highest moment of each phase of one update, over its micro-batches; without phases not played."""
    by_phase: dict[Phase, list[Moment]] = {phase: [] for phase in Phase}
    for moment in played.moments:
        if moment.update == update:
            by_phase[moment.phase].append(moment)
    return {phase: _phase_bytes(_highest(moments)) for phase, moments in by_phase.items() if moments}


def timeline(played: Replay, num_points: int = NUM_POINTS) -> tuple[TimelinePoint, ...]:
    """Return at most `num_points` moments in order, each the highest among its neighbours; the peak is one of them."""
    width = -(-len(played.moments) // num_points)
    groups = [played.moments[start : start + width] for start in range(0, len(played.moments), width)]
    return tuple(
        TimelinePoint(update=highest.update, micro=highest.micro, phase=highest.phase, **_by_field(highest))
        for highest in map(_highest, groups)
    )


class _Player:
    """Counts what is live while events pass by; `counted` has one number for each event, 0 where nothing is taken."""

    def __init__(self, allocator: Allocator) -> None:
        self.moments: list[Moment] = []
        self.counted: list[int] = []
        self.reserved_bytes = self.first_step_bytes = 0
        self._stepping: list[int] | None = None
        self._allocator = allocator
        self._live: dict[int, tuple[Category, int, int]] = {}
        self._amounts = dict.fromkeys(Category, 0)

    def play(self, program: Program, stretch: int) -> None:
        """Play all events; keep the highest moment of every phase and of every `stretch` events within one."""
        begin: Begin | None = None
        end, highest = len(program), -1  # of the stretch: the event after it, and the most bytes in it
        at = 0
        num_bytes: tuple[int, ...] = ()
        for index, event in enumerate(program):
            self.counted.append(self._counted(event))
            if isinstance(event, Begin):
                self._watch_first_step(event)
            if isinstance(event, Begin) or index == end:
                if begin is not None:
                    self.moments.append(_moment(begin, at, num_bytes))
                begin = event if isinstance(event, Begin) else begin
                end, highest = index + stretch, -1
            if self._allocator.allocated_bytes > highest:
                highest = self._allocator.allocated_bytes
                at, num_bytes = index, tuple(self._amounts.values())
        if begin is not None:
            self.moments.append(_moment(begin, at, num_bytes))
        self._watch_first_step(None)

    def _watch_first_step(self, begin: Begin | None) -> None:
        """Note what comes from the beginning of the first step on, and at its end what is left of that."""
        if self._stepping is not None:
            left = [self._live[block] for block in self._stepping if block in self._live]
            self.first_step_bytes += sum(own + rounding for _, own, rounding in left)
        is_first = begin is not None and begin.phase is Phase.STEP and begin.update == 0
        self._stepping = [] if is_first else None

    def _counted(self, event: Alloc | Free | Begin) -> int:
        """Let the event happen; return the bytes that it takes."""
        if isinstance(event, Alloc):
            num_bytes = self._allocator.allocate(event.block, event.num_bytes)
            own, rounding = _split(event, num_bytes)
            self._live[event.block] = (event.category, own, rounding)
            if self._stepping is not None:
                self._stepping.append(event.block)
            self._amounts[event.category] += own
            self._amounts[Category.TEMPORARIES] += rounding
            self.reserved_bytes = max(self.reserved_bytes, self._allocator.reserved_bytes)
            return num_bytes
        if isinstance(event, Free):
            self._allocator.free(event.block)
            category, own, rounding = self._live.pop(event.block)
            self._amounts[category] -= own
            self._amounts[Category.TEMPORARIES] -= rounding
        return 0


def _moment(begin: Begin, event: int, num_bytes: tuple[int, ...]) -> Moment:
    return Moment(
        update=begin.update,
        micro=begin.micro,
        phase=begin.phase,
        event=event,
        num_bytes=num_bytes,
        total_bytes=sum(num_bytes),
    )


def _highest(moments: Iterable[Moment]) -> Moment:
    """Return the moment with most bytes, the first of equals."""
    return max(moments, key=lambda moment: moment.total_bytes)


def _live(program: Program, counted: Sequence[int], event: int) -> list[tuple[Alloc, int]]:
    """Return what is live after event number `event`, with the bytes that count for it."""
    live: dict[int, tuple[Alloc, int]] = {}
    for index in range(event + 1):
        now = program[index]
        if isinstance(now, Alloc):
            live[now.block] = (now, counted[index])
        elif isinstance(now, Free):
            del live[now.block]
    return list(live.values())


def _split(event: Alloc, num_bytes: int) -> tuple[int, int]:
    """Return what a storage counts in its own category, and what the allocator adds to it.

    Weights, gradients and state keep their exact bytes; what the allocator rounds up is temporary memory then.
    """
    return (event.num_bytes, num_bytes - event.num_bytes) if event.category in _EXACT else (num_bytes, 0)


def _named(live: Iterable[tuple[Alloc, int]], name: Callable[[Alloc], str]) -> Iterator[tuple[str, Category, int]]:
    for event, num_bytes in live:
        own, rounding = _split(event, num_bytes)
        yield name(event), event.category, own
        if rounding:
            yield ROUNDING, Category.TEMPORARIES, rounding


def _parts(live: Iterable[tuple[str, Category, int]]) -> tuple[LivePart, ...]:
    """Return the bytes by name and category, the largest first."""
    sums: Counter[tuple[str, Category]] = Counter()
    for name, category, num_bytes in live:
        sums[name, category] += num_bytes
    return tuple(
        LivePart(name=name, category=category, num_bytes=num_bytes)
        for (name, category), num_bytes in sums.most_common()
    )


def _phase_bytes(moment: Moment) -> PhaseBytes:
    return PhaseBytes(**_by_field(moment), total_bytes=moment.total_bytes)


def _by_field(moment: Moment) -> dict[str, int]:
    """Return the amounts under the names that they have in a plan."""
    return {f"{category}_bytes": num_bytes for category, num_bytes in zip(Category, moment.num_bytes, strict=True)}
