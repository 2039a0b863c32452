"""A disk that is full at any moment costs what was being written, and nothing that was written before."""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from transformers import get_scheduler

from effcli.cli.boundary import run_guarded
from effcli.engines import whole_tensors
from effcli.engines.checkpoint import FILES, MANIFEST, CheckpointStore, restore
from effcli.errors import TrainingFailedError, WriteError, chain
from effcli.files import DRAFT, refused_write, write_bytes, write_folder
from effcli.pipeline.running.guards import explained_saving, explained_write_failure
from tests.checkpoints import progress_after
from tests.commands import same_weights
from tests.small_disks import files_of_at_most, on_a_disk_of


class Run:
    """A tiny model with AdamW, and its checkpoint after update 1."""

    def __init__(self, folder: Path) -> None:
        torch.manual_seed(3)
        self.folder = folder / "checkpoints"
        self.model = torch.nn.Linear(3, 2)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.scheduler = get_scheduler("linear", self.optimizer, num_warmup_steps=0, num_training_steps=9)
        self.store = CheckpointStore(self.folder, keep=1)
        self.step()
        self.first = {name: value.clone() for name, value in self.model.state_dict().items()}
        self.save(1)
        self.step()

    def step(self) -> None:
        self.model(torch.ones(1, 3)).sum().backward()
        self.optimizer.step()

    def save(self, update: int) -> Path:
        parts = {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler}
        return self.store.save(progress_after(update), **parts)

    def check_that_only_the_first_is_there(self) -> None:
        """Check that nothing looks like a second checkpoint, and that the first one can be gone on from."""
        assert [path.name for path in self.store.paths()] == ["update-00000001"]
        found = self.store.newest_intact()
        assert found is not None
        assert (found.progress.update, found.damaged) == (1, ())
        model = torch.nn.Linear(3, 2)
        optimizer = torch.optim.AdamW(model.parameters())
        scheduler = get_scheduler("linear", optimizer, num_warmup_steps=0, num_training_steps=9)
        restore(found.path, model=model, optimizer=optimizer, scheduler=scheduler)
        assert same_weights(model.state_dict(), self.first)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


def contents(folder: Path) -> dict[str, bytes]:
    """Return every path in a folder with its bytes, none for folders."""
    return {str(path): path.read_bytes() if path.is_file() else b"" for path in folder.rglob("*")}


