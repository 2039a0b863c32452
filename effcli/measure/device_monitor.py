"""`DeviceMonitor`: watches the CUDA device of one run, through torch's allocator and through the NVIDIA driver."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING

from effcli.measure.card_readings import PATIENCE_S, opened, read_once
from effcli.measure.cuda_allocator import (
    AllocatorPhases,
    Counters,
    Peaks,
    TorchCounters,
    allocator_facts,
)
from effcli.measure.device_record import AllocatorFacts, Doing, NvmlFacts
from effcli.measure.device_samples import Baseline
from effcli.measure.first_steps import FirstSteps
from effcli.measure.free_memory import free_memory
from effcli.measure.sampler import Sampler
from effcli.nvml.answers import CardReading
from effcli.ranks.group import world_size

if TYPE_CHECKING:
    import torch

ROCM = "this is a ROCm build of torch, and the device no NVIDIA GPU"


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaDevice:
    """What is asked of torch about a CUDA device.

    `card_names` returns what the driver may call it, `has_context` whether this process may hold memory of a device
    by now. `why_no_driver` says why there is no driver to ask, None where there may be one.
    """

    counters: Counters
    card_names: Callable[[], Sequence[str]]
    has_context: Callable[[], bool]
    why_no_driver: str | None = None


def cuda_device(device: torch.device) -> CudaDevice | None:
    """Return what can be asked about a device; None where it is no CUDA device."""
    if device.type != "cuda":
        return None
    import torch

    from effcli.devices import card_names

    return CudaDevice(
        counters=TorchCounters(device),
        card_names=lambda: card_names(device),
        has_context=lambda: _has_context(device),
        why_no_driver=ROCM if torch.version.hip else None,
    )


def _has_context(device: torch.device) -> bool:
    """Return whether this process has, or may have, CUDA's context on a device: what torch does first makes none."""
    import torch

    if not torch.cuda.is_initialized():
        return False
    ask = getattr(torch._C, "_cuda_hasPrimaryContext", None)  # torch 2.13 has it, undocumented
    return ask is None or bool(ask(device.index))


def read_baseline(device: torch.device, *, interval_s: float, patience_s: float = PATIENCE_S) -> Baseline | None:
    """Return what a device has in use before this process works on it; None where nothing is sampled.

    To be called before anything makes a CUDA context. Raises nothing of the driver's, and waits `patience_s` seconds at
    most.
    """
    watched = cuda_device(device) if interval_s else None
    if watched is None:
        return None
    if watched.why_no_driver is not None:
        return Baseline(reason=watched.why_no_driver)
    if watched.has_context():
        what = "the processes of this run had met on their cards" if world_size() > 1 else "this process had used CUDA"
        return Baseline(reason=f"{what} before this run began")
    return read_once(
        watched.card_names,
        _in_use,
        lambda why: Baseline(reason=why),
        patience_s=patience_s,
        name="effcli-nvml-baseline",
    )


def _in_use(reading: CardReading) -> Baseline:
    if reading.process.num_bytes:
        return Baseline(reason="this process held memory of the device before this run began")
    return Baseline(used_bytes=reading.used.num_bytes, reason=reading.used.reason)


def _let_go(counters: Counters) -> None:
    """Free what an earlier run of this process left, which would count as this run's: models lie in cycles."""
    if counters.read().reserved_bytes:
        free_memory()


class DeviceMonitor:
    """Watches a device while its `with` block lasts, from before a run's model is built; inert on a CPU.

    However the block is left, the thread that samples has ended then, and the driver is closed. Every run has a monitor
    of its own, which resets the allocator's peaks.
    """

    def __init__(self, device: torch.device, *, interval_s: float, baseline: Baseline | None) -> None:
        self._device, self._interval_s, self._baseline = device, interval_s, baseline
        self._watched = cuda_device(device)
        self._phases: AllocatorPhases | None = None
        self._first_steps: FirstSteps | None = None
        self._sampler: Sampler | None = None

    def __enter__(self) -> DeviceMonitor:
        if self._watched is not None:
            with suppress(RuntimeError):  # of an allocator that is plugged in: it counts nothing
                _let_go(self._watched.counters)
                self._phases = AllocatorPhases(self._watched.counters)
            self._sampler = self._new_sampler(self._watched)
        if self._sampler is not None:
            try:
                self._sampler.start()
            except BaseException:  # raised by a signal's handler
                self.stop()
                raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def _new_sampler(self, watched: CudaDevice) -> Sampler | None:
        """Return what samples the device, without torch's counters where they count nothing; None where it is off."""
        if not self._interval_s or watched.why_no_driver is not None:
            return None
        return Sampler(
            lambda: opened(watched.card_names),
            watched.counters if self._phases is not None else None,
            interval_s=self._interval_s,
            baseline=self._baseline,
        )

    def stop(self) -> None:
        """Sample a last time, and end the sampling. May be called more than once."""
        if self._sampler is not None:
            self._sampler.stop()

    def enter(self, phase: Doing) -> None:
        """Let a part of the run begin."""
        if self._phases is not None:
            self._phases.enter(phase)

    def first_steps(self, optimizer: torch.optim.Optimizer, *, is_resumed: bool) -> FirstSteps | None:
        """Return what watches the optimizer's first step, which is to be armed; None where nothing is counted."""
        if self._watched is None or self._phases is None:
            return None
        self._first_steps = FirstSteps(self._watched.counters, optimizer, is_resumed=is_resumed)
        return self._first_steps

    def peaks(self) -> Peaks | None:
        """Return the allocator's peaks since the monitor was entered; None on a CPU, or where it counts none."""
        return self._phases.peaks() if self._phases is not None else None

    def allocator_facts(self) -> AllocatorFacts | None:
        """Return what the allocator counted, None where it counts nothing; to be called once, after training."""
        if self._watched is None or self._phases is None:
            return None
        return allocator_facts(self._watched.counters, self._phases, self._first_steps)

    def nvml_facts(self) -> NvmlFacts:
        """Return what the driver said so far."""
        if self._sampler is not None:
            return self._sampler.facts()
        if self._watched is None:
            return NvmlFacts(reason=f"the run was on {self._device.type}, not on an NVIDIA GPU")
        off = "sampling is switched off (--nvml-interval 0)"
        return NvmlFacts(reason=self._watched.why_no_driver or off)
