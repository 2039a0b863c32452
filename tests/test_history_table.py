"""The history as a table: the latest runs with what was predicted and measured, and a line where there are none."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from effcli.history.read import read_history
from effcli.report.history import render_history
from tests import histories
from tests.histories import MIB, line, on_cpu, pair


@pytest.fixture
def shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return what shows a history of these lines."""

    def show(*lines: dict[str, Any] | str, width: int = 80, **environment: str) -> str:
        path = histories.write(tmp_path / "h.jsonl", *lines)
        monkeypatch.setenv("EFFCLI_HISTORY", environment.get("history", str(path)))
        console = Console(file=io.StringIO(), width=width, markup=False, emoji=False, highlight=False)
        render_history(read_history(), console)
        text: str = console.file.getvalue()  # type: ignore[attr-defined]
        assert all(len(row) <= width for row in text.splitlines()[1:])  # a line that stands alone is not broken
        return text.replace(str(tmp_path), "")

    return show


def rows(text: str) -> list[list[str]]:
    """Return the cells of the rows with amounts."""
    return [
        [cell.strip() for cell in row.strip().split("  ") if cell.strip()]
        for row in text.splitlines()
        if row.startswith("  ")
    ]


def test_each_run_has_what_was_predicted_and_measured_the_newest_first(shown: Any) -> None:
    text = shown(on_cpu(date="2029-12-24T10:00:00+00:00", model="gpt2"), line(status="interrupted"))
    assert rows(text[text.index("The newest first") :]) == [
        ["optimizer state", "127.80 MiB", "127.80 MiB", "0 %"],
        ["peak allocated", "1,000.00 MiB", "1,010.00 MiB", "-0.99 %"],
        ["peak reserved", "1.07 GiB", "1.09 GiB", "-1.79 %"],
        ["context", "481.28 MiB", "612.00 MiB", "-21.36 %"],
        ["this process", "1.54 GiB", "1.69 GiB", "-8.72 %"],
        ["optimizer state", "4.16 MiB", "4.16 MiB", "0 %"],
    ]
    one_line = " ".join(text.split())
    newest = "2030-01-31 10:11 distilbert-base-cased, adam8bit, bf16, 8 x 2, NVIDIA GeForce RTX 4090, interrupted"
    assert newest in one_line
    assert "2029-12-24 10:00 gpt2, adam8bit, bf16, 8 x 2, cpu" in one_line
    assert one_line.index(newest) < one_line.index("2029-12-24")


def test_what_is_missing_on_a_side_is_not_shown_as_nothing(shown: Any) -> None:
    text = shown(on_cpu(pairs={"peak_allocated": pair(None, 5 * MIB), "context": pair(3 * MIB, None)}))
    assert rows(text[text.index("The newest first") :]) == [
        ["peak allocated", "n/a", "5.00 MiB"],
        ["context", "3.00 MiB", "n/a"],
    ]


@pytest.mark.parametrize(
    ("predicted", "measured", "expected"),
    [
        (1_000_000, 1_000_000, "0 %"),
        (1_000_001, 1_000_000, "0.00 %"),
        (999_999, 1_000_000, "0.00 %"),
        (1_234_560, 1_000_000, "+23.46 %"),
        (0, 1_000_000, "-100.00 %"),
    ],
)
def test_an_error_has_a_sign_where_it_shows(predicted: int, measured: int, expected: str, shown: Any) -> None:
    text = shown(on_cpu(pairs={"peak_allocated": pair(predicted, measured)}))
    assert rows(text[text.index("The newest first") :])[0][-1] == expected


def test_the_errors_of_completed_runs_peaks_are_summed_up(shown: Any) -> None:
    def peaked(predicted: int, measured: int, **changes: Any) -> dict[str, Any]:
        return line(pairs={"peak_allocated": pair(predicted, measured)}, **changes)

    text = " ".join(
        shown(
            peaked(110, 100), peaked(95, 100), peaked(101, 100), on_cpu(), peaked(50, 100, status="interrupted"),
            peaked(50, 100, status="failed"), "rubbish", "more of it", width=300,
        ).split()
    )  # fmt: skip
    assert "peaks compared in 3 completed runs: median error 5.00 %, largest 10.00 %" in text
    assert "runs 6 peaks" in text
    assert "left out 2 lines that cannot be read" in text
    assert "file /h.jsonl; EFFCLI_HISTORY=FILE names another, EFFCLI_HISTORY=off keeps none" in text


def test_without_a_measured_peak_it_says_how_one_comes_about(shown: Any) -> None:
    assert "n/a: no completed run measured its peak; on a CPU --profile-memory does" in " ".join(
        shown(on_cpu()).split()
    )


def test_of_many_runs_the_latest_twenty_are_shown(shown: Any) -> None:
    text = shown(*(on_cpu(optimizer=f"optimizer-{number}") for number in range(1, 31)))
    assert "runs        30; the latest 20 are shown, --json has all" in text
    assert [number for number in range(1, 31) if f"optimizer-{number}," in " ".join(text.split())] == list(
        range(11, 31)
    )


def test_a_context_that_was_not_measured_for_the_process_itself_says_so(shown: Any) -> None:
    text = " ".join(shown(line(context_how="the whole device less what was in use before")).split())
    assert "context (the whole device less what" in text


@pytest.mark.parametrize("width", [40, 59])
def test_a_narrow_terminal_breaks_names_between_words_and_amounts_nowhere(width: int, shown: Any) -> None:
    text = shown(line(), on_cpu(), width=width)
    words = text.split()
    assert words.count("distilbert-base-cased,") == 2
    assert text.index(" cpu\n") < text.index("GeForce")
    for amounts in ("4.16 MiB, 4.16 MiB, 0 %", "481.28 MiB, 612.00 MiB, -21.36 %", "1.54 GiB, 1.69 GiB, -8.72 %"):
        assert f"    {amounts}\n" in text


@pytest.mark.parametrize("width", [20, 40, 80, 200])
def test_names_are_shown_as_they_are_and_harm_no_terminal(width: int, shown: Any) -> None:
    text = shown(on_cpu(model="[bold]m[/bold]\x1b[31m\nx", optimizer=":smile:"), width=width)
    assert "\x1b" not in text
    if width == 80:
        assert "[bold]m[/bold]\\x1b[31m x, :smile:, bf16" in " ".join(text.split())


def test_an_empty_history_says_in_a_line_how_it_fills(shown: Any) -> None:
    assert shown() == (
        "No runs yet: each run of `effcli train` and `effcli compare` that made an update adds a line to '/h.jsonl' at "
        "its end; EFFCLI_HISTORY=off keeps none.\n"
    )
    assert shown("rubbish").startswith("No runs yet (1 line that cannot be read): ")
    assert shown(line(), history="off") == "No history is kept: EFFCLI_HISTORY=off.\n"


def test_a_history_that_cannot_be_read_says_why_in_a_line(shown: Any, tmp_path: Path) -> None:
    assert shown(history=str(tmp_path)) == "The history '' cannot be read: it is no file.\n"


def test_the_record_has_all_runs_the_oldest_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [on_cpu(), line()]
    path = histories.write(tmp_path / "h.jsonl", *lines)
    monkeypatch.setenv("EFFCLI_HISTORY", str(path))
    document = read_history().model_dump(mode="json")
    assert document["runs"] == lines
    assert (document["file"], document["num_damaged"], document["reason"]) == (str(path), 0, None)
    assert document["peak_errors"] == {"num_runs": 1, "median_error": 10 / 1010, "largest_error": 10 / 1010}
