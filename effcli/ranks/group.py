"""What the processes of a run agree on, by torch's own collectives. Alone, everything here is trivial.

Every function but `is_main` and `world_size` is collective: all ranks call it in the same order. Numbers are gathered
and added in the order of the ranks, so that each rank comes to the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, TypeVar

from effcli.errors import DeviceError
from effcli.ranks.launch import Launch

if TYPE_CHECKING:
    import torch

T = TypeVar("T")

_device: torch.device | None = None
"""Where numbers lie that the group's backend takes; None without a group."""


@contextmanager
def joined(launch: Launch, device: torch.device, *, timeout_s: float | None = None) -> Iterator[None]:
    """Belong to the process group of the launch: gloo on a CPU, NCCL on CUDA; nothing where there is one process.

    Raises:
        DeviceError: the backend is not there, or the group is not the one that was launched.
    """
    global _device
    if not launch.has_many:
        yield
        return
    import torch.distributed as dist

    backend = backend_of(device.type)
    if not dist.is_available() or not dist.is_backend_available(backend):
        raise DeviceError(f"this build of torch has no {backend}, which several processes on {device.type} need")
    options = {} if timeout_s is None else {"timeout": timedelta(seconds=timeout_s)}
    if device.type == "cuda":
        options["device_id"] = device
    dist.init_process_group(backend, **options)
    _device = device
    try:
        if (dist.get_world_size(), dist.get_rank()) != (launch.world_size, launch.rank):
            raise DeviceError(
                f"{launch.world_size} processes were launched and {dist.get_world_size()} found each other; "
                "start again with torchrun"
            )
        yield
    finally:
        _device = None
        dist.destroy_process_group()


def backend_of(device: str) -> str:
    """Return torch's backend for processes on a kind of device."""
    return "nccl" if device == "cuda" else "gloo"


def world_size() -> int:
    """Return how many processes there are."""
    import torch.distributed as dist

    return int(dist.get_world_size()) if _device is not None else 1


def rank() -> int:
    """Return the number of this process, from 0."""
    import torch.distributed as dist

    return int(dist.get_rank()) if _device is not None else 0


def is_main() -> bool:
    """Return whether this is the process that writes files and speaks."""
    return rank() == 0


def sums(numbers: Sequence[float]) -> list[float]:
    """Return the sum over all ranks of each number, in float64: whole ones are exact up to 2^53."""
    if _device is None:
        return list(numbers)
    import torch
    import torch.distributed as dist

    mine = torch.tensor(numbers, dtype=torch.float64, device=_device)
    gathered = [torch.empty_like(mine) for _ in range(world_size())]
    dist.all_gather(gathered, mine)
    return [float(total) for total in torch.stack(gathered).sum(dim=0).tolist()]


def gathered(value: T) -> list[T]:
    """Return the value of each rank, in their order; values are pickled."""
    if _device is None:
        return [value]
    import torch.distributed as dist

    values: list[T | None] = [None] * world_size()
    dist.all_gather_object(values, value)
    return values  # type: ignore[return-value]  # each place is filled


def from_main(value: T) -> T:
    """Return the value of rank 0; it is pickled."""
    if _device is None:
        return value
    import torch.distributed as dist

    values = [value]
    dist.broadcast_object_list(values, src=0)
    return values[0]
