"""Where a run may be stopped, and what must be as it was for it to go on: its rows, its model, its checkpoints."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from effcli import pipeline
from effcli.report.progress import QuietProgress
from tests.commands import csv_file, effcli, same_weights, saved_weights, untimed
from tests.jobs import ENGINES
from tests.stopped_runs import settings, train_and_stop

OPTIMIZERS = ("adamw", "adafactor", "adam8bit", "adamw8bit-ao")
EVERY = [(optim, engine) for engine in ENGINES for optim in OPTIMIZERS]


@pytest.mark.parametrize(
    ("optim", "engine", "stops"),
    [
        ("adam8bit", "pytorch", (1, 5, 9)),
        *(pytest.param(*pair, tuple(range(1, 10)), marks=pytest.mark.slow) for pair in EVERY),
    ],
)
def test_a_run_may_be_stopped_after_any_update(
    optim: str, engine: str, stops: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    flags = settings(tmp_path, "whole", {"name": optim}, engine=engine)
    flags["output"] |= {"save_every": 1, "keep": 10}
    whole = pipeline.train(pipeline.resolve_spec(flags), progress=QuietProgress())
    weights = saved_weights(tmp_path / "whole")
    if optim == "adam8bit":
        assert whole.measured.optimizer_state_bytes == 295_648
    for after in stops:
        out = tmp_path / f"after-{after}"
        out.mkdir()
        shutil.copy(tmp_path / "whole" / "recipe.yaml", out)
        name = f"checkpoints/update-{after:08d}"
        shutil.copytree(tmp_path / "whole" / name, out / name)
        spec = pipeline.resolve_spec({"output": {"save_every": 20}}, resume_from=str(out))
        rest = pipeline.train(spec, progress=QuietProgress(), resume=True)
        assert untimed(rest.history) == untimed(whole.history)
        assert rest.eval == whole.eval
        assert rest.measured.optimizer_state_bytes == whole.measured.optimizer_state_bytes
        assert rest.measured.tensors == whole.measured.tensors
        assert same_weights(saved_weights(out), weights)


def test_seconds_of_training_go_on_where_a_run_is_resumed(tmp_path: Path, without_plan: None) -> None:
    flags = settings(tmp_path, "run", {"name": "adamw"})
    train_and_stop(flags, after=6)
    before = [line["training_s"] for line in json.loads((tmp_path / "run" / "record.json").read_text())["history"]]
    rest = pipeline.train(
        pipeline.resolve_spec({}, resume_from=str(tmp_path / "run")), progress=QuietProgress(), resume=True
    )
    seconds = [line.training_s for line in rest.history]
    assert seconds[:6] == before
    assert all(earlier < later for earlier, later in pairwise([0.0, *seconds]))
    made = rest.throughput.updates_per_second * (seconds[-1] - seconds[5])
    assert made == pytest.approx(4)


def with_another_label(folder: Path) -> None:
    lines = (folder / "d.csv").read_text().splitlines()
    lines[3] = lines[3].rpartition(",")[0] + ("," + "10"[int(lines[3][-1])])
    (folder / "d.csv").write_text("\n".join(lines) + "\n")


def with_two_rows_exchanged(folder: Path) -> None:
    header, *lines = (folder / "d.csv").read_text().splitlines()
    (folder / "d.csv").write_text("\n".join([header, *lines[1::-1], *lines[2:]]) + "\n")


def with_more_dropout(folder: Path) -> None:
    config = json.loads((folder / "encoder" / "config.json").read_text())
    (folder / "encoder" / "config.json").write_text(json.dumps(config | {"dropout": 0.5}))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (with_another_label, "the 20 training rows are not those that the run was started with"),
        (with_two_rows_exchanged, "the 20 training rows are not those"),
        (lambda folder: csv_file(folder / "d.csv", 24), "had 20 rows and has 24 now"),
        (lambda folder: (folder / "d.csv").unlink(), "d.csv"),
        (with_more_dropout, "is not the one that the run was started with"),
        (lambda folder: shutil.rmtree(folder / "encoder"), "encoder"),
    ],
)
def test_a_change_of_what_is_read_is_noticed_in_one_line(
    change: Callable[[Path], Any], said: str, tmp_path: Path
) -> None:
    train_and_stop(settings(tmp_path, "o", {}), after=1)
    before = (tmp_path / "o" / "record.json").read_bytes()
    change(tmp_path)
    failed = effcli("train", "--out", tmp_path / "o", "--resume")
    assert failed.code == 2
    assert said in failed.error
    assert (tmp_path / "o" / "record.json").read_bytes() == before
    assert len(list((tmp_path / "o" / "checkpoints").iterdir())) == 1


def test_a_run_is_not_resumed_to_end_before_what_is_done_but_may_end_there(tmp_path: Path) -> None:
    train_and_stop(settings(tmp_path, "o", {}), after=7)
    resume = ("train", "--out", tmp_path / "o", "--resume")
    refused = effcli(*resume, "--max-steps", 6)
    assert refused.code == 2
    assert "update 7 is already done, and the run would end at update 6; give at least --max-steps 7" in refused.error
    assert "give at least --epochs 2" in effcli(*resume, "--epochs", 1).error
    assert not (tmp_path / "o" / "model").exists()
    record = effcli(*resume, "--max-steps", 7, "--json").record
    assert (record["status"], len(record["history"])) == ("completed", 7)
    assert record["eval"][-1]["update"] == 7
    assert saved_weights(tmp_path / "o")


def test_the_same_file_and_model_by_another_path_are_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train_and_stop(settings(tmp_path, "o", {}), after=7)
    monkeypatch.chdir(tmp_path)
    csv_file(tmp_path / "copy.csv", 20)
    resume = ("train", "encoder/", "--out", tmp_path / "o", "--resume")
    refused = effcli(*resume, "--data", "copy.csv")
    assert refused.code == 2
    assert "other values of --data (data.train);" in refused.error
    done = effcli(*resume, "--data", "./d.csv")
    assert done.code == 0, done.stderr


def test_activations_may_be_recomputed_from_where_a_run_goes_on(tmp_path: Path) -> None:
    whole = pipeline.train(pipeline.resolve_spec(settings(tmp_path, "whole", {})), progress=QuietProgress())
    train_and_stop(settings(tmp_path, "o", {}), after=3)
    done = effcli("train", "--out", tmp_path / "o", "--resume", "--gradient-checkpointing", "--json")
    assert "--gradient-checkpointing changed: results agree, but not in every bit." in done.record["notes"]
    assert done.record["spec"]["loop"]["gradient_checkpointing"]
    losses = [line["loss"] for line in done.record["history"]]
    assert losses == pytest.approx([line.loss for line in whole.history], rel=1e-5)


def test_damaged_checkpoints_are_said_noted_and_replaced(tmp_path: Path) -> None:
    flags = settings(tmp_path, "o", {})
    flags["output"] |= {"save_every": 1, "keep": 3}
    train_and_stop(flags, after=3)
    for update in (2, 3):
        weights = tmp_path / "o" / "checkpoints" / f"update-{update:08d}" / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-1])
    done = effcli("train", "--out", tmp_path / "o", "--resume", "--save-every", 4, "--json")
    notes = [note for note in done.record["notes"] if "is damaged" in note]
    assert [f"update-{update:08d}' is damaged" in note for update, note in zip((3, 2), notes, strict=True)] == [
        True
    ] * 2
    assert all(note in done.stderr for note in notes)
    assert [path.name[-2:] for path in sorted((tmp_path / "o" / "checkpoints").iterdir())] == ["04", "08", "10"]
