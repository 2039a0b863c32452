"""One process trains in a run folder: neither `--resume` nor `--overwrite` touches the folder of a live run."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from effcli.errors import UsageError
from effcli.pipeline.running import training
from effcli.run_lock import LOCK, RunLock
from tests.commands import effcli

pytestmark = pytest.mark.usefixtures("without_plan")

HOLDER = """
import sys
from pathlib import Path
from effcli.run_lock import RunLock
with RunLock(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


@contextmanager
def held(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Let another process hold the lock of a folder."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def contents(folder: Path) -> dict[Path, bytes | None]:
    return {path: path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


@pytest.fixture
def train(distilbert: Path, data: Path, tmp_path: Path) -> tuple[object, ...]:
    return ("train", distilbert, "--data", data, "--max-steps", 2, "--out", tmp_path / "run")


def test_the_folder_of_a_live_run_is_left_alone_until_it_is_killed(train: tuple[object, ...], tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert effcli(*train).code == 0
    assert not (run / LOCK).exists()
    with held(run) as process:
        before = contents(run)
        for flags in (("--resume", "--max-steps", 4), ("--overwrite",)):
            refused = effcli(*train, *flags)
            assert refused.code == 2
            assert f"--out '{run}': another process trains in it" in refused.error
            assert contents(run) == before
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert (run / LOCK).exists()
        done = effcli(*train, "--resume", "--max-steps", 4)
        assert done.code == 0, done.stderr
    assert not (run / LOCK).exists()


def test_a_folder_that_another_run_takes_first_is_left_to_it(
    train: tuple[object, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, build = tmp_path / "run", training.build
    with ExitStack() as stack:

        def overtaken(*given: Any, **more: Any) -> Any:
            run.mkdir()
            stack.enter_context(held(run))
            return build(*given, **more)

        monkeypatch.setattr(training, "build", overtaken)
        refused = effcli(*train)
        assert refused.code == 2
        assert "another process trains in it" in refused.error
        assert [path.name for path in run.iterdir()] == [LOCK]


def test_a_file_that_the_run_before_removed_meanwhile_locks_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock_file, seen = fcntl.lockf, []

    def removed_first(file: int, how: int) -> None:
        if not seen:
            (tmp_path / LOCK).unlink()
        seen.append(file)
        lock_file(file, how)

    monkeypatch.setattr(fcntl, "lockf", removed_first)
    with RunLock(tmp_path):
        assert len(seen) == 2
        assert (tmp_path / LOCK).exists()


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP, errno.EAGAIN])
def test_a_file_system_without_locks_holds_nobody_up(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(file: int, how: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "lockf", refused)
    if number == errno.EAGAIN:
        with pytest.raises(UsageError, match="another process"):
            RunLock(tmp_path).take()
        return
    with RunLock(tmp_path):
        pass
    assert list(tmp_path.iterdir()) == []
