"""To be imported by no test: makes `effcli` of this process believe in a CUDA device, and its updates slow.

The file, named by `WATCHED_FAILURE`, holds `error`, `memory` or `memory once`. When the command ends, its threads are
written to stderr.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from effcli.cli import app
from effcli.engines.session import TrainingSession
from effcli.measure import device_monitor
from effcli.measure.device_monitor import CudaDevice
from effcli.pipeline.run_plan import RunPlanner
from tests.watched import CARD, FAILURE, MIB, FakeCounters

STEP_S = 0.1
_command, _train_begin = app.main, TrainingSession.train_begin
_steps: list[int] = []


def _begin(session: TrainingSession, scaler: Any = None) -> None:
    """Let training begin, and with it what happens to its steps: not to those of a plan."""
    _train_begin(session, scaler)
    failure = Path(os.environ[FAILURE]).read_text()

    def before_step(*ignored: object) -> None:
        time.sleep(STEP_S)
        _steps.append(1)
        if failure == "error" and len(_steps) == 3:
            raise RuntimeError("the cable")
        if failure == "memory" or (failure == "memory once" and len(_steps) == 3):
            handle.remove()
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")

    handle = register_optimizer_step_pre_hook(before_step)


def _main() -> None:
    try:
        _command()
    finally:
        names = sorted({thread.name for thread in threading.enumerate()} - {"tqdm_monitor"})  # which datasets leaves
        sys.stderr.write(f"threads at the end: {', '.join(names)}\n")


RunPlanner.plan = lambda *ignored: None  # these runs are about something else
_device = CudaDevice(
    counters=FakeCounters(15_006 * MIB, 16_726 * MIB), card_names=lambda: (CARD,), has_context=lambda: False
)
device_monitor.cuda_device = lambda device: _device
app.main = _main
TrainingSession.train_begin = _begin
