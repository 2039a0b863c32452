"""The kernels of CUDA devices, as far as their memory differs from that of the CPU's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from effcli.trace.cuda_attention import Capability
from effcli.trace.cuda_functions import CudaFunctions
from effcli.trace.cuda_workspaces import WORKSPACES
from effcli.units import KIB, MIB, Phase

CUBLAS_BYTES = 2 * 4096 * KIB + 8 * 16 * KIB
CUBLAS_BYTES_FROM_HOPPER = 32 * MIB
"""What one handle of cuBLAS gets as workspace (`aten/src/ATen/cuda/CublasHandlePool.cpp`, torch 2.13)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaKernels:
    """A CUDA device's kernels; see `effcli.trace.kernels.Kernels`.

    Left out, since their source is closed or their size is only known on the device: the workspaces of cuDNN's
    convolutions, and kernels that a compiler makes.
    """

    capability: Capability = (8, 0)

    def chosen(self) -> AbstractContextManager[Any]:
        """Return a context in which functions choose the operators that the device would choose."""
        return CudaFunctions(self.capability)

    def workspace_bytes(self, operator: Any, args: Sequence[Any]) -> Sequence[int]:
        """Return the sizes of storages that the kernel of `operator` takes for the time of the call alone."""
        workspace = WORKSPACES.get(operator)
        return () if workspace is None else workspace(self.capability, args)

    def lasting_bytes(self) -> Mapping[str, Sequence[int]]:
        """Return cuBLAS's workspaces: one for the thread that runs the forward, one for that of the backward pass.

        They come from torch's allocator and are kept by handle and stream, and each thread has a handle of its own.
        cuBLASLt, which adds biases, shares them.
        """
        size = CUBLAS_BYTES_FROM_HOPPER if self.capability >= (9, 0) else CUBLAS_BYTES
        return {Phase.FORWARD: (size,), Phase.BACKWARD: (size,)}