def check_every(step: int, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Save on disks that hold the first checkpoint and ever more of the second, `step` bytes more each time."""
    copy = run.folder.parent / "copy"
    shutil.copytree(run.folder, copy)
    path = run.save(2)
    sizes, total = {name: (path / name).stat().st_size for name in (*FILES, MANIFEST)}, size_of(path)
    shutil.rmtree(run.folder)
    copy.rename(run.folder)
    first, before = contents(run.folder), size_of(run.folder / "update-00000001")
    ends = [sum(list(sizes.values())[:count]) for count in range(len(sizes))]
    around = {end + near for end in ends for near in (-1, 0, 1) if end + near >= 0}
    for num_bytes in sorted({*range(0, total, step), *around, total - 1}):
        with monkeypatch.context() as patched:
            for owner, name in ((whole_tensors, "save_model"), (torch, "save"), (Path, "write_text")):
                write = on_a_disk_of(before + num_bytes, run.folder, getattr(owner, name))
                patched.setattr(owner, name, write if owner is not Path else _as_method(write))
            with pytest.raises(WriteError, match=r"could not write '.*update-00000002': File too large"):
                run.save(2)
        assert contents(run.folder) == first
    run.check_that_only_the_first_is_there()
    run.save(2)
    assert [path.name for path in run.folder.iterdir()] == ["update-00000002"]


def _as_method(write: Callable[..., Any]) -> Callable[..., Any]:
    def method(path: Path, *args: Any, **kwargs: Any) -> Any:
        return write(path, *args, **kwargs)

    return method


def test_a_disk_that_is_full_anywhere_in_a_checkpoint_leaves_the_one_before_it(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_every(499, run, monkeypatch)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_disk_that_is_full_at_any_byte_of_a_checkpoint_leaves_the_one_before_it(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_every(1, run, monkeypatch)


class FailingCall:
    """Lets the n-th of one kind of system call fail, and counts them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str, fails_at: int | None) -> None:
        self.count = 0
        call = getattr(os, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.count += 1
            if self.count - 1 == fails_at:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return call(*args, **kwargs)

        monkeypatch.setattr(os, name, counted)


@pytest.mark.parametrize(("name", "num_unsaid"), [("open", 1), ("mkdir", 0), ("fsync", 0), ("rename", 1)])
def test_any_step_of_a_save_may_fail(
    name: str, num_unsaid: int, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(run.folder, tmp_path / "copy")
    with monkeypatch.context() as patched:
        calls = FailingCall(patched, name, None)
        run.save(2)
    num_raised = 0
    for number in range(calls.count):
        shutil.rmtree(run.folder)
        shutil.copytree(tmp_path / "copy", run.folder)
        with monkeypatch.context() as patched:
            FailingCall(patched, name, number)
            try:
                run.save(2)
            except WriteError:
                num_raised += 1
        names = sorted(path.name for path in run.folder.iterdir() if not path.name.startswith(DRAFT))
        if names == ["update-00000001"]:
            run.check_that_only_the_first_is_there()
        else:  # the step that failed came after the name was given: what has a name is complete
            assert set(names) <= {"update-00000001", "update-00000002"}
            found = run.store.newest_intact()
            assert found is not None
            assert (found.progress.update, found.damaged) == (2, ())
    assert num_raised == calls.count - num_unsaid >= 1  # an old checkpoint that stays is no failure of the new one


@pytest.mark.parametrize("name", ["rename", "fsync", "mkdir"])
def test_a_folder_that_is_there_stays_until_its_successor_takes_its_place(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fill(text: str) -> Callable[[Path], object]:
        return lambda folder: (folder / "weights").write_text(text)

    with monkeypatch.context() as patched:
        write_folder(tmp_path / "model", fill("old"))
        calls = FailingCall(patched, name, None)
        write_folder(tmp_path / "model", fill("old"))
    seen = set()
    for number in range(calls.count):
        with monkeypatch.context() as patched:
            FailingCall(patched, name, number)
            with pytest.raises(WriteError):
                write_folder(tmp_path / "model", fill("new"))
        assert [path.name for path in tmp_path.iterdir()] == ["model"]
        seen.add((tmp_path / "model" / "weights").read_text())
    assert "old" in seen


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    path.write_text("before")
    for num_bytes in range(100):
        with files_of_at_most(num_bytes), pytest.raises(WriteError, match=r"record\.json': File too large"):
            write_bytes(path, b"x" * 100)
        assert [entry.name for entry in tmp_path.iterdir()] == ["record.json"]
        assert path.read_text() == "before"


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("a bug in a model's own code"),
        ConnectionError("the hub is away"),
        FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), "vocab.txt"),
        RuntimeError("No such file or directory (os error 2)"),
    ],
)
def test_what_is_no_failure_to_write_is_passed_on_and_leaves_nothing(error: Exception, tmp_path: Path) -> None:
    def fill(folder: Path) -> None:
        (folder / "half").write_text("half")
        raise error

    with pytest.raises(type(error)) as raised:
        write_folder(tmp_path / "model", fill)
    assert raised.value is error
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("number", "advice"),
    [(errno.ENOSPC, "make room"), (errno.EFBIG, "make room"), (errno.EROFS, "make it writable")],
)
@pytest.mark.parametrize("saved", [None, Path("update-00000002")])
def test_what_to_do_depends_on_why_the_system_refused(
    number: int, advice: str, saved: Path | None, tmp_path: Path
) -> None:
    def fill(folder: Path) -> None:
        raise RuntimeError("the writer's own error") from OSError(number, os.strerror(number))

    store = cast("CheckpointStore", SimpleNamespace(newest_intact_path=lambda: saved))
    left = "'update-00000002' is intact: " if saved else "no intact checkpoint was saved before: "
    expected = re.escape(f"/model': {os.strerror(number)}; {left}{advice}, then ")
    with pytest.raises(WriteError, match=expected), explained_write_failure(store):
        write_folder(tmp_path / "model", fill)


def test_a_damaged_checkpoint_is_not_called_intact(run: Run) -> None:
    run.store = store = CheckpointStore(run.folder, keep=2)
    older, newest = *store.paths(), run.save(2)
    (newest / FILES[0]).write_bytes(b"")
    with pytest.raises(WriteError, match=f"'{older}' is intact"), explained_write_failure(store):
        raise WriteError("full")
    (older / FILES[0]).write_bytes(b"")
    with pytest.raises(WriteError, match="no intact checkpoint was saved"), explained_write_failure(store):
        raise WriteError("full")


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (FileNotFoundError(errno.ENOENT, "gone"), WriteError),
        (RuntimeError("state that is no tensor"), TrainingFailedError),
    ],
)
def test_a_failure_to_save_is_not_said_to_be_the_models(error: Exception, kind: type[Exception]) -> None:
    with pytest.raises(kind, match="the checkpoint of update 3 was not saved"), explained_saving(3):
        raise error


def test_an_error_that_is_raised_again_from_what_wraps_it_is_looked_at_once() -> None:
    inner, outer = ValueError("inner"), RuntimeError("outer")
    outer.__cause__, inner.__cause__ = inner, outer
    assert list(chain(inner)) == [inner, outer]
    assert refused_write(inner) is None


@pytest.mark.parametrize(("number", "code"), [(errno.ENOSPC, 9), (errno.EFBIG, 9), (errno.EROFS, 9), (errno.EACCES, 1)])
def test_an_output_that_is_not_written_is_told_at_the_boundary_and_one_that_may_not_be_read_is_not(
    number: int, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    def command() -> None:
        raise OSError(number, os.strerror(number))

    assert run_guarded(command, verbose=False) == code
    assert (f"could not write the output: {os.strerror(number)}" in capsys.readouterr().err) == (code == 9)
