"""The seam between the tracer and a device: what its kernels allocate that a trace on fake CPU tensors doesn't show."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol


class Kernels(Protocol):
    """A device's kernels, as far as they allocate otherwise than those that run under fake CPU tensors."""

    def chosen(self) -> AbstractContextManager[Any]:
        """Return a context in which functions choose the operators that the device would choose.

        `precision` is a name of `effcli.spec.Precision`; autocast itself is opened by the caller.
        """

    def workspace_bytes(self, operator: Any, args: Sequence[Any]) -> Sequence[int]:
        """Return the sizes of storages that the kernel of `operator` takes for the time of the call alone."""

    def lasting_bytes(self) -> Mapping[str, Sequence[int]]:
        """Return storages that the device's libraries keep from their first use on, by `Phase` of that use."""
