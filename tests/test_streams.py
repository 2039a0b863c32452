"""Streams that nobody reads, that are full or closed: progress is lost in silence, results are not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from effcli.pipeline.comparing import run_process

SHOWS = """
import sys
from effcli.streams import bear_lost_streams
bear_lost_streams()
from effcli.report.progress import make_progress
progress = make_progress(1, quiet=False, is_terminal=sys.argv[1] == "bar")
for update in range(3):
    progress.note("a note")
    if not update:
        progress.start(first_update=0, total_updates=3)
    progress.update(update=update + 1, epoch=1.0, loss=1.0, lr=1.0, num_samples=1)
progress.stop()
print("printed by a library", file=sys.stderr)
print("trained")
"""
ADVISED = """
import atexit, logging
logger = logging.getLogger("bitsandbytes.backends.cpu.ops")
atexit.register(lambda: (logger.warning("Please make sure you already `pip install kernels`"), logger.error("broken")))
"""
REPLICA = """
from effcli.streams import leave_out_advice
leave_out_advice()
import torch
torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1), find_unused_parameters=True)
model(torch.ones(1, 2)).sum().backward()
torch.distributed.destroy_process_group()
"""
COMMANDS = [("gpus",), ("optimizers", "adamw", "--json"), ("--help",)]
IDS = [" ".join(command) for command in COMMANDS]


def broken_pipe() -> int:
    """Return the end of a pipe that nobody reads."""
    read, write = os.pipe()
    os.close(read)
    return write


def started(*arguments: str, closed: int | None = None, **streams: Any) -> subprocess.CompletedProcess[str]:
    """Return what Python said with those streams, `closed` being the number of one that is closed before it starts."""
    close = "" if closed is None else f" {closed}>&-"
    command = ["sh", "-c", f'exec "$@"{close}', "sh", sys.executable, *arguments]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **streams}
    return subprocess.run(command, text=True, timeout=100, check=False, **streams)


@pytest.mark.parametrize("display", ["bar", "lines"])
@pytest.mark.parametrize("lost", ["pipe", "full", "closed"])
def test_a_run_goes_on_when_its_progress_is_lost(display: str, lost: str) -> None:
    if lost == "closed":
        done = started("-c", SHOWS, display, closed=2)
    else:
        stderr = broken_pipe() if lost == "pipe" else os.open("/dev/full", os.O_WRONLY)
        done = started("-c", SHOWS, display, stderr=stderr)
        os.close(stderr)
    assert (done.returncode, done.stdout) == (0, "trained\n")


@pytest.mark.parametrize("command", COMMANDS, ids=IDS)
def test_output_that_is_not_written_is_one_line_and_a_code_of_its_own(command: tuple[str, ...]) -> None:
    with Path("/dev/full").open("w") as full:
        results = [started("-m", "effcli", *command, stdout=full), started("-m", "effcli", *command, closed=1)]
    for done, reason in zip(results, ("No space left on device", "Bad file descriptor"), strict=True):
        assert (done.returncode, done.stderr) == (9, f"effcli: error: could not write the output: {reason}\n")


@pytest.mark.parametrize("command", COMMANDS, ids=IDS)
def test_output_that_nobody_reads_to_its_end_is_no_fault(command: tuple[str, ...]) -> None:
    stdout = broken_pipe()
    done = started("-m", "effcli", *command, stdout=stdout)
    os.close(stdout)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("module", ["effcli.cli.app", run_process.__name__])
def test_advice_of_a_library_is_kept_off_the_terminal_and_its_errors_are_not(module: str) -> None:
    done = started("-c", f"{ADVISED}from {module} import main\nmain()", "gpus", stdin=subprocess.DEVNULL)
    assert "broken" in done.stderr
    assert "pip install" not in done.stderr


def test_advice_of_torch_about_replicas_is_kept_off_the_terminal() -> None:
    done = started("-c", REPLICA)
    assert (done.returncode, done.stderr) == (0, "")
