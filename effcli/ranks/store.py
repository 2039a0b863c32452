"""The store that a launcher's variables name: where processes leave word for each other before they are a group."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import TYPE_CHECKING

from effcli.errors import DeviceError, first_line
from effcli.ranks.launch import Launch, restarts

if TYPE_CHECKING:
    from torch.distributed import Store


def find_store(launch: Launch, *, wait_s: float) -> Store:
    """Return the store; waits for it up to `wait_s` seconds.

    torchrun keeps it when it starts the processes again, with the addresses in it of those that have ended, on which
    gloo would wait in vain (torch 2.13): each start has words of its own.

    Raises:
        DeviceError: it is not to be reached.
    """
    import torch.distributed as dist

    if not dist.is_available():
        raise DeviceError("this build of torch has no torch.distributed, which several processes need")
    try:
        store, _, _ = next(dist.rendezvous("env://", timeout=timedelta(seconds=wait_s)))
    except (dist.DistError, ValueError) as error:
        raise DeviceError(
            f"rank {launch.rank} does not find the others at MASTER_ADDR and MASTER_PORT ({first_line(error)}); "
            "start again with torchrun"
        ) from error
    return dist.PrefixStore(f"start {restarts()}", store)


def is_of_launcher() -> bool:
    """Return whether the launcher holds the store, as torchrun does: it is there whichever process has ended."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
