"""Launches of several processes of effcli, as torchrun makes them, without the seconds that each takes to import torch.

The test holds the store, as torchrun's agent does, and like it sends SIGTERM to the others when one has failed. Started
as a module this is a server that has imported everything and forks the processes.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from threading import Timer
from typing import Any

from tests.forked_runs import PREPARATION, become

LONGEST_S = 60.0
"""Seconds after which the processes of a launch are killed: a test of what ends must end."""

Fault = tuple[str, dict[str, Any]]
"""A function of `tests.rank_faults` and its arguments, called in a process before its command."""


@dataclass
class Launched:
    """Processes that ran, by rank: exit codes (negative: the signal), seconds to each end, and both streams."""

    codes: dict[int, int] = field(default_factory=dict)
    ended_s: dict[int, float] = field(default_factory=dict)
    stdout: list[str] = field(default_factory=list)
    stderr: list[str] = field(default_factory=list)

    @property
    def errors(self) -> list[str]:
        """Return the errors that all processes told of, one expected; nothing else may look like a failure."""
        lines = [line for text in self.stderr for line in text.splitlines()]
        assert not [line for line in lines if "Traceback" in line or "Exception" in line], "\n".join(lines)
        return [line.removeprefix("effcli: error: ") for line in lines if line.startswith("effcli: error: ")]

    @property
    def error(self) -> str:
        """Return the one error."""
        (error,) = self.errors
        return error

    @property
    def record(self) -> dict[str, Any]:
        """Return the document that rank 0 alone wrote to its stdout."""
        assert set(self.codes.values()) == {0}, self.stderr
        assert not any(self.stdout[1:])
        return json.loads(self.stdout[0])


class LaunchServer:
    """Forks the processes of one launch at a time."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        environment = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.launched", *PREPARATION, "effcli.engines.pytorch", "torch.distributed"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env=environment | {"OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        assert self._answer() == "ready"

    def __enter__(self) -> LaunchServer:
        return self

    def __exit__(self, *ignored: object) -> None:
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()

    def run(
        self,
        *arguments: object,
        ranks: int = 2,
        faults: Mapping[int, Sequence[Fault]] | Sequence[Fault] = (),
        more: Mapping[int, Sequence[object]] | None = None,
        environment: Mapping[str, str] | None = None,
        watch: Callable[[list[int]], None] | None = None,
        as_torchrun: bool = True,
        store: Any = None,
    ) -> Launched:
        """Return how `effcli ARGUMENTS` ended in each of `ranks` processes; `more` are arguments of one rank alone,
        `faults` those of one rank by its number, or of all.

        `watch` is given the process numbers when all run. With one rank it is an ordinary run, without a launcher.
        `store` is that of an earlier launch, which torchrun keeps when it starts the processes again.
        """
        store = store or self.new_store()
        jobs = []
        for rank in range(ranks):
            launcher = {
                "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks,
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": store.port, "TORCHELASTIC_USE_AGENT_STORE": "True",
            }  # fmt: skip
            jobs.append({
                "arguments": [str(part) for part in (*arguments, *(more or {}).get(rank, ()))],
                "environment": {key: str(value) for key, value in launcher.items() if ranks > 1}
                | dict(environment or {}),
                "faults": list(faults.get(rank, ()) if isinstance(faults, Mapping) else faults),
                "streams": [str(self._folder / f"{stream}-{rank}") for stream in ("out", "err")],
            })  # fmt: skip
        self._process.stdin.write(json.dumps(jobs) + "\n")
        self._process.stdin.flush()
        pids = json.loads(self._answer())
        started, launched = time.monotonic(), Launched()
        timer = Timer(LONGEST_S, _kill, (pids, signal.SIGKILL))
        timer.start()
        try:
            if watch is not None:
                watch(pids)
            for _ in pids:
                pid, code = json.loads(self._answer())
                rank = pids.index(pid)
                launched.codes[rank], launched.ended_s[rank] = code, time.monotonic() - started
                if code and as_torchrun:
                    _kill([other for other in pids if pids.index(other) not in launched.codes], signal.SIGTERM)
        finally:
            timer.cancel()
        for streams in (job["streams"] for job in jobs):
            for kept, stream in zip((launched.stdout, launched.stderr), streams, strict=True):
                kept.append(Path(stream).read_text())
        return launched

    @staticmethod
    def new_store() -> Any:
        """Return a store at which processes can meet."""
        import torch.distributed as dist

        return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def _answer(self) -> str:
        return self._process.stdout.readline().strip()


def _kill(pids: list[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _serve(modules: list[str]) -> None:
    for module in modules:
        import_module(module)
    print("ready", flush=True)
    for line in sys.stdin:
        pids = []
        for job in json.loads(line):
            pid = os.fork()
            if pid == 0:
                _run(job)
            pids.append(pid)
        print(json.dumps(pids), flush=True)
        for _ in pids:
            pid, status = os.wait()
            print(json.dumps([pid, os.waitstatus_to_exitcode(status)]), flush=True)
    os._exit(0)  # what was imported is not worth taking down


def _run(job: dict[str, Any]) -> None:
    """Become `effcli ARGUMENTS` as one of several processes, with its faults; returns never."""
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number, path in enumerate(job["streams"], start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    os.environ.update(job["environment"])
    os.fsync = lambda descriptor: None  # none of these runs has to outlive a loss of power
    for name, settings in job["faults"]:
        getattr(import_module("tests.rank_faults"), name)(**settings)
    become(job["arguments"])


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _serve(sys.argv[1:])
