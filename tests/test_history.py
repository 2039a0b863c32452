"""Which runs the history has, what it says of them, and that whatever keeps it from being written costs no run."""

from __future__ import annotations

import json
import os
import re
import stat
import sys
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from effcli import pipeline
from effcli.errors import InterruptedRunError
from effcli.history.file import history_file
from effcli.history.remember import remember
from effcli.measure.device_record import PhasePeak
from effcli.measure.out_of_memory_record import BatchSizes, OutOfMemoryFacts
from effcli.report.progress import QuietProgress
from tests import cuda_records, histories
from tests.commands import effcli
from tests.cuda_records import MIB
from tests.full_memory import no_memory_in
from tests.histories import pair
from tests.small_disks import files_of_at_most, small_disk

OPTIMIZER = """
import torch

class FailsLater(torch.optim.SGD):
    steps = 0

    def step(self, closure=None):
        self.steps += 1
        if self.steps > 1:
            raise RuntimeError("no more")
        return super().step(closure)
"""


@pytest.fixture
def history(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the file of the history, which is not there yet."""
    path = tmp_path / "state" / "h.jsonl"
    monkeypatch.setenv("EFFCLI_HISTORY", str(path))
    return path


@pytest.fixture
def run(distilbert: Path, data: Path, tmp_path: Path) -> tuple[object, ...]:
    return ("train", distilbert, "--data", data, "--max-steps", 2, "--out", tmp_path / "out", "--json")


def test_a_run_on_a_cpu_leaves_one_line_with_the_numbers_of_its_record_and_no_path(
    run: tuple[object, ...], history: Path, tmp_path: Path
) -> None:
    before = datetime.now().astimezone().replace(microsecond=0)
    flags = ("--optim", "adamw", "--batch-size", 3, "--accum", 2, "--profile-memory", "--engine", "accelerate")
    record = effcli(*run, *flags).record
    (line,) = histories.read(history)
    measured = record["measured"]
    assert line["pairs"] == {
        "optimizer_state": pair(record["optimizer"]["state_bytes"], measured["optimizer_state_bytes"]),
        "peak_allocated": pair(
            measured["profiled"]["planned_peak_allocated_bytes"], measured["profiled"]["peak_allocated_bytes"]
        ),
    }
    assert None not in {value for amounts in line["pairs"].values() for value in amounts.values()}
    expected = {
        "model": "encoder", "optimizer": "adamw", "engine": "accelerate", "precision": "fp32", "batch": "3 x 2",
        "device": "cpu", "card": None, "status": "completed",
    }  # fmt: skip
    assert line | expected == line
    assert line["torch"] == record["environment"]["packages"]["torch"]
    assert before <= datetime.fromisoformat(line["date"]) <= datetime.now().astimezone()
    for secret in (str(tmp_path), tmp_path.name, "d.csv", os.uname().nodename, "/"):
        assert secret not in json.dumps(line)
    assert stat.S_IMODE(history.stat().st_mode) == 0o600


@pytest.mark.usefixtures("without_plan")
def test_every_run_that_made_an_update_has_a_line_however_it_ended(
    run: tuple[object, ...], history: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {
        "model": {"name": str(tmp_path / "encoder")},
        "data": {"train": str(tmp_path / "d.csv")},
        "loop": {"max_steps": 4},
        "output": {"out": str(tmp_path / "parts")},
    }
    with pytest.raises(InterruptedRunError):
        pipeline.train(pipeline.resolve_spec(settings), progress=QuietProgress(), stop_after_updates=2)
    assert [line["status"] for line in histories.read(history)] == ["interrupted"]
    assert effcli("train", "--out", tmp_path / "parts", "--resume").code == 0
    (tmp_path / "fails_later.py").write_text(OPTIMIZER)
    monkeypatch.syspath_prepend(tmp_path)
    assert effcli(*run, "--optim", "fails_later:FailsLater").code == 7
    expected = ["interrupted", "completed", "failed"]
    assert [line["status"] for line in histories.read(history)] == expected

    assert effcli(*run, "--dry-run", "--overwrite").code == 0
    assert effcli("train", "--out", tmp_path / "parts", "--resume").code == 2  # complete already
    assert effcli("estimate", tmp_path / "encoder", "--optim", "adamw").code == 0
    no_memory_in(monkeypatch, "backward")
    assert effcli(*run, "--overwrite").code == 5  # in the first update
    assert [line["status"] for line in histories.read(history)] == expected


def test_a_run_on_a_card_is_kept_with_what_the_allocator_and_the_driver_said(history: Path) -> None:
    assert remember(cuda_records.completed()) is None
    (line,) = histories.read(history)
    assert (line["card"], line["driver_version"]) == ("NVIDIA GeForce RTX 4090", "570.86.15")
    assert line["pairs"] == {
        "optimizer_state": pair(8 * 786_432_000 + 416, 8 * 786_432_000 + 416),
        "peak_allocated": pair(14_944 * MIB, 15_006 * MIB),
        "peak_reserved": pair(16_600 * MIB, 16_726 * MIB),
        "context": pair(504_658_657, 574 * MIB),
        "process": pair(16_600 * MIB + 504_658_657, 17_300 * MIB),
    }
    assert line["context_how"] is None


def test_the_peaks_that_are_kept_are_those_of_updates(history: Path) -> None:
    assert remember(cuda_records.ALL["highest in the evaluation"]()) is None
    (line,) = histories.read(history)
    assert line["pairs"]["peak_allocated"] == pair(14_944 * MIB, 15_006 * MIB)  # an evaluation took 15,900
    assert line["pairs"]["process"]["predicted_bytes"] is not None


def test_what_a_process_held_has_no_prediction_where_an_evaluation_reserved_more_than_updates(history: Path) -> None:
    peaks = dict(cuda_records.allocator().phases)
    peaks["evaluation"] = PhasePeak(peak_allocated_bytes=12_300 * MIB, peak_reserved_bytes=17_000 * MIB)
    counted = cuda_records.allocator(phases=peaks, peak_reserved_bytes=17_000 * MIB)
    assert remember(cuda_records.completed(allocator=counted)) is None
    (line,) = histories.read(history)
    assert line["pairs"]["peak_reserved"] == pair(16_600 * MIB, 16_726 * MIB)
    assert line["pairs"]["process"] == pair(None, 17_300 * MIB)


@pytest.mark.parametrize("record", cuda_records.ALL.values(), ids=list(cuda_records.ALL))
def test_of_what_could_not_be_measured_there_is_no_pair(record: Callable[[], Any], history: Path) -> None:
    run = record()
    assert remember(run) is None
    if run.measured is None:
        assert not history.exists()
        return
    (line,) = histories.read(history)
    seen = run.measured.nvml
    assert ("context" in line["pairs"]) == (seen.context.last_bytes is not None)
    assert ("process" in line["pairs"]) == (seen.process.peak_bytes is not None)
    assert all(amounts["measured_bytes"] is not None for amounts in line["pairs"].values())


def test_a_run_that_begins_again_with_a_smaller_batch_is_kept_once(history: Path) -> None:
    sizes = {"accum": 1, "eval_batch": 8}
    facts = OutOfMemoryFacts(
        device="cuda:0", doing="backward", update=3, sizes=BatchSizes(micro=8, **sizes), rows=8, tokens=64,
        peak_allocated_bytes=1, peak_reserved_bytes=1, peak_rss_bytes=1, available_bytes=1, error="out of memory",
        next_sizes=BatchSizes(micro=4, **sizes),
    )  # fmt: skip
    first = cuda_records.completed(changes={"status": "failed", "out_of_memory": (facts,)})
    assert remember(first) is None
    assert not history.exists()
    assert remember(first.model_copy(update={"status": "completed"})) is None
    last = facts.model_copy(update={"next_sizes": None})
    assert remember(first.model_copy(update={"out_of_memory": (facts, last)})) is None
    assert [line["status"] for line in histories.read(history)] == ["completed", "failed"]


@pytest.mark.parametrize(
    ("name", "kept"),
    [
        ("distilbert-base-cased", "distilbert-base-cased"),
        ("some-group/some-model", "some-group/some-model"),
        ("built-in DistilBERT", "built-in DistilBERT"),
        ("/home/me/secret project/my-model", "my-model"),
        ("./my-model", "my-model"),
        ("models/here", "here"),
        ("one/two/three", "three"),
        ("~nobody-here/my-model/", "my-model"),
        ("caf\udce9", "caf\\udce9"),
        ("m" * 5000, "m" * 97 + "..."),
    ],
)
def test_a_model_is_named_as_it_was_given_and_a_folder_by_its_last_part(
    name: str, kept: str, history: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "models" / "here").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    record = cuda_records.planned()
    record = record.model_copy(update={"model": record.model.model_copy(update={"name": name})})
    assert remember(cuda_records.completed(record)) is None
    (line,) = histories.read(history)
    assert line["model"] == kept


def _folder(path: Path) -> None:
    path.mkdir(parents=True)


def _link(path: Path) -> None:
    path.parent.mkdir()
    path.symlink_to(path.with_name("elsewhere"))


def _pipe(path: Path) -> None:
    path.parent.mkdir()
    os.mkfifo(path)


def _file_above(path: Path) -> None:
    path.parent.write_text("")


REFUSALS = {
    "a folder": (_folder, "Is a directory"),
    "a link": (_link, "it is a symbolic link"),
    "a pipe": (_pipe, "it is no file"),
    "a file for a folder": (_file_above, "(Not a directory|File exists)"),
}


@pytest.mark.parametrize("refusal", REFUSALS)
def test_what_is_in_the_way_of_the_history_is_said_in_a_sentence(refusal: str, history: Path) -> None:
    make, why = REFUSALS[refusal]
    make(history)
    said = remember(cuda_records.completed())
    assert re.fullmatch(
        rf"The history does not have this run: '{re.escape(str(history))}': {why}\. EFFCLI_HISTORY=off keeps none\.",
        said or "",
    )
    assert not history.with_name("elsewhere").exists()


@pytest.mark.usefixtures("without_plan")
def test_a_run_ends_as_it_does_without_a_history_that_cannot_be_written(
    run: tuple[object, ...], history: Path, tmp_path: Path
) -> None:
    history.mkdir(parents=True)
    done = effcli(*run)
    assert done.record["status"] == "completed"
    assert done.stderr.count("The history does not have this run: ") == 1
    (tmp_path / "out" / "record.json").unlink()


def test_a_full_disk_costs_one_line_and_no_other(history: Path) -> None:
    for _ in range(3):
        assert remember(cuda_records.completed()) is None
    with files_of_at_most(history.stat().st_size + 100):
        assert "No space left on device. EFFCLI_HISTORY=off keeps none." in str(remember(cuda_records.completed()))
        assert "File too large" in str(remember(cuda_records.completed()))
    assert remember(cuda_records.completed()) is None
    whole = [text for text in history.read_text().splitlines() if text.endswith("}")]
    assert len(whole) == 4
    assert {json.loads(text)["optimizer"] for text in whole} == {"adamw"}


def test_a_read_only_home_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with small_disk(tmp_path / "home", "1m") as remount:
        monkeypatch.setenv("HOME", str(tmp_path / "home"))
        monkeypatch.delenv("EFFCLI_HISTORY")
        monkeypatch.delenv("XDG_STATE_HOME", raising=False)
        assert remember(cuda_records.completed()) is None
        remount("ro")
        assert "Read-only file system" in str(remember(cuda_records.completed()))
        remount("rw")
        assert len(histories.read(tmp_path / "home" / ".local" / "state" / "effcli" / "history.jsonl")) == 1


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, "home/.local/state/effcli/history.jsonl"),
        ({"XDG_STATE_HOME": "{top}/xdg"}, "xdg/effcli/history.jsonl"),
        ({"XDG_STATE_HOME": "relative"}, "home/.local/state/effcli/history.jsonl"),
        ({"EFFCLI_HISTORY": ""}, "home/.local/state/effcli/history.jsonl"),
        ({"EFFCLI_HISTORY": "~/mine.jsonl", "XDG_STATE_HOME": "{top}/xdg"}, "home/mine.jsonl"),
        ({"EFFCLI_HISTORY": "off"}, None),
        ({"EFFCLI_HISTORY": "OFF"}, None),
        ({"EFFCLI_HISTORY": "/dev/null"}, None),
    ],
)
@pytest.mark.skipif(sys.platform != "linux", reason="other systems have other folders")
def test_the_history_is_where_the_system_keeps_such_things_unless_the_environment_says_otherwise(
    environment: dict[str, str], expected: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("EFFCLI_HISTORY", "XDG_STATE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value.format(top=tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    assert remember(cuda_records.completed()) is None
    written = [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()]
    assert written == ([expected] if expected else [])


@pytest.mark.parametrize(
    ("platform", "environment", "expected"),
    [
        ("darwin", {}, "home/Library/Application Support/effcli/history.jsonl"),
        ("darwin", {"XDG_STATE_HOME": "{top}/xdg"}, "xdg/effcli/history.jsonl"),
        ("win32", {"LOCALAPPDATA": "{top}/local"}, "local/effcli/history.jsonl"),
        ("win32", {}, "home/AppData/Local/effcli/history.jsonl"),
    ],
)
def test_other_systems_have_other_folders(
    platform: str, environment: dict[str, str], expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("EFFCLI_HISTORY", "XDG_STATE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value.format(top=tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr("effcli.history.file.sys", SimpleNamespace(platform=platform))
        assert history_file() == tmp_path / expected


def test_without_a_home_folder_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "nowhere")
    monkeypatch.delenv("EFFCLI_HISTORY")
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    assert remember(cuda_records.completed()) == (
        "The history does not have this run: no home folder is known. EFFCLI_HISTORY=off keeps none."
    )


@pytest.mark.slow
def test_each_run_of_a_comparison_has_a_line(distilbert: Path, data: Path, history: Path, tmp_path: Path) -> None:
    flags = ("--model", distilbert, "--data", data, "--max-steps", 2, "--out", tmp_path / "both")
    assert effcli("compare", "adamw", "sgd", *flags).code == 0
    lines = histories.read(history)
    assert [(line["optimizer"], line["status"]) for line in lines] == [("adamw", "completed"), ("sgd", "completed")]
    assert all(line["pairs"]["peak_allocated"]["measured_bytes"] for line in lines)  # one update is always profiled
    assert effcli("compare", "adamw", "sgd", *flags, "--resume").code == 0  # complete already
    assert len(histories.read(history)) == 2
