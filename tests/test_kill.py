"""Runs that are killed again and again, at any moment, and resumed until they are complete: nothing of it shows."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from effcli.files import DRAFT
from tests.commands import TINY_DISTILBERT, csv_file, model_folder, same_weights, saved_weights, untimed
from tests.forked_runs import PREPARATION, ForkServer, group_of, is_alive
from tests.jobs import ENGINES

OPTIMIZERS = ("adamw", "adafactor", "adam8bit", "adamw8bit-ao")
PAIRS = [(optim, engine) for engine in ENGINES for optim in OPTIMIZERS if (optim, engine) != ("adam8bit", "pytorch")]
KEEP = 2
DRAFTS = {"checkpoints/.writing-update-*": 3, ".writing-model": 1, ".writing-re*": 1}
"""Pattern of something half written -> how often to wait for it at most."""


@dataclass
class Killer:
    """Runs one configuration, kills it at seeded random moments, and compares what comes out with a whole run."""

    server: ForkServer
    folder: Path
    flags: tuple[object, ...]
    rng: random.Random

    def __post_init__(self) -> None:
        self.kills: Counter[str] = Counter()
        ended = self.server.run("train", *self.flags, "--out", self.folder / "whole", "--save-every", 1)
        assert ended.code == 0, self.server.log
        self.seconds = ended.seconds
        self.whole = json.loads((self.folder / "whole" / "record.json").read_text())
        self.weights = saved_weights(self.folder / "whole")

    def kill(self, count: int) -> None:
        """Kill that many processes; as many runs as that takes are each resumed until they are complete."""
        runs = 0
        while self.kills.total() < count:
            runs += 1
            out = self.folder / f"run-{runs}"
            while not self._is_complete(out, count):
                pass
            self.compare(out)

    def _is_complete(self, out: Path, count: int) -> bool:
        """Start the run or go on with it, and kill it where that is still to be done; return whether it is complete."""
        began = (out / "recipe.yaml").is_file()
        start = ("--resume",) if began else (*self.flags, "--overwrite")
        changes = ("--save-every", self.rng.choice((1, 2, 3)), "--num-workers", self.rng.choice((0, 0, 0, 2)))
        stop = self._moment(out) if self.kills.total() < count else None
        ended = self.server.run("train", *start, *changes, "--out", out, "--logging-steps", 1, stop=stop)
        if ended.code == 0:
            return True
        assert ended.code == -signal.SIGKILL, self.server.log
        self.kills[_where(out, self.server.log)] += 1
        _check_that_nothing_half_done_looks_complete(out, self.weights)
        record = out / "record.json"
        return record.is_file() and json.loads(record.read_text())["status"] == "completed"

    def _moment(self, out: Path) -> Callable[[int, float], None]:
        """Return what waits for a random moment and kills: some time after the start, or while something is written."""
        if self.rng.random() < 0.6:
            at, pattern, sight = self.rng.uniform(0, self.seconds), "", 0
        else:
            pattern, most = self.rng.choice(list(DRAFTS.items()))
            at, sight = self.rng.uniform(0, 0.01), self.rng.randint(1, most)

        def stop(pid: int, started: float) -> None:
            since = started if not pattern else _sight_of(out, pattern, sight, lambda: is_alive(pid))
            time.sleep(max(0.0, since + at - time.monotonic()))
            with contextlib.suppress(ProcessLookupError):  # it ended before
                os.killpg(pid, signal.SIGKILL)

        return stop

    def compare(self, out: Path) -> None:
        """Hold a complete run to the one that was left alone, bit for bit."""
        record = json.loads((out / "record.json").read_text())
        assert record["status"] == "completed"
        assert untimed(record["history"]) == untimed(self.whole["history"])
        assert record["eval"] == self.whole["eval"]
        assert same_weights(saved_weights(out), self.weights)
        assert not list(out.rglob(f"{DRAFT}*"))
        assert len(list((out / "checkpoints").iterdir())) <= KEEP


def _sight_of(out: Path, pattern: str, sight: int, is_running: Callable[[], bool]) -> float:
    """Return when something by that name has appeared that many times, or the process has ended."""
    seen = there = 0
    while seen < sight and is_running():
        was, there = there, bool(list(out.glob(pattern)))
        seen += there and not was
    return time.monotonic()


def _where(out: Path, log: str) -> str:
    """Return what a killed process was doing, as far as its folder and its last words tell."""
    last = (log.strip().splitlines() or [""])[-1]
    if list((out / "checkpoints").glob(f"{DRAFT}*")):
        return "writing a checkpoint"
    if list(out.glob(f"{DRAFT}model*")) or (out / "model").is_dir():
        return "saving the model"
    if last.startswith(("update 5/", "update 10/")):
        return "evaluating"
    return "training" if last.startswith(("update", "evaluation")) else "starting"


def _check_that_nothing_half_done_looks_complete(out: Path, weights: dict[str, torch.Tensor]) -> None:
    for checkpoint in (out / "checkpoints").glob("update-*"):
        sums = json.loads((checkpoint / "manifest.json").read_text())
        assert len(sums) == 3
        assert all(hashlib.sha256((checkpoint / name).read_bytes()).hexdigest() == sums[name] for name in sums)
    if (out / "model").is_dir():
        assert same_weights(saved_weights(out), weights)
    if (out / "record.json").is_file():
        json.loads((out / "record.json").read_text())


def flags_of(folder: Path, optim: str, engine: str) -> tuple[object, ...]:
    """Return the flags of ten updates on a tiny classifier with dropout, evaluated after every fifth."""
    model = model_folder(folder / "encoder", TINY_DISTILBERT, dropout=0.1)
    data = csv_file(folder / "d.csv", 20)
    return (
        model, "--data", data, "--eval-data", data, "--optim", optim, "--engine", engine, "--lr", 1e-3,
        "--batch-size", 2, "--accum", 2, "--epochs", 2, "--keep", KEEP,
    )  # fmt: skip


@pytest.fixture
def server(fresh_process: ForkServer) -> ForkServer:
    """Return the server of the fast tests, which has their engine and optimizer."""
    return fresh_process


@pytest.fixture(scope="module")
def full_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkServer]:
    """Return the server that all slow tests share."""
    modules = (*PREPARATION, *(f"effcli.engines.{engine}" for engine in ENGINES), "bitsandbytes", "torchao.optim")
    with ForkServer(modules, tmp_path_factory.mktemp("server") / "log") as made:
        yield made


def report(name: str, killer: Killer) -> None:
    """Print where the kills hit; shown by `make test-kill`."""
    print(f"\n{name}: {killer.kills.total()} kills, {dict(killer.kills)}; a whole run takes {killer.seconds:.1f} s")


def test_a_run_killed_twice_ends_as_the_one_that_was_left_alone(server: ForkServer, tmp_path: Path) -> None:
    killer = Killer(server, tmp_path, flags_of(tmp_path, "adam8bit", "pytorch"), random.Random(7))
    killer.kill(2)
    assert killer.kills.total() == 2


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_thirty_kills_do_not_show_with_8_bit_adam(full_server: ForkServer, tmp_path: Path) -> None:
    killer = Killer(full_server, tmp_path, flags_of(tmp_path, "adam8bit", "pytorch"), random.Random(30))
    killer.kill(30)
    report("adam8bit, pytorch", killer)
    assert len(killer.kills) >= 3


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("optim", "engine"), PAIRS)
def test_five_kills_do_not_show(optim: str, engine: str, full_server: ForkServer, tmp_path: Path) -> None:
    killer = Killer(full_server, tmp_path, flags_of(tmp_path, optim, engine), random.Random(f"{optim} {engine}"))
    killer.kill(5)
    report(f"{optim}, {engine}", killer)


def wait_for(words: str, server: ForkServer, send: Callable[[int], None]) -> Callable[[int, float], None]:
    """Return what waits until a process has said something, and then sends it a signal."""

    def stop(pid: int, started: float) -> None:
        while words not in server.log and is_alive(pid):
            time.sleep(0.001)
        send(pid)

    return stop


SIGNALS = pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.slow)]
)


@SIGNALS
def test_a_signal_to_the_whole_group_reaches_data_workers_and_the_state_is_saved(
    number: int, code: int, server: ForkServer, tmp_path: Path
) -> None:
    out, groups = tmp_path / "o", []
    flags = (*flags_of(tmp_path, "adamw", "pytorch"), "--num-workers", 2, "--epochs", 1000, "--logging-steps", 1)

    def send(pid: int) -> None:
        groups.append(group_of(pid))
        os.killpg(pid, number)

    ended = server.run("train", *flags, "--out", out, stop=wait_for("update 2/", server, send))
    assert len(groups[0]) == 3
    assert ended.code == code, server.log
    assert server.log.count("stopping after this update") == server.log.count("effcli: error: ") == 1
    assert "the state is saved" in server.log.splitlines()[-1]
    record = json.loads((out / "record.json").read_text())
    (checkpoint,) = (out / "checkpoints").glob("update-*")
    assert checkpoint.name == f"update-{len(record['history']):08d}"
    assert record["status"] == "interrupted"


@SIGNALS
def test_a_signal_before_training_ends_in_one_line_and_leaves_nothing(
    number: int, code: int, server: ForkServer, tmp_path: Path
) -> None:
    flags = flags_of(tmp_path, "adamw", "pytorch")
    for words in ("Text is read", "All weights are random"):
        stop = wait_for(words, server, lambda pid: os.kill(pid, number))
        ended = server.run("train", *flags, "--out", tmp_path / "o", stop=stop)
        assert ended.code == code, server.log
        assert server.log.splitlines()[-1].startswith("effcli: error: ")
        assert "Traceback" not in server.log
        assert not (tmp_path / "o" / "model").exists()


@pytest.mark.slow
def test_workers_do_not_outlive_a_killed_run(server: ForkServer, tmp_path: Path) -> None:
    flags = (*flags_of(tmp_path, "adamw", "pytorch"), "--num-workers", 2, "--epochs", 1000, "--logging-steps", 1)
    leaders: list[int] = []

    def send(pid: int) -> None:
        leaders.append(pid)
        os.kill(pid, signal.SIGKILL)

    ended = server.run("train", *flags, "--out", tmp_path / "o", stop=wait_for("update 2/", server, send))
    assert ended.code == -signal.SIGKILL
    deadline = time.monotonic() + 30  # torch's workers look for their parent every five seconds
    while group_of(leaders[0]) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not group_of(leaders[0])


@pytest.mark.slow
def test_a_command_that_is_killed_goes_on_as_it_was_typed(server: ForkServer, tmp_path: Path) -> None:
    killer = Killer(server, tmp_path, flags_of(tmp_path, "adam8bit", "pytorch"), random.Random(1))
    out = tmp_path / "o"
    command = [sys.executable, "-m", "effcli", "train", *map(str, killer.flags), "--save-every", "1", "--out", str(out)]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    _sight_of(out, "checkpoints/.writing-update-*", 4, lambda: process.poll() is None)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    _check_that_nothing_half_done_looks_complete(out, killer.weights)
    assert not (out / "model").exists()
    assert server.run("train", "--resume", "--out", out).code == 0
    killer.compare(out)
