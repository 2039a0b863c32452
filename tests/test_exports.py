"""Files beside the terminal: refused before any work, written whole, harmless in a spreadsheet."""

from __future__ import annotations

import csv
import importlib.util
import io
from pathlib import Path

import pytest

from effcli.errors import MissingExtraError, UsageError, WriteError
from effcli.measure.comparison_record import COMPARED, ComparisonRecord
from effcli.report.exports import check_exports, write_exports
from tests import comparisons
from tests.commands import effcli


def rows_of(record: ComparisonRecord, tmp_path: Path) -> list[dict[str, str]]:
    path = tmp_path / "rows.csv"
    assert write_exports(record, html=None, plot=None, csv=path) == {"csv": path}
    return list(csv.DictReader(io.StringIO(path.read_text())))


@pytest.mark.parametrize(
    ("flag", "name", "endings"),
    [
        ("html", "page.pdf", ".html or .htm"),
        ("html", "page", ".html or .htm"),
        ("plot", "plot.jpg", ".png or .svg"),
        ("csv", "rows.xlsx", ".csv"),
    ],
)
def test_an_ending_that_a_flag_does_not_write_is_refused(flag: str, name: str, endings: str) -> None:
    with pytest.raises(UsageError, match=f"--{flag} '{name}' must end in {endings}"):
        check_exports(**{"html": None, "plot": None, "csv": None, flag: Path(name)})


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    folder = tmp_path / "x.csv"
    folder.mkdir()
    with pytest.raises(UsageError, match="is a folder; give a file"):
        check_exports(html=None, plot=None, csv=folder)


def test_a_folder_below_the_home_is_no_file_either(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x.csv").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(UsageError, match="is a folder; give a file"):
        check_exports(html=None, plot=None, csv="~/x.csv")


def test_endings_are_read_in_any_case_and_nothing_asked_is_nothing_refused() -> None:
    check_exports(html="A.HTML", plot="a.SVG", csv="a.CSV")
    check_exports(html=None, plot=None, csv=None)


@pytest.mark.parametrize(("flag", "name"), [("html", "a.html"), ("plot", "a.png")])
def test_without_the_packages_that_draw_the_command_that_installs_them_is_named(
    flag: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "altair" else find(name, *rest)
    )
    with pytest.raises(MissingExtraError, match=r"pip install 'effcli\[plot\]'"):
        check_exports(**{"html": None, "plot": None, "csv": None, flag: name})
    with pytest.raises(MissingExtraError, match=r"--html a\.html needs"):  # whatever order a set has
        check_exports(html="a.html", plot="a.png", csv=None)
    check_exports(html=None, plot=None, csv="a.csv")


def test_each_run_is_a_row_of_plain_numbers(tmp_path: Path) -> None:
    record = comparisons.two_seeds()
    rows = rows_of(record, tmp_path)
    assert [(row["name"], row["seed"]) for row in rows] == [
        (name, seed) for name in comparisons.KINDS for seed in ("42", "43")
    ]
    for row, run in zip(rows, record.runs, strict=True):
        assert run.measured is not None
        assert run.throughput is not None
        assert int(row["measured_state_bytes"]) == run.measured.optimizer_state_bytes
        assert int(row["predicted_state_bytes"]) == run.optimizer.state_bytes
        assert int(row["peak_allocated_bytes"]) == run.measured.peak_allocated_bytes
        assert int(row["peak_rss_bytes"]) == run.measured.peak_rss_bytes
        assert float(row["seconds_per_update"]) == pytest.approx(1 / run.throughput.updates_per_second)
        assert float(row["final_loss"]) == run.history[-1].loss
        assert float(row["eval_accuracy"]) == run.eval[-1].eval_accuracy
        assert row["precision"] == "fp32"
        assert row["rows_per_update"] == "8"
    assert set(COMPARED) <= rows[0].keys()


def test_what_is_not_known_is_empty_and_the_reason_stands_beside_it(tmp_path: Path) -> None:
    adamw, adafactor, adam8bit, lion = rows_of(comparisons.one_failed(), tmp_path)
    assert adamw["failure"] == ""
    assert adafactor["status"] == "failed"
    assert adafactor["failure"].startswith("the loss is not finite")
    assert adafactor["exit_code"] == "7"
    assert adafactor["measured_state_bytes"] == ""
    assert adafactor["updates"] == ""
    assert adam8bit["updates"] == "20"
    assert lion["status"] == "missing"
    assert lion["predicted_state_bytes"] == ""
    assert lion["model"] == ""


def test_a_number_that_is_not_finite_is_empty(tmp_path: Path) -> None:
    run = comparisons.run("adamw")
    broken = run.model_copy(update={"eval": (run.eval[-1].model_copy(update={"eval_loss": float("nan")}),)})
    (row,) = rows_of(comparisons.comparison([broken]), tmp_path)
    assert row["eval_loss"] == ""


@pytest.mark.parametrize("text", ["=1+1", "+1", "-1", "@x", "\t=1", " =1", "\n=1", "\r@x"])
def test_no_text_becomes_a_formula(text: str, tmp_path: Path) -> None:
    run = comparisons.run("adamw")
    optimizer = run.optimizer.model_copy(update={"name": text})
    failed = run.model_copy(update={"optimizer": optimizer, "failure": text, "model": comparisons.records.model(text)})
    (row,) = rows_of(comparisons.comparison([failed]), tmp_path)
    for column in ("name", "optimizer", "failure", "model"):
        assert row[column].startswith("'")
    assert float(row["seconds_per_update"]) > 0


def test_hostile_names_stay_in_their_cells(tmp_path: Path) -> None:
    record = comparisons.hostile()
    rows = rows_of(record, tmp_path)
    assert len(rows) == len(record.attempts)
    assert rows[0]["name"] == comparisons.HOSTILE_NAME
    assert not any("\x1b" in cell or "\n" in cell for row in rows for cell in row.values())


def test_a_comparison_of_nothing_is_an_empty_file(tmp_path: Path) -> None:
    assert rows_of(comparisons.comparison([]), tmp_path) == []


def test_all_files_are_written_and_named(tmp_path: Path) -> None:
    files = {"html": tmp_path / "a" / "page.html", "plot": tmp_path / "plot.png", "csv": tmp_path / "rows.csv"}
    written = write_exports(comparisons.three(), **files)
    assert written == {"page": files["html"], "plot": files["plot"], "csv": files["csv"]}
    assert all(path.stat().st_size for path in written.values())
    assert files["plot"].read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("flag", ["html", "plot", "csv"])
def test_a_place_that_cannot_be_written_to_is_told(flag: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    names = {"html": "p.html", "plot": "p.svg", "csv": "p.csv"}
    with pytest.raises(WriteError, match="could not write"):
        write_exports(
            comparisons.three(), **{"html": None, "plot": None, "csv": None, flag: tmp_path / "file" / names[flag]}
        )


def test_the_home_of_a_user_who_is_not_there_is_a_name_like_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    check_exports(html=None, plot=None, csv="~no-such-user/x.csv")
    written = write_exports(comparisons.planned_only(), html=None, plot=None, csv="~no-such-user/x.csv")
    assert written["csv"].read_text().startswith("name,seed,status")
    for command in (("train", "--out"), ("estimate", "--model"), ("train", "--data"), ("train", "--recipe")):
        result = effcli(*command, "~no-such-user/y", "--resume" if command[1] == "--out" else "--json")
        assert result.code not in (0, 1), result.stderr
