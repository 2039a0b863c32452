"""Whole updates from tapes, with events that are written out by hand."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from effcli.memory.compose import resident, updates
from effcli.memory.tape import BATCH, GRADIENT, OUTPUTS, Alloc, Begin, Free, Mark, MicroTape, StepTape
from effcli.units import Category, ParamInfo, Phase

A, G, T = Category.ACTIVATIONS, Category.GRADIENTS, Category.TEMPORARIES
WEIGHT = ParamInfo(name="w", shape=(25,))  # 100 B
BEFORE = resident([WEIGHT], {"positions": 7})

FORWARD, BACKWARD = Mark(Phase.FORWARD), Mark(Phase.BACKWARD)
ACTIVATION, GRAD = Alloc(1, 10, A, "fc", "layer activations"), Alloc(2, 100, G, "w", "gradients")
MICRO = MicroTape(
    events=(FORWARD, ACTIVATION, Mark(OUTPUTS), BACKWARD, GRAD, Mark(GRADIENT, 2), Free(1)), gradients={"w": 2}
)
CLEARED = StepTape(events=(Free(1),), gradients={"w": 1}, state={})


def sizes(program: Iterable[Alloc | Free | Begin]) -> list[tuple[str, int]]:
    """Return what is live, in bytes, after each event that changes it, under the phase that runs."""
    live: dict[int, int] = {}
    phase, course = "before", []
    for event in program:
        if isinstance(event, Begin):
            phase = event.phase.value
        elif isinstance(event, Alloc):
            live[event.block] = event.num_bytes
        else:
            del live[event.block]
        if not isinstance(event, Begin):
            course.append((phase, sum(live.values())))
    return course


def test_weights_and_buffers_are_live_before_training() -> None:
    assert sizes(BEFORE) == [("before", 100), ("before", 107)]


def test_an_update_makes_gradients_that_live_until_the_step() -> None:
    course = sizes(updates(BEFORE, MICRO, [CLEARED]))[2:]
    assert course == [("forward", 117), ("backward", 217), ("backward", 207), ("step", 107)]


def test_a_later_micro_batch_adds_to_the_gradients_and_frees_its_own() -> None:
    course = sizes(updates(BEFORE, MICRO, [CLEARED], accum=2))[2:]
    second = [("forward", 217), ("backward", 317), ("backward", 217), ("backward", 207)]
    assert course == [("forward", 117), ("backward", 217), ("backward", 207), *second, ("step", 107)]


def test_a_gradient_that_was_copied_needs_no_copy_when_it_is_added() -> None:
    incoming = Alloc(3, 100, T, "w", "gradients of activations")
    copied = MicroTape(
        events=(FORWARD, BACKWARD, incoming, GRAD, Mark(GRADIENT, 2), Free(3)),
        gradients={"w": 2},
        copied=frozenset({2}),
    )
    course = [total for _, total in sizes(updates(BEFORE, copied, [CLEARED], accum=2))[2:]]
    assert course == [207, 307, 207, 307, 207, 107]  # the second micro-batch holds one more tensor, not two


def test_outputs_that_the_loop_keeps_die_when_the_next_forward_returns() -> None:
    kept = MicroTape(events=(FORWARD, ACTIVATION, Mark(OUTPUTS), BACKWARD), gradients={})
    course = sizes(updates(BEFORE, kept, [None, None]))[2:]
    assert course == [("forward", 117), ("forward", 127), ("forward", 117)]


def test_libraries_take_their_workspace_once() -> None:
    with_library = MicroTape(
        events=(FORWARD, Alloc(9, 50, T, "", "cuBLAS workspaces"), BACKWARD), gradients={}, libraries=frozenset({9})
    )
    assert sizes(updates(BEFORE, with_library, [None, None], accum=2))[2:] == [("forward", 157)]


def test_without_a_step_gradients_are_cleared_before_the_next_forward() -> None:
    course = sizes(updates(BEFORE, MICRO, [None, None]))[2:]
    first = [("forward", 117), ("backward", 217), ("backward", 207)]
    assert course == [*first, ("backward", 107), *first]


def test_state_is_made_in_the_first_step_and_stays() -> None:
    state = Alloc(5, 200, Category.OPTIMIZER_STATE, "w", "optimizer state")
    first = StepTape(events=(state, Free(1)), gradients={"w": 1}, state={"w/exp_avg": 5})
    later = StepTape(events=(Alloc(6, 30, T, "", "foreach temporaries"), Free(6), Free(1)), gradients={"w": 1},
        state={"w/exp_avg": 5})  # fmt: skip
    steps = [total for phase, total in sizes(updates(BEFORE, MICRO, [first, later])) if phase == "step"]
    assert steps == [407, 307, 437, 407, 307]


def test_a_parameter_without_gradient_takes_no_part_in_the_step() -> None:
    step = StepTape(events=(Free(1), Free(2)), gradients={"w": 1, "unused": 2}, state={})
    assert sizes(updates(BEFORE, MICRO, [step]))[-1] == ("step", 107)


def test_micro_batches_are_counted_within_their_update() -> None:
    begins = [event for event in updates(BEFORE, MICRO, [CLEARED, CLEARED], accum=2) if isinstance(event, Begin)]
    assert [(event.update, event.micro) for event in begins if event.phase is Phase.FORWARD] == [
        (0, 0), (0, 1), (1, 0), (1, 1)
    ]  # fmt: skip


def test_batches_that_are_held_live_from_the_beginning_of_an_update_to_its_end() -> None:
    batch = Alloc(3, 8, A, "batch", BATCH)
    with_batch = replace(MICRO, events=(FORWARD, batch, *MICRO.events[1:], Free(3)))

    own = sizes(updates(BEFORE, with_batch, [CLEARED], accum=2))
    held = sizes(updates(BEFORE, with_batch, [CLEARED], accum=2, held_batches=2))

    assert own[-2:] == [("backward", 207), ("step", 107)]
    assert held[2:4] == [("forward", 123), ("forward", 133)]
    assert held[-3:] == [("backward", 223), ("step", 123), ("step", 107)]
    many = sizes(updates(BEFORE, with_batch, [CLEARED], held_batches=10**9))  # as many as --accum takes
    assert many[2] == ("forward", 107 + 8 * 10**9)
