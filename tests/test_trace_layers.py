"""A tape that was lengthened has the very events of a trace of every layer."""

from __future__ import annotations

import pytest

from effcli.memory.allocator import PlainAllocator
from effcli.memory.compose import resident, updates
from effcli.memory.replay import replay
from effcli.memory.scale import NotAffineError, scaled
from effcli.memory.tape import GRADIENT, Alloc, Free, Mark, MicroTape
from effcli.units import Category
from tests.traces import MODELS, traced


def course(tape: MicroTape) -> list[tuple[object, ...]]:
    """Return the events with blocks numbered in the order in which they come to life; frees in a row are sorted."""
    numbers: dict[int, int] = {}
    events: list[tuple[object, ...]] = []
    freed: list[int] = []
    for event in (*tape.events, Alloc(0, 0, Category.ACTIVATIONS, "", "")):
        if isinstance(event, Alloc):
            events += [(number,) for number in sorted(freed)]
            freed = []
            numbers[event.block] = len(numbers)
            events.append((numbers[event.block], *event[1:]))
        elif isinstance(event, Free):
            freed.append(numbers[event.block])
    return events


def layer_marks(tape: MicroTape) -> list[Mark]:
    """Return where layers begin and end, in order."""
    return [event for event in tape.events if isinstance(event, Mark) and event.name != GRADIENT]


@pytest.mark.parametrize(
    ("name", "recompute"),
    [*((name, False) for name in MODELS), ("llama", True), ("t5", True)],
    ids=lambda value: value if isinstance(value, str) else "recomputed" if value else "kept",
)
def test_a_lengthened_tape_is_that_of_all_layers(name: str, recompute: bool) -> None:
    whole_tracer, whole = traced(name, whole=True, recompute=recompute)
    short_tracer, short = traced(name, whole=False, recompute=recompute)
    assert short_tracer.is_shortened, "the layers were traced one by one"
    assert course(short) == course(whole)
    assert layer_marks(short) == layer_marks(whole)
    assert set(short.gradients) == set(whole.gradients)
    assert short_tracer.parameters == whole_tracer.parameters
    peaks = [
        replay(list(updates(resident(tracer.parameters, {}), tape, (None, None), accum=2)), PlainAllocator()).peak
        for tracer, tape in ((whole_tracer, whole), (short_tracer, short))
    ]
    assert peaks[0].num_bytes == peaks[1].num_bytes


@pytest.mark.parametrize("name", ["bert", "llama"])
def test_a_third_batch_follows_from_two(name: str) -> None:
    small, large, asked = (traced(name, whole=False, batch_size=size)[1] for size in (2, 5, 16))
    assert course(scaled(small, large, sizes=(2, 5), to=16)) == course(asked)


def test_tapes_with_other_events_give_no_third() -> None:
    with pytest.raises(NotAffineError):
        scaled(traced("bert", whole=True)[1], traced("gpt2", whole=True)[1], sizes=(2, 5), to=16)
