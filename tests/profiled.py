"""What the CPU allocator hands out while a function runs, from the profiler's record of every allocation and free."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from effcli.measure.peak import storage_bytes
from effcli.storage import leaves


def memory_changes(function: Callable[[], Any]) -> list[int]:
    """Return the sizes in bytes of the allocations (above 0) and frees (below) during the call, in order."""
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        function()
    events = [event for event in record.profiler.kineto_results.events() if event.name() == "[memory]"]
    return [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]


def profiled_peak(function: Callable[[], Any]) -> int:
    """Return the highest value of (allocated - freed) in bytes during the call; 0 where nothing is allocated.

    What lived before the call is not in it: see `live_bytes`.
    """
    live = highest = 0
    for change in memory_changes(function):
        live += change
        highest = max(highest, live)
    return highest


def live_bytes(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    batches: Iterable[Mapping[str, torch.Tensor]] = (),
) -> int:
    """Return the bytes that are held between two updates, each storage once.

    These are parameters and buffers with the gradients they have now, what the optimizer holds, and the batches.
    """
    held = [*model.parameters(), *model.buffers()]
    held += [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    if optimizer is not None:
        held += [leaf for _, leaf in leaves(vars(optimizer), "") if isinstance(leaf, torch.Tensor)]
    held += [tensor for batch in batches for tensor in batch.values()]
    return storage_bytes(held)
