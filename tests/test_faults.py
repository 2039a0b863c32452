"""Faults around a run: full or read-only disks, data that is gone, workers that die. One line each, nothing lost."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from effcli.data.batches import Collator
from effcli.engines import checkpoint
from effcli.pipeline.running import run as run_module
from effcli.pipeline.running import saving
from tests.commands import Result, effcli, same_weights, saved_weights, untimed
from tests.jobs import ENGINES
from tests.small_disks import files_of_at_most, small_disk

pytestmark = pytest.mark.usefixtures("without_plan")

ARGUMENTS = ("--epochs", 2, "--save-every", 2, "--json")
"""Six updates of the twelve rows in batches of four; a checkpoint takes about 1.6 MiB."""


@pytest.fixture
def run(distilbert: Path, data: Path, tmp_path: Path) -> tuple[object, ...]:
    return ("train", distilbert, "--data", data, "--batch-size", 4, *ARGUMENTS, "--out", tmp_path / "run")


def status(out: Path) -> tuple[str, str]:
    record = json.loads((out / "record.json").read_text())
    return record["status"], record["failure"]


def checkpoints(out: Path) -> list[str]:
    return sorted(path.name for path in (out / "checkpoints").iterdir())


def limited(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, *, call: int = 1, num_bytes: int = 1000) -> None:
    """Let the n-th call of a function find a disk that takes no more than so many bytes of a file."""
    write, calls = getattr(owner, name), iter(range(1, 100))

    def on_a_full_disk(*args: Any, **kwargs: Any) -> Any:
        if next(calls) != call:
            return write(*args, **kwargs)
        with files_of_at_most(num_bytes):
            return write(*args, **kwargs)

    monkeypatch.setattr(owner, name, on_a_full_disk)


def check_resumed(run: tuple[object, ...], tmp_path: Path) -> None:
    """Check that the run goes on to the weights of one that was never disturbed."""
    resumed = effcli("train", "--out", run[-1], "--resume", "--json")
    whole = effcli(*run[:-1], tmp_path / "whole")
    assert untimed(resumed.record["history"]) == untimed(whole.record["history"])
    assert same_weights(saved_weights(Path(str(run[-1]))), saved_weights(tmp_path / "whole"))


def test_a_checkpoint_that_finds_the_disk_full_stops_the_run_at_the_one_before(
    run: tuple[object, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        limited(patched, checkpoint, "save_weights", call=2)
        failed = effcli(*run)
    out = tmp_path / "run"
    assert failed.code == 9
    assert failed.error == (
        f"could not write '{out}/checkpoints/update-00000004': File too large; '{out}/checkpoints/update-00000002' is "
        "intact: make room, then continue with --resume"
    )
    assert status(out) == ("failed", failed.error)
    assert checkpoints(out) == ["update-00000002"]
    assert not (out / "model").exists()
    check_resumed(run, tmp_path)


def test_a_run_that_finds_the_disk_full_before_its_first_checkpoint_starts_again_where_it_is_told_to(
    run: tuple[object, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        limited(patched, checkpoint, "save_weights")
        failed = effcli(*run)
    assert failed.error.endswith(
        "File too large; no intact checkpoint was saved before: make room, then --resume starts from the first update"
    )
    check_resumed(run, tmp_path)


@pytest.mark.parametrize(("owner", "name"), [(saving, "save_model"), (PreTrainedTokenizerFast, "save_pretrained")])
def test_a_final_model_or_tokenizer_that_finds_the_disk_full_can_be_written_later(
    owner: Any, name: str, run: tuple[object, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        limited(patched, owner, name, num_bytes=10)
        failed = effcli(*run)
    assert failed.code == 9
    assert failed.error.startswith(f"could not write '{tmp_path}/run/model': File too large; ")
    assert not (tmp_path / "run" / "model").exists()
    assert status(tmp_path / "run")[0] == "failed"
    check_resumed(run, tmp_path)


def test_the_first_error_is_not_lost_where_the_record_cannot_be_written_either(
    run: tuple[object, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limited(monkeypatch, checkpoint, "save_weights", call=2)
    limited(monkeypatch, run_module, "write_text")
    failed = effcli(*run)
    assert failed.code == 9
    assert "update-00000004" in failed.error
    assert f"The record of the failed run is missing as well: could not write '{tmp_path}/run/record.json'" in (
        failed.stderr
    )
    assert not (tmp_path / "run" / "record.json").exists()


def test_a_record_that_cannot_be_written_at_the_end_is_an_error_and_the_model_is_there(
    run: tuple[object, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limited(monkeypatch, run_module, "write_text")
    failed = effcli(*run)
    assert failed.code == 9
    assert "record.json" in failed.error
    assert saved_weights(tmp_path / "run")


def test_a_recipe_that_cannot_be_written_stops_the_run_before_its_first_update(
    run: tuple[object, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from effcli.pipeline.running import training

    limited(monkeypatch, training, "write_recipe", num_bytes=100)
    failed = effcli(*run)
    assert failed.code == 9
    assert "recipe.yaml" in failed.error
    assert list((tmp_path / "run").iterdir()) == []


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[tuple[Path, Callable[[str], None]]]:
    """Return a disk in memory that the first of three checkpoints fits on, and what changes its options."""
    with small_disk(tmp_path / "disk", "3m") as change:
        yield tmp_path / "disk", change


def test_a_small_disk_fills_up_and_the_run_goes_on_when_there_is_room(
    run: tuple[object, ...], disk: tuple[Path, Callable[[str], None]], tmp_path: Path
) -> None:
    folder, change = disk
    out = folder / "run"
    failed = effcli(*run[:-1], out)
    assert failed.code == 9
    assert "No space left on device" in failed.error
    assert checkpoints(out) == ["update-00000002"]
    assert not (out / "model").exists()
    assert status(out) == ("failed", failed.error)
    change("size=30m")
    check_resumed((*run[:-1], out), tmp_path)


def test_a_folder_on_a_disk_that_is_read_only_is_refused_and_a_run_there_is_left_as_it_is(
    run: tuple[object, ...], disk: tuple[Path, Callable[[str], None]]
) -> None:
    folder, change = disk
    change("ro")
    failed = effcli(*run[:-1], folder / "run")
    assert failed.code == 9
    assert "Read-only file system" in failed.error
    assert failed.error.startswith(f"--out '{folder}/run' cannot be written to")
    change("rw,size=30m")
    assert effcli(*run[:-1], folder / "run").code == 0
    change("ro")
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    for arguments in (("--resume", "--epochs", 3), ("--overwrite",)):
        assert effcli(*run[:-1], folder / "run", *arguments).code == 9
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def test_data_that_is_gone_is_said_before_a_run_and_before_it_is_continued(
    run: tuple[object, ...], data: Path, tmp_path: Path
) -> None:
    assert effcli(*run, "--dry-run").code == 0
    moved = data.rename(tmp_path / "elsewhere.csv")
    failed = effcli(*run)
    assert failed.code == 2
    assert str(data) in failed.error
    assert not (tmp_path / "run").exists()
    moved.rename(data)
    assert effcli(*run, "--max-steps", 2).code == 0
    data.unlink()
    failed = effcli("train", "--out", tmp_path / "run", "--resume", "--max-steps", 4)
    assert failed.code == 2
    assert str(data) in failed.error
    assert status(tmp_path / "run")[0] == "completed"


@pytest.mark.parametrize("num_workers", [0, 1])
def test_data_that_goes_while_a_run_is_on_does_not_disturb_it(
    num_workers: int, run: tuple[object, ...], data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = run_module.Run.execute

    def without_data(self: Any, *args: Any) -> Any:
        data.unlink()
        shutil.rmtree(os.environ["HF_HOME"], ignore_errors=True)
        return begin(self, *args)

    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(run_module.Run, "execute", without_data)
    assert effcli(*run, "--num-workers", num_workers).code == 0


def failing_worker(monkeypatch: pytest.MonkeyPatch, fail: Callable[[], object]) -> None:
    """Let data workers, and only they, fail with the second batch that they prepare."""
    collate, here, calls = Collator.__call__, os.getpid(), iter(range(100))

    def in_a_worker(self: Collator, rows: Any) -> Any:
        if os.getpid() != here and next(calls) == 1:
            fail()
        return collate(self, rows)

    monkeypatch.setattr(Collator, "__call__", in_a_worker)


def check_workers(failed: Result, out: Path) -> None:
    """Check that a failed worker is named in one line, with what to try, and that no worker is left."""
    assert failed.code == 7
    assert "--num-workers" in failed.error
    assert status(out) == ("failed", failed.error)
    assert multiprocessing.active_children() == []


@pytest.mark.parametrize("engine", ENGINES)
def test_a_data_worker_that_is_killed_is_named_and_ends_the_run(
    engine: str, run: tuple[object, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing_worker(monkeypatch, lambda: os.kill(os.getpid(), signal.SIGKILL))
    failed = effcli(*run, "--num-workers", 2, "--engine", engine)
    check_workers(failed, tmp_path / "run")
    assert "failed in a data worker (pid" in failed.error
    assert "the system may have run out of memory" in failed.error


def test_a_bus_error_of_a_data_worker_speaks_of_shared_memory(
    run: tuple[object, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing_worker(monkeypatch, lambda: os.kill(os.getpid(), signal.SIGBUS))
    failed = effcli(*run, "--num-workers", 1)
    check_workers(failed, tmp_path / "run")
    assert "/dev/shm" in failed.error


def test_what_a_data_worker_raises_is_said_without_its_traceback(
    run: tuple[object, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise KeyError("input_ids")

    failing_worker(monkeypatch, fail)
    failed = effcli(*run, "--num-workers", 2)
    check_workers(failed, tmp_path / "run")
    assert failed.error == (
        "update 3 failed in a data worker (number 0 of --num-workers), KeyError: 'input_ids'; --num-workers 0 shows "
        "where"
    )
