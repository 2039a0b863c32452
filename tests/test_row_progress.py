"""How far tokenising is: silent where it is soon done, a line now and then, a bar in a terminal that always goes."""

from __future__ import annotations

import contextlib
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from effcli.data import tokenise as tokenising
from effcli.data.encode import encode_batch
from effcli.data.tokenise import texts, tokenise
from effcli.report.progress import LineProgress, QuietProgress, RichProgress
from tests.prepared import chosen, word_tokenizer
from tests.test_progress import Clock


def lines_of(*seconds: float, num_rows: int = 1000, per_call: int = 100) -> list[str]:
    """Return what is printed when each call comes so many seconds after the one before it."""
    clock, stream = Clock(), io.StringIO()
    with LineProgress(10, stream=stream, clock=clock).rows("Tokenising 'd.csv'", num_rows) as done:
        for number, wait in enumerate(seconds, start=1):
            clock.wait(wait)
            done(number * per_call)
    return stream.getvalue().splitlines()


def test_what_is_done_within_two_seconds_goes_unsaid() -> None:
    assert lines_of(*[0.19] * 10) == []


def test_a_line_says_how_many_rows_are_done_how_fast_and_how_long_it_takes() -> None:
    assert lines_of(2.0) == ["Tokenising 'd.csv': 100 of 1,000 rows  50 rows/s  0:18 left"]


def test_after_the_first_line_there_is_one_every_ten_seconds() -> None:
    lines = lines_of(*[1.0] * 50, num_rows=10_000)
    assert [re.search(r"(\d,?\d+) of", line)[1] for line in lines] == ["200", "1,200", "2,200", "3,200", "4,200"]


def test_nothing_is_said_when_all_rows_are_done() -> None:
    assert lines_of(60.0, num_rows=100) == []


def test_lines_hold_no_control_characters() -> None:
    clock, stream = Clock(), io.StringIO()
    with LineProgress(10, stream=stream, clock=clock).rows("Tokenising 'a\r\x1b[2Jb'", 10) as done:
        clock.wait(5)
        done(1)
    assert stream.getvalue() == "Tokenising 'a \\x1b[2Jb': 1 of 10 rows  0 rows/s  0:45 left\n"


def shown_in_a_terminal(*, seconds: float, failure: type[BaseException] | None = None) -> str:
    clock, stream = Clock(), io.StringIO()
    console = Console(file=stream, force_terminal=True, width=100, markup=False, color_system=None)
    progress = RichProgress(2, console=console, clock=clock)
    with contextlib.suppress(*([failure] if failure else [])), progress.rows("Tokenising '[/x].csv'", 1000) as done:
        for number in range(1, 5):
            clock.wait(seconds)
            done(number * 100)
            if failure is not None and number == 3:
                raise failure
    return stream.getvalue()


def test_a_terminal_shows_a_bar_that_goes_when_the_rows_are_done() -> None:
    text = shown_in_a_terminal(seconds=2)
    assert "Tokenising '[/x].csv'" in text
    assert "400 of 1,000 rows  50 rows/s  0:12 left" in text
    assert text.rstrip("\r").endswith("\x1b[2K"), repr(text[-40:])  # the line is erased


def test_a_terminal_shows_nothing_of_what_is_soon_done() -> None:
    assert shown_in_a_terminal(seconds=0.1) == ""


@pytest.mark.parametrize("failure", [ValueError, KeyboardInterrupt, SystemExit])
def test_the_cursor_comes_back_when_reading_fails(failure: type[BaseException]) -> None:
    text = shown_in_a_terminal(seconds=2, failure=failure)
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")


def test_quiet_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with QuietProgress().rows("Tokenising", 5) as done:
        done(5)
    assert capsys.readouterr() == ("", "")


def test_tokenising_tells_of_every_batch_and_a_second_run_of_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "d.jsonl"
    path.write_text("".join(json.dumps({"text": f"a {index}", "label": index % 2}) + "\n" for index in range(25)))
    clock, stream = Clock(), io.StringIO()

    def slow(batch: dict[str, list[Any]], **options: Any) -> dict[str, list[Any]]:
        clock.wait(4)
        return encode_batch(batch, **options)

    monkeypatch.setattr(tokenising, "encode_batch", slow)
    monkeypatch.setattr(tokenising, "ROWS_AT_ONCE", 10)
    raw, problem = chosen(path)
    watch = LineProgress(10, stream=stream, clock=clock).rows
    for _ in range(2):
        tokenise(raw, problem, word_tokenizer(), max_length=9, watch=watch)
    assert stream.getvalue() == f"Tokenising '{path}': 10 of 25 rows  2 rows/s  0:06 left\n"


def test_building_a_tokenizer_tells_how_far_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "d.jsonl"
    path.write_text("".join(json.dumps({"text": f"a {index}", "label": index % 2}) + "\n" for index in range(25)))
    monkeypatch.setattr(tokenising, "ROWS_AT_ONCE", 10)
    clock, stream = Clock(), io.StringIO()
    raw, problem = chosen(path)
    for _ in texts(raw, problem, LineProgress(10, stream=stream, clock=clock).rows):
        clock.wait(0.5)
    assert stream.getvalue() == "Building the tokenizer: 10 of 25 rows  2 rows/s  0:08 left\n"
