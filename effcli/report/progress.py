"""What the user sees while a run goes on, on stderr: a bar in a terminal, plain lines elsewhere, or nothing."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, TextIO

from effcli.report.output import make_console
from effcli.report.row_progress import row_bar, row_lines
from effcli.report.text import duration, plain, rate
from effcli.streams import is_terminal as stream_is_terminal

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import TaskID

    from effcli.engines.base import EvalResult, Progress

Clock = Callable[[], float]
_RECENT_UPDATES = 100


def make_progress(
    logging_steps: int, quiet: bool, is_terminal: bool | None = None, clock: Clock = time.monotonic
) -> Progress:
    """Return the display that suits stderr; `is_terminal` decides in place of stderr itself, `clock` is in seconds."""
    if quiet:
        return QuietProgress()
    if stream_is_terminal(sys.stderr) if is_terminal is None else is_terminal:
        return RichProgress(logging_steps, clock=clock)
    return LineProgress(logging_steps, clock=clock)


class Pace:
    """Speed of the last updates, from the time between them; loss as the mean over a logging interval.

    The stretch that follows an evaluation is left out: it may hold the writing of a checkpoint.
    """

    def __init__(self, logging_steps: int, clock: Clock) -> None:
        self._clock = clock
        self._marked_s: float | None = None
        self._gaps: deque[tuple[float, int]] = deque(maxlen=_RECENT_UPDATES)
        self._losses: deque[float] = deque(maxlen=logging_steps)

    def start(self) -> None:
        """Training begins now."""
        self._marked_s = self._clock()

    def update(self, loss: float, num_samples: int) -> None:
        """One update is done."""
        now = self._clock()
        if self._marked_s is not None:
            self._gaps.append((now - self._marked_s, num_samples))
        self._marked_s = now
        self._losses.append(loss)

    def interrupt(self) -> None:
        """Something else than training has happened since the last update."""
        self._marked_s = None

    @property
    def loss(self) -> float:
        """Return the mean loss of the updates of the last logging interval."""
        return sum(self._losses) / len(self._losses)

    @property
    def samples_per_second(self) -> float | None:
        """Return rows per second over the last updates; None before any time has passed."""
        seconds = sum(gap for gap, _ in self._gaps)
        return sum(samples for _, samples in self._gaps) / seconds if seconds else None

    def seconds_left(self, num_updates: int) -> float | None:
        """Return the training time that `num_updates` more take at this speed; None before any time has passed."""
        seconds = sum(gap for gap, _ in self._gaps)
        return num_updates * seconds / len(self._gaps) if seconds else None

    def describe(self, num_updates_left: int) -> str:
        """Return speed and time left, such as `123.4 samples/s  0:12 left`; empty before any time has passed."""
        speed, left = self.samples_per_second, self.seconds_left(num_updates_left)
        return "" if speed is None or left is None else f"{speed:,.1f} samples/s  {duration(left)} left"


def describe_evaluation(epoch: float, result: EvalResult) -> str:
    """Return one line with the loss and the metrics that the task has."""
    parts = [f"evaluation  epoch {epoch:.2f}", f"loss {result.loss:.4f}"]
    if result.accuracy is not None:
        parts.append(f"accuracy {result.accuracy:.4f}")
    if result.f1 is not None:
        parts.append(f"F1 {result.f1:.4f}")
    if result.perplexity is not None:
        parts.append(f"perplexity {result.perplexity:,.2f}")
    return "  ".join(parts)


class QuietProgress:
    """Shows nothing."""

    def note(self, text: str) -> None:
        """Say nothing."""

    def rows(self, what: str, num_rows: int) -> AbstractContextManager[Callable[[int], None]]:
        """Show nothing."""
        return nullcontext(lambda done: None)

    def start(self, *, first_update: int, total_updates: int) -> None:
        """Show nothing."""

    def update(self, *, update: int, epoch: float, loss: float, lr: float, num_samples: int) -> None:
        """Show nothing."""

    def evaluation(self, *, epoch: float, result: EvalResult) -> None:
        """Show nothing."""

    def stop(self) -> None:
        """Show nothing."""


class LineProgress:
    """One plain line per logging interval, and one for the last update; no control characters."""

    def __init__(self, logging_steps: int, *, stream: TextIO | None = None, clock: Clock = time.monotonic) -> None:
        self._logging_steps = logging_steps
        self._stream, self._clock = stream, clock
        self._pace = Pace(logging_steps, clock)
        self._total_updates = 0

    def note(self, text: str) -> None:
        """Print one sentence."""
        self._print(plain(text))

    def rows(self, what: str, num_rows: int) -> AbstractContextManager[Callable[[int], None]]:
        """Print a line now and then, where it takes long."""
        return row_lines(plain(what), num_rows, write=self._print, clock=self._clock)

    def start(self, *, first_update: int, total_updates: int) -> None:
        """Start the clock."""
        self._total_updates = total_updates
        self._pace.start()

    def update(self, *, update: int, epoch: float, loss: float, lr: float, num_samples: int) -> None:
        """Print a line when the interval is over; its loss is the mean over the interval."""
        self._pace.update(loss, num_samples)
        if update % self._logging_steps == 0 or update == self._total_updates:
            where = f"update {update}/{self._total_updates}  epoch {epoch:.2f}"
            pace = self._pace.describe(self._total_updates - update)
            self._print(f"{where}  loss {self._pace.loss:.4f}  lr {rate(lr)}  {pace}".rstrip())

    def evaluation(self, *, epoch: float, result: EvalResult) -> None:
        """Print the metrics."""
        self._pace.interrupt()
        self._print(describe_evaluation(epoch, result))

    def stop(self) -> None:
        """Nothing is left to close."""

    def _print(self, line: str) -> None:
        stream = self._stream or sys.stderr
        encoding = getattr(stream, "encoding", None) or "utf-8"
        # One write: between the two of `print` a signal may end the run, whose error would not begin a line.
        stream.write(line.encode(encoding, "backslashreplace").decode(encoding) + "\n")
        stream.flush()


class RichProgress:
    """A bar with loss, learning rate, rows per second and time left; notes and evaluations scroll above it."""

    def __init__(self, logging_steps: int, *, console: Console | None = None, clock: Clock = time.monotonic) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        self._console, self._clock = console or make_console(stderr=True), clock
        self._pace = Pace(logging_steps, clock)
        self._total_updates = 0
        self._task: TaskID | None = None
        # stdout is left alone: with `> file` results must not end up in the terminal's bar.
        self._bar = Progress(
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}", markup=False),
            console=self._console,
            redirect_stdout=False,
            get_time=clock,
            expand=True,
        )

    def note(self, text: str) -> None:
        """Print one sentence above the bar."""
        self._console.print(plain(text), style="dim")

    def rows(self, what: str, num_rows: int) -> AbstractContextManager[Callable[[int], None]]:
        """Show a bar of its own, where it takes long."""
        return row_bar(plain(what), num_rows, console=self._console, clock=self._clock)

    def start(self, *, first_update: int, total_updates: int) -> None:
        """Show the bar; a resumed run starts where it stopped."""
        self._total_updates = total_updates
        self._task = self._bar.add_task("", total=total_updates, completed=first_update, figures="starting")
        self._bar.start()
        self._pace.start()

    def update(self, *, update: int, epoch: float, loss: float, lr: float, num_samples: int) -> None:
        """Advance the bar; its loss is the mean over the last logging interval."""
        self._pace.update(loss, num_samples)
        if self._task is not None:
            pace = self._pace.describe(self._total_updates - update)
            figures = f"loss {self._pace.loss:.4f}  lr {rate(lr)}  {pace}".rstrip()
            self._bar.update(self._task, completed=update, figures=figures)

    def evaluation(self, *, epoch: float, result: EvalResult) -> None:
        """Print the metrics above the bar."""
        self._pace.interrupt()
        self._console.print(describe_evaluation(epoch, result))

    def stop(self) -> None:
        """Leave the bar as it stands; may be called more than once."""
        self._bar.stop()
