"""The process-wide state of accelerate (1.15). Nothing public puts it back: this is where other names are used."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from accelerate import Accelerator
from accelerate.data_loader import prepare_data_loader
from accelerate.state import AcceleratorState, GradientState, PartialState
from torch.nn.parallel import DistributedDataParallel

from effcli.data.batches import EpochLoader
from effcli.engines.base import Loop
from effcli.engines.distributing import check_sharded
from effcli.engines.surroundings import without_launcher_settings
from effcli.errors import DeviceError
from effcli.ranks.group import world_size


def forget_states() -> None:
    """Forget device, precision and accumulation of an earlier `Accelerator`, which would decide those of the next."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def own_batches(loader: EpochLoader, device: torch.device) -> EpochLoader:
    """Return the batches on a device. They are this process's alone already: accelerate is told that there is one
    process, or it would deal them out once more."""
    placed: EpochLoader = prepare_data_loader(loader, device, num_processes=1, process_index=0, put_on_device=True)
    return placed


def check_spread(accelerator: Accelerator, model: torch.nn.Module, loop: Loop) -> None:
    """Prove that accelerate knows all processes of the run, and that what it prepared exchanges gradients with them.

    Under `torchrun` a plain `Accelerator()` takes itself for alone on a CPU, and `prepare` then gives the model back
    as it was: each process would train a copy of its own (accelerate 1.15).

    Raises:
        DeviceError: it knows another number of processes or another device, or the model is neither a replica nor
            sharded.
    """
    if accelerator.num_processes != world_size():
        raise DeviceError(
            f"{world_size()} processes were launched and accelerate knows of {accelerator.num_processes}, which would "
            "train copies; use --engine pytorch"
        )
    if world_size() == 1:
        return
    if (accelerator.device.type, accelerator.device.index or 0) != (loop.device.type, loop.device.index or 0):
        raise DeviceError(f"accelerate computes on {accelerator.device} and not {loop.device}; use --engine pytorch")
    if loop.shard == "fsdp":
        check_sharded(model)
    elif not isinstance(model, DistributedDataParallel):
        raise DeviceError(
            f"accelerate left the model as it was, so that {world_size()} processes would train copies; use "
            "--engine pytorch"
        )


@contextmanager
def one_process() -> Iterator[None]:
    """Let accelerate know that there is one process, which its trackers ask, those of rank 0; leave no trace of it.

    The state decides the device of whoever asks next: where the engine has made one, that stays.
    """
    if PartialState._shared_state:
        yield
        return
    with without_launcher_settings(and_ranks=True):
        PartialState(cpu=True)
    try:
        yield
    finally:
        PartialState._reset_state()
