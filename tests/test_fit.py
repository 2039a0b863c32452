"""The verdict on a budget, runs that only get through by giving memory back, and the largest batch that fits."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from effcli.memory.caching_allocator import CachingAllocator
from effcli.memory.fit import LARGEST_BATCH, Need, largest_batch, under_pressure, verdict
from effcli.memory.replay import replay
from effcli.memory.tape import Alloc, Begin, Free, Program
from effcli.units import Category, Phase

MIB, GIB = 1024**2, 1024**3


@pytest.mark.parametrize(
    ("total", "expected"),
    [(50, "fits"), (90, "fits"), (91, "tight"), (100, "tight"), (101, "no")],  # of 100: 10 spare are enough, 9 not
)
def test_a_total_fits_is_tight_with_less_than_a_tenth_to_spare_or_is_too_much(total: int, expected: str) -> None:
    assert verdict(device_total_bytes=total, budget_bytes=100) == expected


def two_turns(first: int, second: int) -> Program:
    """Return a program that holds 10 MiB throughout and two other amounts one after the other."""
    return [
        Alloc(0, 10 * MIB, Category.WEIGHTS, "w", "weights"),
        Begin(Phase.FORWARD, 0),
        Alloc(1, first, Category.ACTIVATIONS, "a", "outputs"),
        Free(1),
        Alloc(2, second, Category.ACTIVATIONS, "b", "outputs"),
    ]


def reserved(program: Program, capacity_bytes: int) -> int:
    return under_pressure(program, replay(program, CachingAllocator()), capacity_bytes).reserved_bytes


def test_a_run_gets_through_on_less_than_it_would_reserve_by_giving_free_segments_back() -> None:
    program = two_turns(20 * MIB, 30 * MIB)
    assert reserved(program, 60 * MIB) == 60 * MIB  # 10 + 20 + 30, the 20 of no use any more
    assert reserved(program, 40 * MIB) == 40 * MIB
    assert reserved(program, 40 * MIB - 1) == 60 * MIB  # it does not get through, and is returned as on an empty device


def test_a_run_does_not_get_through_where_a_fragment_holds_its_segment() -> None:
    program = [
        *two_turns(20 * MIB, 18 * MIB),  # the second takes 18 of the 20
        Free(2),
        Alloc(3, 1 * MIB + 512, Category.ACTIVATIONS, "c", "outputs"),  # and this a part of them
        Alloc(4, 20 * MIB, Category.ACTIVATIONS, "d", "outputs"),
    ]
    assert reserved(program, 50 * MIB) <= 50 * MIB
    assert reserved(program, 48 * MIB) > 48 * MIB  # 31.0005 MiB are live at most


def test_a_context_larger_than_the_budget_lets_nothing_through() -> None:
    assert reserved(two_turns(MIB, MIB), -1) > 0


class Predictions:
    """A run whose need is a function of the batch size; remembers which sizes were asked for."""

    def __init__(self, need: Callable[[int], int], budget: int, threshold: int | None = None) -> None:
        self.asked: list[int] = []
        self.budget = budget
        self._need = need
        self._threshold = threshold or budget

    def __call__(self, batch: int) -> Need:
        self.asked.append(batch)
        return Need(num_bytes=self._need(batch), fits=self._need(batch) <= self._threshold)

    def search(self, start: int) -> int:
        found = largest_batch(self, budget_bytes=self.budget, start=start)
        assert len(set(self.asked)) == len(self.asked)
        assert found == 0 or found in self.asked
        assert found == LARGEST_BATCH or found + 1 in self.asked
        return found


@pytest.mark.parametrize("start", [1, 4, 8, 32, 64, 1000])
def test_on_a_line_the_largest_batch_is_found_with_few_predictions(start: int) -> None:
    predictions = Predictions(lambda batch: 3 * GIB + batch * 250 * MIB, 16 * GIB)
    assert predictions.search(start) == 53  # 13 GiB / 250 MiB = 53.2
    assert len(predictions.asked) <= 5


@pytest.mark.parametrize("start", [1, 8, 32])
def test_where_the_step_is_the_peak_of_small_batches_few_more_are_needed(start: int) -> None:
    predictions = Predictions(lambda batch: max(12 * GIB, 6 * GIB + batch * 100 * MIB), 24 * GIB)
    assert predictions.search(start) == 184  # 18 GiB / 100 MiB = 184.3; the batch counts from 62 on
    assert len(predictions.asked) <= 8


def test_fragments_that_make_a_run_fail_below_the_budget_are_found_out() -> None:
    predictions = Predictions(lambda batch: 2 * GIB + batch * 500 * MIB, 24 * GIB, threshold=int(23.6 * GIB))
    assert predictions.search(8) == 44  # 21.6 GiB / 500 MiB = 44.2, where the budget itself would allow 45
    assert len(predictions.asked) <= 6


@pytest.mark.parametrize("start", [1, 8])
def test_nothing_fits_where_not_even_one_does(start: int) -> None:
    predictions = Predictions(lambda batch: 20 * GIB + batch * GIB, 16 * GIB)
    assert predictions.search(start) == 0
    assert 1 in predictions.asked


def test_one_fits_and_two_do_not() -> None:
    assert Predictions(lambda batch: 10 * GIB + batch * 4 * GIB, 16 * GIB).search(8) == 1


def test_the_search_ends_at_the_largest_batch_that_is_looked_for() -> None:
    predictions = Predictions(lambda batch: GIB + batch * 16, 80 * GIB)
    assert predictions.search(8) == LARGEST_BATCH
    assert len(predictions.asked) <= 8


@given(
    fixed=st.integers(0, 20 * GIB),
    each=st.integers(MIB, 2 * GIB),
    step=st.integers(0, 20 * GIB),
    budget=st.sampled_from([8 * GIB, 24 * GIB, 80 * GIB]),
    share=st.floats(0.9, 1.0),
    start=st.integers(1, 64),
)
def test_every_answer_is_the_largest_that_fits(
    fixed: int, each: int, step: int, budget: int, share: float, start: int
) -> None:
    threshold = int(share * budget)
    found = Predictions(lambda batch: max(step, fixed + batch * each), budget, threshold).search(start)
    room = threshold - fixed
    expected = 0 if step > threshold or room < each else min(room // each, LARGEST_BATCH)
    assert found == expected
