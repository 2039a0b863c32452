"""Calls a function in several processes that belong to one group, and returns what it returned in each.

Unlike `tests.launched`, nothing of a command runs: the function is handed a process group of gloo and plain arguments.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from importlib import import_module
from pathlib import Path
from typing import Any

LONGEST_S = 240.0
"""Seconds after which processes that wait for each other are killed."""


def called_in(processes: int, function: str, *arguments: Any, longest_s: float = LONGEST_S) -> list[Any]:
    """Return what `module:function` returned for JSON arguments in each of the processes, by rank, as JSON.

    Raises:
        AssertionError: one of them failed or did not end; the message is its stderr.
    """
    with tempfile.TemporaryDirectory(prefix="effcli-processes-") as name:
        folder = Path(name)
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "WORLD_SIZE": str(processes)}
        started = []
        for rank in range(processes):
            with (folder / f"{rank}.err").open("wb") as errors:
                started.append(
                    subprocess.Popen(
                        [sys.executable, "-m", "tests.processes", str(folder), function, json.dumps(arguments)],
                        env={**environment, "RANK": str(rank)}, stdout=errors, stderr=errors,
                    )
                )  # fmt: skip
        try:
            codes = [process.wait(timeout=longest_s) for process in started]
        except subprocess.TimeoutExpired:
            codes = [None]
        finally:
            for process in started:
                process.kill()
                process.wait()
        said = "\n".join((folder / f"{rank}.err").read_text(errors="replace") for rank in range(processes))
        assert all(code == 0 for code in codes), f"{codes}\n{said}"
        return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(processes)]


def _call(folder: Path, function: str, arguments: list[Any]) -> None:
    """Join the group of the processes, call the function, and write what it returns."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    rank, processes = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=rank, world_size=processes)
    module, _, name = function.partition(":")
    result = getattr(import_module(module), name)(*arguments)
    (folder / f"{rank}.json").write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # what is left of torch's threads would now and then end the process with a signal


if __name__ == "__main__":
    _call(Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3]))
