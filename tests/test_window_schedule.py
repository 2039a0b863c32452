"""Which rows each update takes, against lists of rows that are cut by hand."""

from __future__ import annotations

from itertools import product

import pytest

from effcli.engines.window_schedule import START, Position, WindowSchedule


def cut(rows: list[int], window: int) -> list[list[int]]:
    return [rows[start : start + window] for start in range(0, len(rows), window)]


def walked(schedule: WindowSchedule, first: int, updates: int) -> list[tuple[int, int, int]]:
    """Return epoch, first row and number of the micro-batches left of each update."""
    positions = [schedule.position(update) for update in range(first, first + updates)]
    left = [schedule.micro_batches_left(update) for update in range(first, first + updates)]
    return [(position.epoch, position.rows, batches) for position, batches in zip(positions, left, strict=True)]


@pytest.mark.parametrize("num_rows", [1, 2, 9, 10, 101])
@pytest.mark.parametrize(("batch", "accum"), [(1, 1), (2, 2), (3, 2), (4, 1), (4, 4), (128, 1)])
def test_a_run_from_the_start_cuts_each_epoch_alike(num_rows: int, batch: int, accum: int) -> None:
    schedule = WindowSchedule(num_rows=num_rows, batch_size=batch, accum=accum)
    micro_batches = cut(list(range(num_rows)), batch)
    per_epoch = len(cut(micro_batches, accum))
    assert schedule.updates_per_epoch == per_epoch
    assert schedule.total_updates(3) == 3 * per_epoch
    assert walked(schedule, 0, 2 * per_epoch) == [
        (epoch, index * batch * accum, len(micro_batches) - index * accum)
        for epoch in range(2)
        for index in range(per_epoch)
    ]
    assert [schedule.epochs(update) for update in range(7)] == [update / per_epoch for update in range(7)]
    assert [schedule.ends_epoch(update) for update in range(1, 7)] == [
        update % per_epoch == 0 for update in range(1, 7)
    ]


def test_changed_windows_use_each_row_of_an_epoch_once() -> None:
    num_rows, epochs = 10, 3
    sizes = [(1, 1), (2, 1), (1, 3), (2, 2), (5, 1), (4, 2), (16, 1)]
    for (before, after, last), stops in product(product(sizes, repeat=3), [(1, 1), (2, 3), (4, 2)]):
        used: list[tuple[int, int]] = []
        update, origin, seen = 0, START, [0.0]
        for size, stop in zip((before, after, last), (*stops, None), strict=True):
            schedule = WindowSchedule(num_rows=num_rows, batch_size=size[0], accum=size[1], origin=origin)
            total = schedule.total_updates(epochs)
            end = total if stop is None else min(update + stop, total - 1)
            while update < end:
                position, update = schedule.position(update), update + 1
                rows = range(position.rows, min(position.rows + schedule.window, num_rows))
                used += [(position.epoch, row) for row in rows]
                seen.append(schedule.epochs(update))
                assert schedule.ends_epoch(update) == (rows[-1] == num_rows - 1) == (seen[-1] == position.epoch + 1)
            origin = schedule.position(update)
        assert used == [(epoch, row) for epoch in range(epochs) for row in range(num_rows)]
        assert seen == sorted(set(seen))
        assert seen[-1] == epochs


def test_the_rest_of_an_epoch_is_cut_from_where_the_window_changes() -> None:
    schedule = WindowSchedule(num_rows=20, batch_size=3, accum=2, origin=Position(update=3, epoch=0, rows=12))
    assert walked(schedule, 3, 4) == [(0, 12, 3), (0, 18, 1), (1, 0, 7), (1, 6, 5)]
    assert schedule.total_updates(2) == 3 + 2 + 4
