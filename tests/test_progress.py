"""Progress on stderr, with a clock that the test turns."""

from __future__ import annotations

import io
import re
import sys

import pytest
from rich.console import Console

from effcli.engines.base import EvalResult
from effcli.report.progress import LineProgress, QuietProgress, RichProgress, make_progress


class Clock:
    """Seconds that pass only when told."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def wait(self, seconds: float) -> None:
        self.now += seconds


class Shown:
    """A line progress, its clock and what it printed."""

    def __init__(self, logging_steps: int = 2) -> None:
        self.clock, self.stream = Clock(), io.StringIO()
        self.progress = LineProgress(logging_steps, stream=self.stream, clock=self.clock)

    def update(self, update: int, *, seconds: float = 1.0, loss: float = 0.5, num_samples: int = 8) -> None:
        self.clock.wait(seconds)
        self.progress.update(update=update, epoch=update / 4, loss=loss, lr=4.6e-5, num_samples=num_samples)

    @property
    def lines(self) -> list[str]:
        return self.stream.getvalue().splitlines()


def test_one_line_per_logging_interval_and_one_for_the_last_update() -> None:
    shown = Shown()
    shown.progress.start(first_update=0, total_updates=5)
    for update in range(1, 6):
        shown.update(update, seconds=0.5)
    shown.progress.stop()
    assert shown.lines == [
        "update 2/5  epoch 0.50  loss 0.5000  lr 4.6e-05  16.0 samples/s  0:02 left",
        "update 4/5  epoch 1.00  loss 0.5000  lr 4.6e-05  16.0 samples/s  0:01 left",
        "update 5/5  epoch 1.25  loss 0.5000  lr 4.6e-05  16.0 samples/s  0:00 left",
    ]


def test_the_loss_of_a_line_is_the_mean_over_its_interval() -> None:
    shown = Shown()
    shown.progress.start(first_update=0, total_updates=4)
    for update, loss in enumerate((9.0, 1.0, 0.2, 0.4), start=1):
        shown.update(update, loss=loss)
    assert [re.search(r"loss (\S+)", line)[1] for line in shown.lines] == ["5.0000", "0.3000"]


def test_time_left_is_told_in_hours_and_minutes() -> None:
    shown = Shown(logging_steps=1)
    shown.progress.start(first_update=0, total_updates=62)
    shown.update(1, seconds=61)
    shown.update(2, seconds=61)
    assert shown.lines[0].endswith("0.1 samples/s  1:02:01 left")
    assert shown.lines[1].endswith("1:01:00 left")


def test_an_evaluation_is_printed_and_its_time_is_not_training_time() -> None:
    shown = Shown(logging_steps=1)
    shown.progress.start(first_update=0, total_updates=3)
    shown.update(1, seconds=2)
    shown.clock.wait(600)
    shown.progress.evaluation(epoch=0.25, result=EvalResult(loss=0.25, accuracy=0.875, f1=0.9))
    shown.clock.wait(300)  # a checkpoint is written
    shown.update(2, seconds=2)
    shown.update(3, seconds=2)
    assert shown.lines[1] == "evaluation  epoch 0.25  loss 0.2500  accuracy 0.8750  F1 0.9000"
    assert all("4.0 samples/s" in shown.lines[index] for index in (0, 2, 3))
    assert shown.lines[2].endswith("0:02 left")


def test_a_language_model_is_evaluated_by_perplexity() -> None:
    shown = Shown()
    shown.progress.evaluation(epoch=1.0, result=EvalResult(loss=2.0, perplexity=7.389))
    assert shown.lines == ["evaluation  epoch 1.00  loss 2.0000  perplexity 7.39"]


def test_speed_is_left_out_while_no_time_has_passed() -> None:
    shown = Shown(logging_steps=1)
    shown.progress.start(first_update=0, total_updates=2)
    shown.update(1, seconds=0)
    assert shown.lines == ["update 1/2  epoch 0.25  loss 0.5000  lr 4.6e-05"]


def test_speed_follows_the_last_updates_not_the_slow_beginning() -> None:
    shown = Shown(logging_steps=1)
    shown.progress.start(first_update=0, total_updates=500)
    shown.update(1, seconds=90)
    for update in range(2, 302):
        shown.update(update, seconds=0.5)
    assert "16.0 samples/s" in shown.lines[-1]


def test_a_note_is_one_plain_line_whatever_it_holds() -> None:
    shown = Shown()
    shown.progress.note("path runs/[v2]/[/some]\nlabel [unused1] \x1b[31mred\r")
    assert shown.lines == ["path runs/[v2]/[/some] label [unused1] \\x1b[31mred "]


def test_an_encoding_without_the_characters_is_no_error() -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    LineProgress(1, stream=stream).note("é")
    assert raw.getvalue() == b"\\xe9\n"


def test_lines_go_to_stderr_and_nothing_to_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    progress = make_progress(1, quiet=False)
    progress.note("hello")
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "hello\n")


def test_quiet_says_nothing_at_all(capsys: pytest.CaptureFixture[str]) -> None:
    progress = make_progress(1, quiet=True, is_terminal=True)
    progress.note("hello")
    progress.start(first_update=0, total_updates=1)
    progress.update(update=1, epoch=1.0, loss=1.0, lr=1.0, num_samples=1)
    progress.evaluation(epoch=1.0, result=EvalResult(loss=1.0))
    progress.stop()
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "")


def test_the_display_follows_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(make_progress(10, quiet=False), LineProgress)
    assert isinstance(make_progress(10, quiet=False, is_terminal=True), RichProgress)
    assert isinstance(make_progress(10, quiet=True, is_terminal=False), QuietProgress)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert isinstance(make_progress(10, quiet=False), RichProgress)
    monkeypatch.setenv("TERM", "dumb")
    assert isinstance(make_progress(10, quiet=False), LineProgress)


def test_the_bar_shows_loss_rate_speed_and_time_left_and_leaves_stdout_alone() -> None:
    clock, stream = Clock(), io.StringIO()
    console = Console(file=stream, force_terminal=True, width=80, markup=False, color_system=None)
    progress = RichProgress(2, console=console, clock=clock)
    stdout = sys.stdout
    progress.start(first_update=2, total_updates=40)
    assert sys.stdout is stdout
    for update in (3, 4):
        clock.wait(0.5)
        progress.update(update=update, epoch=0.1, loss=0.25 * update, lr=4.6e-5, num_samples=8)
    progress.evaluation(epoch=0.1, result=EvalResult(loss=0.25, accuracy=0.5))
    progress.note("label [unused1] [/some]")
    progress.stop()
    progress.stop()
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", stream.getvalue())
    assert " 2/40 starting" in text
    assert " 4/40 loss 0.8750  lr 4.6e-05  16.0 samples/s  0:18 left" in text
    assert "evaluation  epoch 0.10  loss 0.2500  accuracy 0.5000" in text
    assert "label [unused1] [/some]" in text
    assert "…" not in text
