"""A server that has imported everything once and forks a process for each command, which is then killed or left alone.

Started as a module of its own: it never computes anything itself, so that its children start with no thread but theirs.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import torch

PREPARATION = (
    "effcli.cli.app", "effcli.pipeline.running.training", "effcli.data.source", "effcli.data.tokenise",
    "effcli.data.tokenizer", "effcli.data.files", "effcli.report.output", "effcli.report.progress", "sklearn.metrics",
    "datasets", "transformers.models.distilbert.modeling_distilbert",
)  # fmt: skip
"""What a run imports whatever its settings are."""


@dataclass(frozen=True)
class Ended:
    """How a child ended: its exit code, or the number of the signal that killed it as a negative one; seconds."""

    code: int
    seconds: float


class ForkServer:
    """Runs `effcli ARGUMENTS` in fresh processes, each the leader of a process group of its own.

    They have another hash seed than the tests, as many threads, and no network, which they have to find out.
    """

    def __init__(self, modules: tuple[str, ...], log: Path) -> None:
        environment = {key: value for key, value in os.environ.items() if "OFFLINE" not in key}
        environment |= {
            "HF_ENDPOINT": "http://127.0.0.1:9",  # nothing listens there
            "OMP_NUM_THREADS": str(torch.get_num_threads()),  # another number sums in another order
            "PYTHONHASHSEED": "1",
            "TORCHDYNAMO_DISABLE": "1",
        }
        self._log = log
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.forked_runs", str(log), *modules],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
        )  # fmt: skip
        assert self._answer() == "ready", log.read_text()

    def __enter__(self) -> ForkServer:
        return self

    def __exit__(self, *ignored: object) -> None:
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()

    def run(self, *arguments: object, stop: Callable[[int, float], None] | None = None) -> Ended:
        """Return how the command ended; `stop` is given the process and its start and may wait and send signals."""
        self._log.write_text("")
        self._process.stdin.write(json.dumps([str(part) for part in arguments]) + "\n")
        self._process.stdin.flush()
        pid, started = int(self._answer()), time.monotonic()
        if stop is not None:
            stop(pid, started)
        code = os.waitstatus_to_exitcode(int(self._answer()))
        return Ended(code, time.monotonic() - started)

    @property
    def log(self) -> str:
        """Return what the last command wrote to both of its streams."""
        return self._log.read_text()

    def _answer(self) -> str:
        return self._process.stdout.readline().strip()


def is_alive(pid: int) -> bool:
    """Return whether a process runs still; the server reaps it only when it is asked for the next command."""
    return _status(pid)[0] not in ("Z", "X")


def group_of(leader: int) -> list[int]:
    """Return the living processes of a process group."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            state, group = _status(int(entry.name))
            if group == leader and state not in ("Z", "X"):
                found.append(int(entry.name))
    return found


def _status(pid: int) -> tuple[str, int]:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "X", 0
    return fields[0], int(fields[2])


def _serve(log: str, modules: list[str]) -> None:
    for module in modules:
        import_module(module)
    print("ready", flush=True)
    for line in sys.stdin:
        ready, is_ready = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.setpgid(0, 0)
            os.close(ready)
            os.close(is_ready)
            _run(json.loads(line), log)
        os.close(is_ready)
        os.read(ready, 1)  # returns at the end of the pipe, when the child leads its group
        os.close(ready)
        print(pid, flush=True)
        print(os.waitpid(pid, 0)[1], flush=True)
    os._exit(0)  # what was imported is not worth taking down


def _run(arguments: list[str], log: str) -> None:
    """Become `effcli ARGUMENTS` with both streams in a file; returns never."""
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    become(arguments)


def become(arguments: list[str]) -> None:
    """Become `effcli ARGUMENTS`, as its console script does it; returns never."""
    from effcli.cli import app

    sys.argv = ["effcli", *arguments]
    try:
        app.main()
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    os._exit(99)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _serve(sys.argv[1], sys.argv[2:])
