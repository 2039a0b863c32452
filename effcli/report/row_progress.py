"""How far the reading of many rows has come: nothing where it is soon done, else a line now and then, or a bar."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from effcli.report.text import duration

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

SILENT_SECONDS = 2.0
"""What takes no longer than this goes unsaid."""
LINE_SECONDS = 10.0
"""Time between two lines."""

Clock = Callable[[], float]
Done = Callable[[int], None]


def describe_rows(num_done: int, num_rows: int, seconds: float) -> str:
    """Return how many rows are done, their speed over `seconds`, and the time that the others take at that speed."""
    speed = num_done / seconds
    left = f"  {duration((num_rows - num_done) / speed)} left" if speed else ""
    return f"{num_done:,} of {num_rows:,} rows  {speed:,.0f} rows/s{left}"


@contextmanager
def row_lines(what: str, num_rows: int, *, write: Callable[[str], None], clock: Clock) -> Iterator[Done]:
    """Give a function that is told how many rows are done, and writes a line now and then."""
    started_s = clock()
    next_s = started_s + SILENT_SECONDS

    def done(num_done: int) -> None:
        nonlocal next_s
        now_s = clock()
        if now_s >= next_s and num_done < num_rows:
            next_s = now_s + LINE_SECONDS
            write(f"{what}: {describe_rows(num_done, num_rows, now_s - started_s)}")

    yield done


@contextmanager
def row_bar(what: str, num_rows: int, *, console: Console, clock: Clock) -> Iterator[Done]:
    """Give a function that is told how many rows are done, and shows a bar that goes when the block ends."""
    from rich.progress import BarColumn, Progress, TextColumn

    started_s = clock()
    bar: Progress | None = None

    def done(num_done: int) -> None:
        nonlocal bar
        seconds = clock() - started_s
        if seconds < SILENT_SECONDS:
            return
        if bar is None:
            columns = (TextColumn("{task.description}", markup=False), BarColumn(bar_width=None))
            figures = TextColumn("{task.fields[figures]}", markup=False)
            bar = Progress(
                *columns, figures, console=console, redirect_stdout=False, get_time=clock, expand=True, transient=True
            )
            bar.add_task(what, total=num_rows, figures="")
            bar.start()
        bar.update(bar.task_ids[0], completed=num_done, figures=describe_rows(num_done, num_rows, seconds))

    try:
        yield done
    finally:
        if bar is not None:
            bar.stop()
