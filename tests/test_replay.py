"""Programs played to an allocator: amounts by phase, the peak, what is live there, and the thinned timeline."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from effcli.memory.allocator import PlainAllocator
from effcli.memory.caching_allocator import CachingAllocator
from effcli.memory.plan import PhaseBytes
from effcli.memory.replay import NUM_POINTS, Replay, phases, replay, timeline
from effcli.memory.tape import Alloc, Begin, Free, Program
from effcli.units import Category, Phase

MIB = 1024 * 1024

TRAINING: Program = [
    Alloc(0, 100, Category.WEIGHTS, "model.weight", "weights"),
    Alloc(1, 9000, Category.TEMPORARIES, "loader", "a staging buffer"),
    Free(1),  # before training: never part of the peak
    # first update, two micro-batches: 100 + 40 forward, 100 + 40 + 30 + 7 backward
    Begin(Phase.FORWARD, 0, 0),
    Alloc(2, 40, Category.ACTIVATIONS, "model.fc", "saved outputs"),
    Begin(Phase.BACKWARD, 0, 0),
    Alloc(3, 30, Category.GRADIENTS, "model.weight", "gradients"),
    Alloc(4, 7, Category.TEMPORARIES, "model.fc", "products"),
    Free(4),
    Free(2),
    Begin(Phase.FORWARD, 0, 1),
    Alloc(5, 44, Category.ACTIVATIONS, "model.fc", "saved outputs"),  # 100 + 30 + 44
    Begin(Phase.BACKWARD, 0, 1),
    Free(5),
    Begin(Phase.STEP, 0, 0),
    Alloc(6, 200, Category.OPTIMIZER_STATE, "model.weight", "state of adamw"),  # 100 + 30 + 200
    Free(3),
    # a later update: 100 + 200 + 40; 100 + 200 + 40 + 30 + 60 + 5; 100 + 200 + 30
    Begin(Phase.FORWARD, 1, 0),
    Alloc(7, 40, Category.ACTIVATIONS, "model.fc", "saved outputs"),
    Begin(Phase.BACKWARD, 1, 0),
    Alloc(8, 30, Category.GRADIENTS, "model.weight", "gradients"),
    Alloc(9, 60, Category.TEMPORARIES, "model.head", "products"),
    Alloc(10, 5, Category.TEMPORARIES, "model.fc", "products"),
    Free(10),
    Free(9),
    Free(7),
    Begin(Phase.STEP, 1, 0),
    Free(8),
    Free(6),
]


@pytest.fixture
def played() -> Replay:
    return replay(TRAINING, PlainAllocator())


def phase_bytes(
    weights: int, gradients: int, optimizer_state: int, activations: int, temporaries: int, total: int
) -> PhaseBytes:
    return PhaseBytes(
        weights_bytes=weights,
        gradients_bytes=gradients,
        optimizer_state_bytes=optimizer_state,
        activations_bytes=activations,
        temporaries_bytes=temporaries,
        total_bytes=total,
    )


def test_a_phase_has_the_amounts_of_its_highest_moment(played: Replay) -> None:
    assert phases(played, 1) == {
        "forward": phase_bytes(100, 0, 200, 40, 0, 340),
        "backward": phase_bytes(100, 30, 200, 40, 65, 435),
        "step": phase_bytes(100, 30, 200, 0, 0, 330),  # it is highest where it begins
    }


def test_of_several_micro_batches_the_highest_one_counts(played: Replay) -> None:
    assert phases(played, 0) == {
        "forward": phase_bytes(100, 30, 0, 44, 0, 174),  # the second, beside the gradient of the first
        "backward": phase_bytes(100, 30, 0, 40, 7, 177),  # the first
        "step": phase_bytes(100, 30, 200, 0, 0, 330),
    }


def test_a_phase_that_is_not_played_is_left_out() -> None:
    played = replay([Begin(Phase.FORWARD, 0), Alloc(0, 8, Category.ACTIVATIONS, "", "")], PlainAllocator())
    assert list(phases(played, 0)) == ["forward"]
    assert phases(played, 1) == {}


def test_the_peak_is_the_highest_moment_of_training(played: Replay) -> None:
    peak = played.peak
    assert (peak.update, peak.phase, peak.micro, peak.total_bytes) == (1, Phase.BACKWARD, 0, 435)
    assert played.reserved_bytes == 9100  # what the allocator held before training counts here


def test_of_equal_moments_the_first_is_the_peak() -> None:
    program = [
        Begin(Phase.FORWARD, 0),
        Alloc(0, 8, Category.ACTIVATIONS, "a", "b"),
        Begin(Phase.BACKWARD, 0),  # opens with as much
        Free(0),
    ]
    assert replay(program, PlainAllocator()).peak.phase is Phase.FORWARD


def test_what_is_live_at_the_peak_is_named_by_kind_and_by_module(played: Replay) -> None:
    assert [(part.name, part.category, part.num_bytes) for part in played.kinds] == [
        ("state of adamw", Category.OPTIMIZER_STATE, 200),
        ("weights", Category.WEIGHTS, 100),
        ("products", Category.TEMPORARIES, 65),  # of two modules
        ("saved outputs", Category.ACTIVATIONS, 40),
        ("gradients", Category.GRADIENTS, 30),
    ]
    assert [(part.name, part.category, part.num_bytes) for part in played.modules] == [
        ("model.weight", Category.OPTIMIZER_STATE, 200),
        ("model.weight", Category.WEIGHTS, 100),
        ("model.head", Category.TEMPORARIES, 60),
        ("model.fc", Category.ACTIVATIONS, 40),
        ("model.weight", Category.GRADIENTS, 30),
        ("model.fc", Category.TEMPORARIES, 5),
    ]


def test_a_block_counts_with_what_the_allocator_says() -> None:
    program = [
        Alloc(0, 11 * MIB, Category.WEIGHTS, "embedding", "weights"),  # a segment of 12 MiB, unsplit
        Begin(Phase.FORWARD, 0),
        Alloc(1, 1, Category.ACTIVATIONS, "norm", "saved outputs"),  # 512 B in a segment of 2 MiB
    ]
    played = replay(program, CachingAllocator())
    # Weights stay exact; what the allocator adds to them is temporary memory.
    assert phases(played, 0) == {"forward": phase_bytes(11 * MIB, 0, 0, 512, MIB, 12 * MIB + 512)}
    assert played.reserved_bytes == 14 * MIB
    assert [(part.name, part.num_bytes) for part in played.kinds] == [
        ("weights", 11 * MIB), ("rounding of the allocator", MIB), ("saved outputs", 512)
    ]  # fmt: skip


def test_a_program_in_which_no_phase_begins_is_refused() -> None:
    with pytest.raises(ValueError, match="no phase begins"):
        replay(TRAINING[:3], PlainAllocator())


def waves(num_updates: int, num_events: int) -> Program:
    """Return updates whose phases rise and fall by turns; the highest crest is in the middle of the last forward."""
    program: list[Alloc | Free | Begin] = []
    for update in range(num_updates):
        for phase in Phase:
            program.append(Begin(phase, update))
            for number in range(num_events):
                crest = update == num_updates - 1 and phase is Phase.FORWARD and number == num_events // 2
                size = 1000 if crest else 1 + number % 7
                program += [Alloc(len(program), size, Category.ACTIVATIONS, "m", "k"), Free(len(program))]
    return program


@pytest.mark.parametrize(("num_updates", "num_events"), [(1, 1), (2, 50), (3, 1000), (300, 2)])
def test_a_timeline_has_a_limited_number_of_points_and_the_peak_among_them(num_updates: int, num_events: int) -> None:
    played = replay(waves(num_updates, num_events), PlainAllocator())
    points = timeline(played)
    assert min(NUM_POINTS // 2, 3 * num_updates) <= len(points) <= NUM_POINTS
    assert max(point.activations_bytes for point in points) == 1000 == played.peak.total_bytes
    assert [point.update for point in points] == sorted(point.update for point in points)


@given(st.lists(st.integers(-5, 60), max_size=120), st.integers(1, 40))
def test_peak_and_phases_are_those_found_by_looking_at_every_moment(steps: list[int], every: int) -> None:
    """A positive step allocates as many bytes, another frees the oldest block; a phase begins with every few steps."""
    program: list[Alloc | Free | Begin] = [Begin(Phase.FORWARD, 0)]
    totals, blocks = [0], {}
    for number, step in enumerate(steps):
        if number % every == 0:
            program.append(Begin(list(Phase)[number % 3], number // 40))
            totals.append(totals[-1])
        if step > 0:
            blocks[number] = step
            program.append(Alloc(number, step, Category.ACTIVATIONS, f"m{step}", "k"))
            totals.append(totals[-1] + step)
        elif blocks:
            gone = next(iter(blocks))
            program.append(Free(gone))
            totals.append(totals[-1] - blocks.pop(gone))
    played = replay(program, PlainAllocator())
    assert played.peak.total_bytes == max(totals)
    assert played.peak.event == totals.index(max(totals))
    assert sum(part.num_bytes for part in played.modules) == max(totals)
    assert max(found.total_bytes for update in range(4) for found in phases(played, update).values()) == max(totals)


def test_what_the_first_step_leaves_behind_is_counted_as_the_allocator_counts_it() -> None:
    assert replay(TRAINING, PlainAllocator()).first_step_bytes == 200
    update: Program = [
        Begin(Phase.FORWARD, 0, 0),
        Alloc(1, 12 * MIB, Category.ACTIVATIONS, "m", "saved outputs"),
        Free(1),  # a free block of 12 MiB
        Begin(Phase.STEP, 0, 0),
        Alloc(2, 23 * MIB // 2, Category.OPTIMIZER_STATE, "m", "state"),  # gets all of it: half a MiB is no rest
        Alloc(3, 4, Category.OPTIMIZER_STATE, "m", "state"),  # 512 bytes
        Alloc(4, 5000, Category.TEMPORARIES, "m", "temporaries"),
        Free(4),
    ]
    played = replay(update, CachingAllocator())
    assert played.first_step_bytes == 12 * MIB + 512
    assert replay(update, PlainAllocator()).first_step_bytes == 23 * MIB // 2 + 4
    later: Program = [
        Begin(Phase.FORWARD, 1, 0),
        Free(3),
        Begin(Phase.STEP, 1, 0),
        Alloc(5, 700, Category.OPTIMIZER_STATE, "m", "state"),
    ]
    assert replay([*update, *later], CachingAllocator()).first_step_bytes == 12 * MIB + 512
    assert replay(update[:3], CachingAllocator()).first_step_bytes == 0
