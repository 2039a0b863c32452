"""Several processes of which one fails, is killed, stopped or waits: one message, nothing lost, and it ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.commands import TINY_DISTILBERT, csv_file, model_folder
from tests.launched import Fault, Launched, LaunchServer

SOON_S = 30.0
"""Seconds within which all is over after something has failed; without the news of it, it would be half an hour."""


class Run:
    """A run of ten updates, its checkpoints saved after each of them."""

    def __init__(self, folder: Path, server: LaunchServer) -> None:
        self.out, self._server = folder / "o", server
        model, data = model_folder(folder / "m", TINY_DISTILBERT), csv_file(folder / "d.csv", 20)
        self.flags: tuple[object, ...] = (
            "train", model, "--data", data, "--optim", "sgd", "--lr", "0.01", "--epochs", 2, "--batch-size", 1,
            "--accum", 2, "--device", "cpu", "--save-every", 1, "--out", self.out, "--num-workers", 0,
        )  # fmt: skip

    def launch(self, *more: object, faults: dict[int, list[Fault]], ranks: int = 2, **settings: Any) -> Launched:
        """Return how it ended with faults in some ranks."""
        every = {rank: [("planless", {}), *faults.get(rank, ())] for rank in range(ranks)}
        return self._server.run(*self.flags, *more, faults=every, ranks=ranks, **settings)

    @property
    def record(self) -> dict[str, Any]:
        return json.loads((self.out / "record.json").read_text())

    @property
    def saved(self) -> list[int]:
        return sorted(int(path.name.removeprefix("update-")) for path in (self.out / "checkpoints").iterdir())

    def check_that_it_goes_on(self) -> None:
        ended = self.launch("--resume", faults={})
        assert set(ended.codes.values()) == {0}, ended.stderr
        assert (self.record["status"], len(self.record["history"])) == ("completed", 10)


@pytest.fixture
def run(tmp_path: Path, launches: LaunchServer) -> Run:
    return Run(tmp_path, launches)


def test_a_killed_process_ends_the_run_at_once_with_one_message_and_it_can_go_on(run: Run) -> None:
    ended = run.launch(faults={1: [("killed", {"update": 3})]})
    assert (ended.codes[1], ended.codes[0]) == (-signal.SIGKILL, 7)
    assert ended.ended_s[0] - ended.ended_s[1] < SOON_S
    assert ended.error.startswith("after update ")
    assert "rank 1 (process " in ended.error
    assert "has ended without a word, as when killed; checkpoints are intact, start the same command" in ended.error
    assert run.record["status"] == "failed"
    assert run.record["failure"] == ended.error
    assert run.saved == [1, 2]
    run.check_that_it_goes_on()


def test_processes_that_the_launcher_starts_again_go_on_where_the_others_were_killed(run: Run) -> None:
    store = LaunchServer.new_store()
    ended = run.launch(faults={1: [("killed", {"update": 3})]}, store=store)
    assert (ended.codes[1], run.saved) == (-signal.SIGKILL, [1, 2])
    again = {"store": store, "environment": {"TORCHELASTIC_RESTART_COUNT": "1"}, "faults": {}}
    assert "they would train from the beginning; start the same" in run.launch("--overwrite", **again).error
    assert run.saved == [1, 2]
    again["environment"] = {"TORCHELASTIC_RESTART_COUNT": "2"}
    ended = run.launch("--resume", **again)
    assert set(ended.codes.values()) == {0}, ended.stderr
    assert (run.record["status"], len(run.record["history"])) == ("completed", 10)


def test_what_one_process_alone_meets_is_told_by_rank_0_and_kept_in_the_record(run: Run) -> None:
    fault = ("raising", {"update": 3, "kind": "RuntimeError", "text": "some fault"})
    ended = run.launch(faults={1: [fault]})
    assert ended.error.startswith("rank 1: update 3 failed in the model or the optimizer, RuntimeError: some fault")
    assert not ended.stderr[1]
    assert (run.record["status"], run.record["failure"]) == ("failed", ended.error)
    assert ended.codes == {0: 7, 1: 7}


def test_a_signal_to_one_process_stops_all_after_the_same_update(run: Run) -> None:
    ended = run.launch(faults={1: [("killed", {"update": 3, "number": signal.SIGTERM})]})
    assert ended.codes == {0: 143, 1: 143}
    assert ended.error == (
        "stopped after update 3 of 10; the state is saved, continue with the same command and --resume"
    )
    assert run.record["status"] == "interrupted"
    assert (len(run.record["history"]), run.saved) == (3, [2, 3])


def test_a_process_that_stands_still_is_given_up_after_the_time_that_was_set(run: Run) -> None:
    fault = ("waiting", {"update": 3, "seconds": 2.5})
    ended = run.launch(faults={1: [fault]}, environment={"EFFCLI_RANK_TIMEOUT": "1"})
    assert "another process has not answered for 1 second, the limit (EFFCLI_RANK_TIMEOUT)" in ended.error
    assert run.record["failure"] == ended.error


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("shard", ["ddp", "fsdp"])
def test_whichever_process_is_killed_one_other_says_so(run: Run, ranks: int, shard: str) -> None:
    for killed in range(ranks):
        ended = run.launch("--shard", shard, "--overwrite", ranks=ranks, faults={killed: [("killed", {"update": 2})]})
        others = [rank for rank in range(ranks) if rank != killed]
        assert {ended.codes[rank] for rank in others} == {7}
        assert max(ended.ended_s.values()) - ended.ended_s[killed] < SOON_S
        assert f"rank {killed} (process " in ended.error
        assert run.saved == [1]
        assert ended.stderr[0 if killed else 1].endswith(f"effcli: error: {ended.error}\n") or not killed
        if killed:
            assert run.record["failure"] == ended.error


@pytest.mark.slow
@pytest.mark.parametrize("shard", ["ddp", "fsdp"])
def test_whichever_process_fails_rank_0_says_so(run: Run, shard: str) -> None:
    for failing in range(4):
        fault = ("raising", {"update": 2, "kind": "RuntimeError", "text": "some fault"})
        ended = run.launch("--shard", shard, "--overwrite", ranks=4, faults={failing: [fault]})
        assert set(ended.codes.values()) == {7}
        assert max(ended.ended_s.values()) - min(ended.ended_s.values()) < SOON_S
        assert ended.error.startswith(f"rank {failing}: update 2 failed" if failing else "update 2 failed")
        assert run.record["failure"] == ended.error
        assert not any(ended.stderr[1:])


@pytest.mark.slow
def test_memory_that_runs_out_in_one_process_alone_is_named_as_such(run: Run) -> None:
    fault = ("raising", {"update": 3, "kind": "OutOfMemoryError", "text": "CUDA out of memory. Tried to allocate"})
    ended = run.launch(faults={1: [fault]})
    assert ended.error.startswith("rank 1: out of memory on cpu in the backward pass of update 3")
    assert ended.codes == {0: 5, 1: 5}
    assert run.record["failure"] == ended.error


@pytest.mark.slow
@pytest.mark.parametrize(
    ("faults", "more", "said", "code"),
    [
        ({0: [("disk_full", {"update": 3})]}, (), "No space left on device", 9),
        ({1: [("worker_killed", {})]}, ("--num-workers", 1), "rank 1: update 1 failed in a data worker", 7),
        ({1: [("broken_weights", {"update": 3})]}, (), "that are not finite: nothing of it is saved", 7),
    ],
)
def test_a_fault_of_one_process_ends_all(
    run: Run, faults: dict[int, list[Fault]], more: tuple[object, ...], said: str, code: int
) -> None:
    ended = run.launch(*more, faults=faults)
    assert said in ended.error
    assert set(ended.codes.values()) == {code}
    assert (run.record["status"], run.record["failure"]) == ("failed", ended.error)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_stops_all_at_once(run: Run, rank: int, number: int) -> None:
    twice = [("killed", {"update": 4, "number": number})] * 2
    ended = run.launch(faults={rank: twice})
    assert "stopped at once after update 3 of 10; the state after update 3 is saved" in ended.error
    assert ended.codes[0] == 128 + number
    assert run.record["status"] == "interrupted"
    assert run.saved == [2, 3]
    run.check_that_it_goes_on()


@pytest.mark.slow
def test_a_slow_process_is_waited_for(run: Run) -> None:
    ended = run.launch("--json", faults={1: [("waiting", {"update": 3, "seconds": 3})]})
    assert ended.record["status"] == "completed"
    alone = run.launch("--json", "--overwrite", faults={})
    assert [line["loss"] for line in ended.record["history"]] == [line["loss"] for line in alone.record["history"]]


@pytest.mark.slow
def test_under_torchrun_a_killed_process_and_a_stop_end_the_same_way(run: Run) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "effcli"]
    flags = [str(flag) for flag in (*run.flags, "--epochs", 2000, "--overwrite", "--logging-steps", 1)]
    for number in (signal.SIGKILL, signal.SIGTERM):
        with subprocess.Popen([*command, *flags], env=environment, stderr=subprocess.PIPE, text=True) as process:
            said = ""
            while "update 5/" not in said:
                line = process.stderr.readline()
                assert line, said
                said += line
            if number == signal.SIGKILL:
                children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
                os.kill(int(children[1]), number)
            else:
                process.send_signal(number)
            started = time.monotonic()
            said += process.stderr.read()
            assert process.wait() != 0
        assert time.monotonic() - started < SOON_S
        errors = [line for line in said.splitlines() if line.startswith("effcli: error: ")]
        assert len(errors) == 1, said
        expected = "has ended without a word" if number == signal.SIGKILL else "the state is saved, continue with"
        assert expected in errors[0]
        assert run.record["status"] == ("failed" if number == signal.SIGKILL else "interrupted")
