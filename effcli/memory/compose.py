"""Joins the tapes of a micro-batch and of optimizer steps into the events of whole updates. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import count

from effcli.memory.tape import BATCH, GRADIENT, OUTPUTS, Alloc, Begin, Free, MicroTape, StepTape
from effcli.units import Category, ParamInfo, Phase

ADDED = "gradients before they are added"


def resident(parameters: Iterable[ParamInfo], buffers: Mapping[str, int]) -> list[Alloc]:
    """Return what is live before training: each parameter, and each buffer by its bytes.

    Buffers count among the activations, so that the weights are the parameters' bytes exactly.
    """
    blocks = count(1)
    weights = [
        Alloc(next(blocks), parameter.num_bytes, Category.WEIGHTS, parameter.name, "weights")
        for parameter in parameters
    ]
    return [
        *weights,
        *(Alloc(next(blocks), size, Category.ACTIVATIONS, name, "buffers") for name, size in buffers.items()),
    ]


def updates(
    before: Iterable[Alloc],
    micro: MicroTape,
    steps: Iterable[StepTape | None],
    *,
    built: StepTape | None = None,
    accum: int = 1,
    held_batches: int = 0,
    first: MicroTape | None = None,
    held_bytes: int | None = None,
    hands_over: bool = False,
) -> Iterator[Alloc | Free | Begin]:
    """Yield the events of one update per element of `steps`, each of `accum` micro-batches and a step, if there is one.

    The first micro-batch of an update makes the gradients, later ones add to them. Without a step the gradients are
    freed before the next update's forward, as loops do that clear them there. `built` is what making the optimizer did.
    `held_batches` is the number of batches that live through a whole update, as on a CPU, where nothing is copied to a
    device; with none, each micro-batch has its own. `first` is the tape of each update's first micro-batch where that
    is not `micro`, and `held_bytes` what the held batches take where they differ. `hands_over` says that in an update's
    last micro-batch each gradient is copied, once it is complete, into a buffer among `before`, and freed.
    """
    joined = _Joined(before)
    batch = [event for event in micro.events if isinstance(event, Alloc) and event.kind == BATCH]
    if held_batches:
        micro, first = _without_batch(micro), first and _without_batch(first)
    if held_bytes is not None:
        batch, held_batches = [batch[0]._replace(num_bytes=held_bytes)], 1
    yield from joined.before
    if built is not None:
        yield from joined.optimizer(built)
    for update, step in enumerate(steps):
        if step is None:
            yield from joined.cleared()
        for place in range(accum):
            tape = first or micro if place == 0 else micro
            for event in joined.micro(tape, update, place, hands_over=hands_over and place == accum - 1):
                yield event
                if isinstance(event, Begin) and event.phase is Phase.FORWARD and place == 0:
                    yield from joined.loaded(batch, held_batches)
        if step is not None:
            yield from joined.step(step, update, accum - 1)
        yield from joined.unloaded()


def _without_batch(tape: MicroTape) -> MicroTape:
    blocks = {event.block for event in tape.events if isinstance(event, Alloc) and event.kind == BATCH}
    return replace(tape, events=tuple(event for event in tape.events if getattr(event, "block", None) not in blocks))


class _Joined:
    """Numbers the blocks anew, and remembers what outlives a tape."""

    def __init__(self, before: Iterable[Alloc]) -> None:
        self.before = list(before)
        self._numbers = count(max((alloc.block for alloc in self.before), default=0) + 1)
        self._gradients: dict[str, int] = {}
        self._state: dict[str, int] = {}
        self._libraries = False
        self._held: list[int] = []
        self._batches: list[int] = []

    def cleared(self) -> Iterator[Free]:
        """Yield the ends of all gradients."""
        yield from map(Free, self._gradients.values())
        self._gradients = {}

    def loaded(self, batch: Iterable[Alloc], held_batches: int) -> Iterator[Alloc]:
        """Yield the tensors of an update's batches, those of one name together."""
        for tensor in batch if held_batches else ():
            self._batches.append(next(self._numbers))
            yield tensor._replace(block=self._batches[-1], num_bytes=tensor.num_bytes * held_batches)

    def unloaded(self) -> Iterator[Free]:
        """Yield the ends of the batches."""
        yield from map(Free, self._batches)
        self._batches = []

    def micro(
        self, tape: MicroTape, update: int, place: int, *, hands_over: bool = False
    ) -> Iterator[Alloc | Free | Begin]:
        """Yield the events of one micro-batch; `hands_over` says whether its gradients are freed once complete."""
        numbers: dict[int, int] = {}
        names = {block: name for name, block in tape.gradients.items()}
        adds = place > 0
        for event in tape.events:
            if isinstance(event, Alloc):
                if event.block in tape.libraries and self._libraries:
                    continue
                if adds and event.block in names:
                    if event.block in tape.copied:
                        continue
                    event = event._replace(category=Category.TEMPORARIES, kind=ADDED)
                numbers[event.block] = next(self._numbers)
                yield event._replace(block=numbers[event.block])
            elif isinstance(event, Free):
                yield Free(numbers.pop(event.block))
            elif event.name == GRADIENT:
                name = names[event.number]
                if not adds:
                    self._gradients[name] = numbers.pop(event.number)
                elif event.number in numbers:
                    yield Free(numbers.pop(event.number))
                if hands_over:
                    yield Free(self._gradients.pop(name))
            elif event.name == OUTPUTS:
                yield from map(Free, self._held)
                self._held = []
            elif event.name in (Phase.FORWARD, Phase.BACKWARD):
                yield Begin(Phase(event.name), update, place)
        kept = tape.libraries if not self._libraries else frozenset()
        self._held += [number for block, number in numbers.items() if block not in kept]
        self._libraries = True

    def step(self, tape: StepTape, update: int, place: int) -> Iterator[Alloc | Free | Begin]:
        """Yield the events of one step; a parameter that got no gradient takes no part in it."""
        yield Begin(Phase.STEP, update, place)
        yield from self.optimizer(tape)

    def optimizer(self, tape: StepTape) -> Iterator[Alloc | Free]:
        """Yield what the optimizer does, when it is made or in a step."""
        lacking = {block for name, block in tape.gradients.items() if name not in self._gradients}
        numbers = {block: self._gradients[name] for name, block in tape.gradients.items() if block not in lacking}
        numbers |= {block: self._state[name] for name, block in tape.state.items() if name in self._state}
        for event in tape.events:
            if isinstance(event, Alloc):
                numbers[event.block] = next(self._numbers)
                yield event._replace(block=numbers[event.block])
            elif isinstance(event, Free) and event.block not in lacking:
                yield Free(numbers[event.block])
        self._state |= {name: numbers[block] for name, block in tape.state.items()}
        self._gradients = {}
