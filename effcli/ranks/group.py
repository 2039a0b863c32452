"""What the processes of a run agree on, by torch's own collectives. Alone, everything here is trivial.

`sums`, `largest`, `gathered` and `from_main` are collective: all ranks call them in the same order. Numbers are
gathered and added in the order of the ranks, so that each rank comes to the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, TypeVar

from effcli.errors import DeviceError, EffcliError
from effcli.ranks.connections import hang_up, open_sockets
from effcli.ranks.launch import Launch, timeout_s
from effcli.ranks.lost_peer import lost_peer
from effcli.ranks.meeting import agree
from effcli.ranks.voice import leave_reason

if TYPE_CHECKING:
    import torch
    from torch.distributed import Store

T = TypeVar("T")

_device: torch.device | None = None
"""Where numbers lie that the group's backend takes; None without a group."""


@contextmanager
def joined(launch: Launch, device: torch.device, store: Store | None) -> Iterator[None]:
    """Belong to the process group of the launch: gloo on a CPU, NCCL on CUDA; nothing where there is one process.

    `store` is where the processes have met.

    Raises:
        DeviceError: the backend is not there, or the group is not the one that was launched.
        UsageError: other processes are on another kind of device.
        EffcliError: another process has ended.
    """
    global _device
    if store is None:
        yield
        return
    import torch.distributed as dist

    backend = backend_of(device.type)
    if not dist.is_backend_available(backend):
        raise DeviceError(f"this build of torch has no {backend}, which several processes on {device.type} need")
    agree(store, launch, "device", {"kind of device": device.type})
    before = open_sockets()
    if device.type == "cuda":
        import torch

        torch.cuda.set_device(device)  # torch takes objects that it exchanges to the current device (2.13)
    dist.init_process_group(
        backend,
        store=dist.PrefixStore("group", store),
        rank=launch.rank,
        world_size=launch.world_size,
        timeout=timedelta(seconds=timeout_s()),
        device_id=device if device.type == "cuda" else None,
    )
    _device, connections = device, open_sockets() - before
    try:
        yield
    except BaseException as error:
        told = lost_peer(error, "the run has stopped") if is_lost_peer(error) else error
        leave_reason(told)
        if backend == "gloo":
            hang_up(connections)
        if told is error:
            raise
        raise told from error
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
    return [sum(column) for column in zip(*_numbers_of_all(numbers), strict=True)]


def largest(numbers: Sequence[float]) -> list[float]:
    """Return the largest that any rank has of each number."""
    return [max(column) for column in zip(*_numbers_of_all(numbers), strict=True)]


def _numbers_of_all(numbers: Sequence[float]) -> list[list[float]]:
    """Return the numbers of each rank, in their order."""
    if _device is None:
        return [list(numbers)]
    import torch
    import torch.distributed as dist

    mine = torch.tensor(numbers, dtype=torch.float64, device=_device)
    of_all = [torch.empty_like(mine) for _ in range(world_size())]
    dist.all_gather(of_all, mine)
    return [[float(number) for number in of_one.tolist()] for of_one in of_all]


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


_LOST = ("closed by peer", "reset by peer", "Broken pipe", "Timed out waiting", "NCCL", "recvValue failed")
"""Words of what gloo, NCCL and the store say when another process is gone (torch 2.13)."""


def is_lost_peer(error: BaseException) -> bool:
    """Return whether an exchange failed because another process has ended, or answers no more."""
    if _device is None or isinstance(error, EffcliError):
        return False
    import torch.distributed as dist

    return isinstance(error, dist.DistError) or any(text in str(error) for text in _LOST)
