"""Jobs of all engines in several processes; started as a module, this is one of the processes.

What each did is written to a file of its rank: outcomes by name, without their models.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from effcli.engines.surroundings import isolated_from_caller
from effcli.errors import DeviceError
from effcli.ranks.group import joined, world_size
from effcli.ranks.launch import read_launch
from effcli.ranks.meeting import met
from tests.jobs import ENGINES, Outcome, run_job, tiny_model

LONGEST_S = 300.0
"""Seconds after which processes that wait for each other are given up."""
CPU = torch.device("cpu")
ROWS = 13
"""With 8 rows in a window, the last one has micro-batches of 4 rows and of 1, which one process alone has."""


def adamw(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=1e-3)


def adagrad(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(groups, lr=1e-3)  # makes its state before the first step


def sgd(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr=0.1)


def outcomes_of(names: Sequence[str], folder: Path, *, ranks: int) -> list[dict[str, Any]]:
    """Return what each of `ranks` processes found in these sets of jobs."""
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    launcher = {
        "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": store.port,
        "TORCHELASTIC_USE_AGENT_STORE": "True", "OMP_NUM_THREADS": 1,
    }  # fmt: skip
    ended = subprocess.run(
        [sys.executable, "-m", "tests.ranked_jobs", str(folder), *names],
        env={**os.environ, **{key: str(value) for key, value in launcher.items()}},
        stderr=subprocess.PIPE, text=True, timeout=LONGEST_S, start_new_session=True, check=False,
    )  # fmt: skip
    assert not ended.returncode, ended.stderr
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(ranks)]


def replicas() -> dict[str, Any]:
    """Return how each engine trains replicas, for two heads, and what it exchanges."""
    found: dict[str, Any] = {}
    with counted_exchanges() as exchanges:
        for engine in ENGINES:
            for task in ("classification", "causal-lm"):
                exchanges.clear()
                made = run_job(engine, task, num_rows=ROWS, batch_size=4 // world_size(), accum=2, epochs=2)
                found[f"{engine} {task}"] = replace(made, model=None)
                found[f"{engine} {task} exchanges"] = len(exchanges)
            exchanges.clear()
            eight = run_job(engine, "classification", num_rows=8, batch_size=1, accum=8 // world_size())
            found[f"{engine} eight"] = replace(eight, model=None)
            found[f"{engine} eight exchanges"] = list(exchanges)
            found[f"{engine} rest"] = replace(rest_of_run(engine), model=None)
    return found


def rest_of_run(engine: str) -> Outcome:
    """Return the updates after the first, which is in the middle of an epoch, as a resumed run makes them."""
    settings = {"num_rows": ROWS, "batch_size": 4 // world_size(), "accum": 2, "epochs": 2, "scheduler": "constant"}
    model = tiny_model("classification")
    run_job("pytorch", "classification", **settings | {"max_steps": 1}, model=model)
    return run_job(engine, "classification", **settings, model=model, start=1)


def shards() -> dict[str, Any]:
    """Return how each engine trains a sharded model, with an optimizer that makes its state early and one that does
    not, and in bf16."""
    found: dict[str, Any] = {}
    for engine in ENGINES:
        for task, make_optimizer in (("classification", adagrad), ("causal-lm", adamw)):
            kept: list[torch.optim.Optimizer] = []
            outcome = run_job(
                engine, task, num_rows=ROWS, batch_size=4 // world_size(), accum=2, epochs=2, is_sharded=True,
                make_optimizer=lambda groups, make=make_optimizer, kept=kept: kept.append(make(groups)) or kept[0],
            )  # fmt: skip
            found[f"{engine} {task}"] = replace(outcome, model=None)
            found[f"{engine} {task} state"] = local_state(kept[0])
        bf16 = run_job(engine, "causal-lm", num_rows=8, batch_size=2, accum=2, precision="bf16", is_sharded=True)
        found[f"{engine} bf16"] = replace(bf16, model=None)
    return found


def unsynchronised() -> dict[str, Any]:
    """Return what is said where accelerate is not told to use the CPU, and takes itself for alone."""
    accelerate, trainer = (import_module(f"effcli.engines.{name}") for name in ("accelerate", "trainer"))
    changes = {
        "accelerate": (accelerate, "Accelerator", lambda make, cpu, **settings: make(**settings)),
        "trainer": (trainer, "TrainingArguments", lambda make, use_cpu, **settings: make(**settings)),
    }
    return {name: _error_of(name, *change) for name, change in changes.items()}


def _error_of(engine: str, module: Any, name: str, change: Callable[..., Any]) -> str:
    made = getattr(module, name)
    setattr(module, name, partial(change, made))
    try:
        run_job(engine, "classification", num_rows=4, batch_size=1, accum=1)
    except DeviceError as error:
        return str(error)
    finally:
        setattr(module, name, made)
    return "trained"


def local_state(optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes of state that this process holds."""
    tensors = [
        value for state in optimizer.state.values() for value in state.values() if isinstance(value, torch.Tensor)
    ]
    return sum(getattr(tensor, "_local_tensor", tensor).nbytes for tensor in tensors)


@contextmanager
def counted_exchanges() -> Iterator[list[int]]:
    """Give the elements of each bucket of gradients that replicas exchange meanwhile, one by one."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    elements: list[int] = []
    make = DistributedDataParallel.__init__

    def counting(group, bucket):  # torch refuses annotations that are strings
        elements.append(bucket.buffer().numel())
        return allreduce_hook(group, bucket)

    def made(model: DistributedDataParallel, *arguments: Any, **settings: Any) -> None:
        make(model, *arguments, **settings)
        assert model.gradient_as_bucket_view
        model.register_comm_hook(None, counting)

    DistributedDataParallel.__init__ = made
    try:
        yield elements
    finally:
        DistributedDataParallel.__init__ = make


def whole_run(task: str, make_optimizer: Callable[..., torch.optim.Optimizer] = sgd, **settings: Any) -> Outcome:
    """Return what one process makes of the jobs of several, by the plain PyTorch loop."""
    sizes = {"num_rows": ROWS, "batch_size": 4, "accum": 2, "epochs": 2}
    return run_job("pytorch", task, **sizes, make_optimizer=make_optimizer, **settings)


def _be_rank(rank: int, names: Sequence[str], folder: Path) -> None:
    """Become one of the processes, which starts with all that was imported; returns never."""
    code = 1
    try:
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
        launch = read_launch()
        with met(launch, {}) as store, joined(launch, CPU, store), isolated_from_caller(CPU):
            torch.save({name: globals()[name]() for name in names}, folder / f"{rank}.pt")
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def _launch(folder: Path, names: Sequence[str]) -> int:
    """Return 0 where all processes have done their jobs; one that has not ends the others."""
    for engine in ENGINES:
        import_module(f"effcli.engines.{engine}")
    pids = set()
    for rank in range(int(os.environ["WORLD_SIZE"])):
        pid = os.fork()
        if not pid:
            _be_rank(rank, names, folder)
        pids.add(pid)
    failed = 0
    while pids:
        pid, status = os.wait()
        pids.discard(pid)
        if status and not failed:
            failed = 1
            for other in pids:
                os.kill(other, signal.SIGKILL)
    return failed


if __name__ == "__main__":
    warnings.simplefilter("error")
    sys.exit(_launch(Path(sys.argv[1]), sys.argv[2:]))
