"""The real command in a process of its own, ended in every way: no thread is left, and the driver is closed."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.commands import TINY_DISTILBERT, csv_file, model_folder
from tests.forked_runs import PREPARATION, Ended, ForkServer, is_alive
from tests.nvml.standin import Age, Driver
from tests.watched import CARD, FAILURE, MIB

SCRIPT = f"""
card {CARD} NVIDIA A10
memory {24_000 * MIB} {18_000 * MIB} 0
process self {17_300 * MIB}
"""


@dataclass
class Watched:
    """Runs the command with a device to watch."""

    server: ForkServer
    driver: Driver
    failure: Path
    num_calls_before: int = 0

    def run(
        self, folder: Path, *flags: object, failure: str = "", script: str = SCRIPT, stop: Any = None
    ) -> tuple[Ended, dict[str, Any]]:
        """Return how six updates ended, and the record, empty where there is none."""
        self.failure.write_text(failure)
        self.driver.play(script)
        self.num_calls_before = len(self.driver.calls())
        model, data = model_folder(folder / "m", TINY_DISTILBERT), csv_file(folder / "d.csv", 12)
        out = folder / "out"
        common = ("train", model, "--data", data, "--batch-size", 2, "--epochs", 1, "--logging-steps", 1)
        ended = self.server.run(*common, "--nvml-interval", 0.02, "--out", out, *flags, stop=stop)
        record = json.loads((out / "record.json").read_text()) if (out / "record.json").exists() else {}
        return ended, record

    @property
    def calls(self) -> list[tuple[str, int]]:
        """Return the openings and closings of the last command."""
        return self.driver.calls()[self.num_calls_before :]

    def is_clean(self) -> bool:
        """Return whether the process had only its main thread at its end, and each opening was closed once."""
        opened, closed = self.calls.count(("init", 0)), self.calls.count(("shutdown", 0))
        return "threads at the end: MainThread\n" in self.server.log and opened == closed > 0


@pytest.fixture(scope="module")
def watched(compiled_driver: Callable[[Age], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    folder = tmp_path_factory.mktemp("watched")
    driver = Driver(folder, compiled_driver("new"))
    with pytest.MonkeyPatch.context() as patch:
        for name, value in driver.environment().items():
            patch.setenv(name, value)
        patch.setenv(FAILURE, str(folder / "failure"))
        modules = (*PREPARATION, "effcli.engines.pytorch", "tests.watched_command")
        with ForkServer(modules, folder / "log") as server:
            yield Watched(server, driver, folder / "failure")


def signals(watched: Watched, *numbers: int) -> Callable[[int, float], None]:
    """Return what sends signals once an update was told, each after the first when the one before it was answered."""

    def wait_for(text: str, pid: int) -> None:
        while text not in watched.server.log:
            assert is_alive(pid), watched.server.log
            time.sleep(0.01)

    def stop(pid: int, started: float) -> None:
        wait_for("update 2/6", pid)
        for place, number in enumerate(numbers):
            if place:
                wait_for("press again to stop at once", pid)
            os.kill(pid, number)

    return stop


def test_a_run_that_ends_well(watched: Watched, tmp_path: Path) -> None:
    ended, record = watched.run(tmp_path)
    assert ended.code == 0, watched.server.log
    assert watched.is_clean(), watched.server.log
    nvml = record["measured"]["nvml"]
    assert nvml["num_samples"] > 2
    assert nvml["context"]["peak_bytes"] == 574 * MIB


@pytest.mark.parametrize(
    ("numbers", "code"),
    [([signal.SIGINT], 130), ([signal.SIGTERM], 143), ([signal.SIGINT, signal.SIGINT], 130)],
    ids=["SIGINT", "SIGTERM", "SIGINT twice"],
)
def test_a_run_that_is_interrupted(numbers: list[int], code: int, watched: Watched, tmp_path: Path) -> None:
    ended, record = watched.run(tmp_path, stop=signals(watched, *numbers))
    assert ended.code == code, watched.server.log
    assert watched.is_clean(), watched.server.log
    assert record["status"] == "interrupted"
    assert record["measured"]["nvml"]["process"]["peak_bytes"] == 17_300 * MIB


@pytest.mark.parametrize(
    ("failure", "flags", "code", "status"),
    [
        ("error", (), 7, "failed"),
        ("memory", (), 5, "failed"),
        ("memory", ("--auto-batch",), 5, "failed"),
        ("memory once", ("--auto-batch",), 0, "completed"),
    ],
)
def test_a_run_that_fails(
    failure: str, flags: tuple[str, ...], code: int, status: str, watched: Watched, tmp_path: Path
) -> None:
    ended, record = watched.run(tmp_path, *flags, failure=failure)
    assert (ended.code, record.get("status")) == (code, status), watched.server.log
    assert watched.is_clean(), watched.server.log


def test_a_driver_that_does_not_open_or_is_lost(watched: Watched, tmp_path: Path) -> None:
    ended, record = watched.run(tmp_path, script=f"{SCRIPT}\nfail nvmlInit 9")
    assert ended.code == 0, watched.server.log
    assert "shutdown" not in [what for what, _ in watched.calls]
    assert "threads at the end: MainThread\n" in watched.server.log
    assert record["measured"]["nvml"]["reason"]

    ended, record = watched.run(tmp_path, "--overwrite", script=f"{SCRIPT}\nfail nvmlDeviceGetMemoryInfo 15 after 3")
    assert ended.code == 0, watched.server.log
    assert watched.is_clean(), watched.server.log
    assert "after" in record["measured"]["nvml"]["reason"]
    assert record["measured"]["nvml"]["process"]["peak_bytes"] == 17_300 * MIB


def test_a_signal_before_training_leaves_nothing_open(watched: Watched, tmp_path: Path) -> None:
    def stop(pid: int, started: float) -> None:
        while ("init", 0) not in watched.calls:
            assert is_alive(pid), watched.server.log
            time.sleep(0.001)
        os.kill(pid, signal.SIGINT)

    ended, record = watched.run(tmp_path, stop=stop)
    assert ended.code == 130, watched.server.log
    assert record == {}
    assert watched.is_clean(), watched.server.log
