"""The CPU's kernels, as far as they take memory that a trace on fake CPU tensors doesn't show."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from effcli.trace.cpu_workspaces import WORKSPACES


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuKernels:
    """The CPU's kernels; see `effcli.trace.kernels.Kernels`. Some take a buffer for each of `num_threads`."""

    num_threads: int = field(default_factory=torch.get_num_threads)

    def chosen(self) -> AbstractContextManager[Any]:
        """Return a context in which random states are counted; else fake CPU tensors choose as real ones do."""
        return _random_states_seen()

    def workspace_bytes(self, operator: Any, args: Sequence[Any]) -> Sequence[int]:
        """Return the sizes of storages that the kernel of `operator` takes for the time of the call alone."""
        workspace = WORKSPACES.get(operator)
        return () if workspace is None else workspace(self.num_threads, operator, args)

    def lasting_bytes(self) -> Mapping[str, Sequence[int]]:
        """Return nothing: no library keeps storages of torch's CPU allocator."""
        return {}


@contextmanager
def _random_states_seen() -> Iterator[None]:
    """Let the generator's state be a tensor like others, while open.

    Each recomputed module keeps one (`torch/utils/checkpoint.py`, 2.13), some kilobytes that no operator makes.
    """
    read, write = torch.get_rng_state, torch.set_rng_state
    num_bytes = read().nbytes
    torch.get_rng_state = lambda: torch.empty(num_bytes, dtype=torch.uint8)
    torch.set_rng_state = lambda state: None
    try:
        yield
    finally:
        torch.get_rng_state, torch.set_rng_state = read, write
