"""torch's CUDA allocator over a run: the most that each part took, and what cuBLAS works in."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

from effcli.collector import collector_paused
from effcli.errors import kind_and_line
from effcli.measure.allocator_settings import refuse_no_caching
from effcli.measure.device_record import AllocatorFacts, Doing, PhasePeak

if TYPE_CHECKING:
    import torch

    from effcli.measure.first_steps import FirstSteps

SHARE = 0.01
"""Share of the time that looking at phases may take; more of it, and whole updates are left out."""
ALWAYS = 16
"""Updates that are looked at whatever it costs: the first few have most of what is new."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """Bytes that the allocator counts at one moment, and the most of each since its peaks were reset."""

    allocated_bytes: int
    reserved_bytes: int
    peak_allocated_bytes: int
    peak_reserved_bytes: int


class Counters(Protocol):
    """What is asked of a device's allocator."""

    def read(self) -> Counted:
        """Return the counters; any thread may ask."""

    def reset_peaks(self) -> None:
        """Set both peaks to what is held now."""

    def clear_workspaces(self) -> None:
        """Free what cuBLAS works in, which is among the allocated; it is allocated again when it is needed.

        Raises:
            Exception: whatever torch raises, AttributeError where it cannot do that.
        """


class TorchCounters:
    """The counters of a CUDA device as torch has them.

    One dictionary from C++ has them all; `torch.cuda.memory_allocated` and the like each flatten and sort it in Python
    as well (torch 2.13). The backend `cudaMallocAsync` counts these four too, from the driver's pool, and lets its
    peaks be reset; `expandable_segments` counts the pages that are mapped. An allocator that is plugged in has none:
    torch raises a RuntimeError then, and so do these where it caches nothing and would say 0.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def read(self) -> Counted:
        """Return the counters, zeros before CUDA is initialised."""
        import torch

        refuse_no_caching()
        counters = torch.cuda.memory_stats_as_nested_dict(self._device)
        allocated, reserved = (
            counters[name]["all"] if counters else {} for name in ("allocated_bytes", "reserved_bytes")
        )
        return Counted(
            allocated_bytes=int(allocated.get("current", 0)),
            reserved_bytes=int(reserved.get("current", 0)),
            peak_allocated_bytes=int(allocated.get("peak", 0)),
            peak_reserved_bytes=int(reserved.get("peak", 0)),
        )

    def reset_peaks(self) -> None:
        """Set both peaks to what is held now; before CUDA is initialised there are none."""
        import torch

        refuse_no_caching()
        if torch.cuda.is_initialized():
            torch.cuda.reset_peak_memory_stats(self._device)

    def clear_workspaces(self) -> None:
        """Free the workspaces of cuBLAS, by the function that torch's own tests use (2.13)."""
        import torch

        torch._C._cuda_clearCublasWorkspaces()


class Peaks(NamedTuple):
    """The most bytes allocated and the most reserved."""

    allocated_bytes: int = 0
    reserved_bytes: int = 0

    def or_more(self, other: Peaks) -> Peaks:
        """Return the larger of each."""
        return Peaks(*map(max, self, other))


class AllocatorPhases:
    """Keeps the peaks of each part of a run, by resetting torch's own peaks where one part ends.

    What torch's peaks would have said without that is the largest of all, `peaks`: use it instead of them. A boundary
    costs a reading and a reset, some 0.05 ms; an update has two per micro-batch and one before the step. Where that is
    more than `SHARE` of the time, whole updates are left out, none of the first `ALWAYS`: their peaks count in `peaks`
    alone, and `num_updates_seen` says of how many updates the parts are.
    """

    def __init__(self, counters: Counters, *, clock: Callable[[], float] = time.perf_counter) -> None:
        self._counters, self._clock = counters, clock
        self._phase: Doing = "loading"
        self._is_seen = self._sees_update = self._has_seen_all = True
        self._phases: dict[Doing, Peaks] = {}
        self._all = Peaks()
        self._num_updates = self._num_seen = 0
        self._began_s: float | None = None
        self._spent_s = 0.0
        counters.reset_peaks()

    def enter(self, phase: Doing) -> None:
        """Begin a part, and end the one before it; nothing where it is the same."""
        if phase == self._phase:
            return
        now_s = self._clock()
        if self._began_s is None:
            self._began_s = now_s
        if phase == "step":
            self._num_updates += 1
            self._num_seen += self._sees_update
        elif self._phase in ("loading", "step", "evaluation"):
            self._sees_update = self._num_updates < ALWAYS or self._spent_s <= SHARE * (now_s - self._began_s)
        sees_next = self._sees_update or phase == "evaluation"
        self._has_seen_all &= sees_next
        if self._is_seen or sees_next:
            self._end()
        self._phase, self._is_seen = phase, sees_next
        self._spent_s += self._clock() - now_s

    def peaks(self) -> Peaks:
        """Return the most bytes since this was made, in whatever part, as far as CUDA still answers."""
        try:
            return self._all.or_more(_peaks_of(self._counters.read()))
        except RuntimeError:
            return self._all

    def finish(self) -> None:
        """End the last part, as far as CUDA still answers; what comes later belongs to no part."""
        with suppress(RuntimeError):
            self._end()
        self._is_seen = False

    @property
    def phases(self) -> dict[Doing, Peaks]:
        """Return the peaks of the parts that have ended."""
        return dict(self._phases)

    @property
    def num_updates_seen(self) -> int | None:
        """Return how many updates the parts are of, None where they are of all, those without a step included."""
        return None if self._has_seen_all else self._num_seen

    def _end(self) -> None:
        peaks = _peaks_of(self._counters.read())
        self._all = self._all.or_more(peaks)
        if self._is_seen:
            self._phases[self._phase] = self._phases.get(self._phase, Peaks()).or_more(peaks)
        self._counters.reset_peaks()


def allocator_facts(counters: Counters, phases: AllocatorPhases, first_steps: FirstSteps | None) -> AllocatorFacts:
    """Return what was counted, at the end of a run: the workspaces of cuBLAS are freed to see what they took."""
    phases.finish()
    workspace_bytes, reason = _workspaces(counters)
    peaks = phases.peaks()
    return AllocatorFacts(
        peak_allocated_bytes=peaks.allocated_bytes,
        peak_reserved_bytes=peaks.reserved_bytes,
        phases={
            name: PhasePeak(peak_allocated_bytes=peak.allocated_bytes, peak_reserved_bytes=peak.reserved_bytes)
            for name, peak in phases.phases.items()
        },
        num_updates_seen=phases.num_updates_seen,
        first_step_change_bytes=first_steps.change_bytes if first_steps else None,
        first_step_reason=first_steps.reason if first_steps else "no step was made",
        cublas_workspace_bytes=workspace_bytes,
        cublas_reason=reason,
    )


def _workspaces(counters: Counters) -> tuple[int | None, str | None]:
    """Return the bytes that cuBLAS works in, or None and the reason."""
    try:
        with collector_paused():
            before_bytes = counters.read().allocated_bytes
            counters.clear_workspaces()
            after_bytes = counters.read().allocated_bytes
    except AttributeError:
        return None, "this build of torch does not tell the workspaces of cuBLAS apart"
    except Exception as error:  # whatever CUDA says after a failure
        return None, kind_and_line(error)
    return before_bytes - after_bytes, None


def _peaks_of(counted: Counted) -> Peaks:
    return Peaks(counted.peak_allocated_bytes, counted.peak_reserved_bytes)
