"""The CPU's kernels, as far as they take memory that a trace on fake CPU tensors doesn't show."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from effcli.trace.cpu_workspaces import WORKSPACES


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuKernels:
    """The CPU's kernels; see `effcli.trace.kernels.Kernels`. Some take a buffer for each of `num_threads`."""

    num_threads: int = field(default_factory=torch.get_num_threads)

    def chosen(self, precision: str) -> AbstractContextManager[Any]:
        """Return a context that changes nothing: fake CPU tensors choose as real ones do."""
        return nullcontext()

    def workspace_bytes(
        self, operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any
    ) -> Sequence[int]:
        """Return the sizes of storages that the kernel of `operator` takes for the time of the call alone."""
        workspace = WORKSPACES.get(operator)
        return () if workspace is None else workspace(self.num_threads, operator, args)

    def lasting_bytes(self) -> Mapping[str, Sequence[int]]:
        """Return nothing: no library keeps storages of torch's CPU allocator."""
        return {}
