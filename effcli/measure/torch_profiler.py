"""The profiler of torch (2.13), by what it does not offer in public: this is where such names are used."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def is_running() -> bool:
    """Return whether some profiler records in this process."""
    import torch

    return bool(torch.autograd._profiler_enabled())


def changes(profile: torch.autograd.profiler.profile) -> list[tuple[int, int]]:
    """Return address and bytes of each allocation (above 0) and free (below) on the CPU, in order of time.

    The public `key_averages` and `events` have no addresses.
    """
    found, waiting = [], list(reversed(list(profile.kineto_results.experimental_event_tree())))
    while waiting:
        event = waiting.pop()
        waiting += reversed(event.children)
        if event.tag.name == "Allocation" and event.typed[1].device.type == "cpu":
            found.append((event.start_time_ns, event.typed[1].ptr, event.typed[1].alloc_size))
    return [(address, num_bytes) for _, address, num_bytes in sorted(found, key=lambda change: change[0])]
