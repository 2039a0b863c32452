"""A CUDA device that a run believes in: the driver is the stand-in, torch's counters are these."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch

from effcli.measure.cuda_allocator import Counted
from effcli.measure.device_monitor import CudaDevice
from effcli.storage import storages

CARD = "GPU-aaaaaaaa-0000-0000-0000-000000000001"
MIB = 2**20
FAILURE = "WATCHED_FAILURE"
"""Variable of the environment that names the file from which `tests.watched_command` takes how a run fails."""


class FakeCounters:
    """Counters that a test sets; `ever` is what the peaks would be had they never been reset."""

    def __init__(self, allocated_bytes: int = 0, reserved_bytes: int = 0) -> None:
        self.workspace_bytes = 0
        self.num_resets = 0
        self._now = self._peak = self.ever = (allocated_bytes, reserved_bytes)

    def hold(self, allocated_bytes: int, reserved_bytes: int = 0) -> None:
        self._now = (allocated_bytes, reserved_bytes)
        self._peak = self._most(self._peak)
        self.ever = self._most(self.ever)

    def read(self) -> Counted:
        return Counted(
            allocated_bytes=self._now[0],
            reserved_bytes=self._now[1],
            peak_allocated_bytes=self._peak[0],
            peak_reserved_bytes=self._peak[1],
        )

    def reset_peaks(self) -> None:
        self.num_resets += 1
        self._peak = self._now

    def clear_workspaces(self) -> None:
        self._now = (self._now[0] - self.workspace_bytes, self._now[1])

    def _most(self, peak: tuple[int, int]) -> tuple[int, int]:
        return max(peak[0], self._now[0]), max(peak[1], self._now[1])


class LiveTensors(FakeCounters):
    """Counters of the tensors that Python makes from now on in this process, each storage once.

    What is there already is put out of the collector's sight, which is also what makes looking for them quick.
    """

    def __init__(self) -> None:
        super().__init__()
        gc.collect()
        gc.freeze()

    def read(self) -> Counted:
        tensors = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor) and not thing.is_meta]
        found = [storage for tensor in tensors for storage in storages(tensor)]
        live_bytes = sum({storage.identity: storage.num_bytes for storage in found}.values())
        self.hold(live_bytes, live_bytes)
        return super().read()

    def reset_peaks(self) -> None:
        self.read()
        super().reset_peaks()


def believe_in_a_device(
    monkeypatch: pytest.MonkeyPatch,
    counters: FakeCounters,
    *,
    names: tuple[str, ...] = (CARD,),
    has_context: Callable[[], bool] = lambda: False,
    why_no_driver: str | None = None,
) -> None:
    """Let runs of this process, on the CPU, watch a CUDA device with these counters."""
    made = CudaDevice(counters=counters, card_names=lambda: names, has_context=has_context, why_no_driver=why_no_driver)
    monkeypatch.setattr("effcli.measure.device_monitor.cuda_device", lambda device: made)
