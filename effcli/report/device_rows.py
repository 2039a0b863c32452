"""Rows of the table *estimated vs measured* for a run on CUDA: from tensors to the whole device; reads only the record.

Up to the reserved bytes, measured numbers are the highest counts of torch's allocator. Those below are what the driver
said in one sample, the one in which this process held the most, so that they add up.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from effcli.report.memory_row import MemoryRow, less, loosest, peak_basis
from effcli.units import Basis, Placement, format_bytes

if TYPE_CHECKING:
    from effcli.measure.device_record import Doing, NvmlFacts, PhasePeak
    from effcli.measure.record import RunRecord

Sampled = Literal["process", "context", "others", "device"]
SAMPLED: Mapping[Sampled, str] = {
    "context": "CUDA context and other",
    "process": "this process",
    "others": "other processes",
    "device": "device in use",
}
"""What the driver is asked for -> label, from the parts to the whole."""
RISE = "rise at the first step"
OUTSIDE = "outside the allocator"
ON_TOP = "on top at the peak"
UNPLANNED = "more outside updates"
CUBLAS = "cuBLAS workspaces"
"""Label, and the name that the plan has for this part of what is live."""
_OUTSIDE = {Placement.PAGED: "paged (managed)", Placement.HOST: "on the host"}
"""Where state lies that torch's CUDA allocator does not count -> label."""


def outside_parts(record: RunRecord) -> dict[Placement, int]:
    """Return the predicted bytes of state that lie outside torch's CUDA allocator, by where they lie."""
    placed = record.optimizer.placements
    return {place: placed[place] for place in _OUTSIDE if placed.get(place)}


def outside_bytes(record: RunRecord) -> int:
    """Return the predicted bytes of state that lie outside torch's CUDA allocator."""
    return sum(outside_parts(record).values())


def state_rows(record: RunRecord) -> list[MemoryRow]:
    """Return what the allocator should count for the state beside what it did, and what it cannot count.

    Parts of the state outside the allocator are left out where they don't show in the state as it is written.
    """
    optimizer, allocator = record.optimizer, record.measured.allocator if record.measured else None
    rows = []
    if shows_outside(record):
        for place, num_bytes in outside_parts(record).items():
            rows.append(_without_twin(_OUTSIDE[place], num_bytes, optimizer.basis))
    if allocator is not None:
        expected, basis = _expected_rise(record)
        rise = allocator.first_step_change_bytes
        rows.append(MemoryRow(label=RISE, estimated=expected, measured=rise, basis=basis, is_part=True))
    return rows


def _expected_rise(record: RunRecord) -> tuple[int | None, str]:
    """Return what the allocator should count more after the first step, in bytes, and on what basis.

    That is the state in the blocks that a simulation of the allocator gives it; without one, in the smallest blocks.
    """
    optimizer = record.optimizer
    simulated = optimizer.plan.first_step_bytes if optimizer.plan else None
    if simulated is not None:
        return simulated, loosest((optimizer.basis, Basis.TRACED))
    smallest = optimizer.allocator_state_bytes
    return smallest, optimizer.basis if smallest is not None else ""


def shows_outside(record: RunRecord) -> bool:
    """Return whether the total before activations reads otherwise without what lies outside the allocator."""
    whole = record.optimizer.total_before_activations_bytes
    return format_bytes(whole) != format_bytes(whole - outside_bytes(record))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Peak:
    """A peak in bytes: as planned, of the updates, which alone are planned, and of the whole run."""

    planned: int | None
    of_updates: int | None
    whole: int | None
    basis: str

    @property
    def is_planned(self) -> bool:
        """Return whether the updates took the most of all parts of the run."""
        return self.of_updates == self.whole

    def row(self, label: str) -> MemoryRow:
        """Return the peak of the whole run; beside the plan only where both are that of updates."""
        known = (self.planned, self.basis) if self.is_planned else (None, "")
        return MemoryRow(label=label, estimated=known[0], measured=self.whole, basis=known[1], is_sum=True)


def allocator_rows(record: RunRecord, *, measured_total: int | None) -> list[MemoryRow]:
    """Return what the peak holds on top of the total before activations, the peak, and what is reserved for it.

    `measured_total` are the measured bytes of weights, gradients and state. Where another part of the run took more
    than its updates, the plan stands beside the updates.
    """
    outside, (allocated, reserved) = outside_bytes(record), _peaks(record)
    on_top = MemoryRow(
        label=ON_TOP,
        estimated=less(allocated.planned, record.optimizer.total_before_activations_bytes - outside),
        measured=less(allocated.of_updates, less(measured_total, outside)),
        basis=allocated.basis,
    )
    comparable = allocated.is_planned and reserved.is_planned
    unused = MemoryRow(
        label="unused of reserved",
        estimated=less(reserved.planned, allocated.planned) if comparable else None,
        measured=less(reserved.whole, allocated.whole),
        basis=reserved.basis if comparable else "",
    )
    left_out = [_without_twin(OUTSIDE, -outside, record.optimizer.basis)] if shows_outside(record) else []
    return [
        *left_out,
        on_top,
        *_cublas(record),
        *([] if allocated.is_planned else _beside_updates(allocated)),
        allocated.row("peak allocated"),
        unused,
        *([] if reserved.is_planned else [_in_updates(reserved)]),
        reserved.row("peak reserved"),
    ]


def _peaks(record: RunRecord) -> tuple[_Peak, _Peak]:
    """Return the peaks of allocated and of reserved bytes."""
    plan, measured = record.optimizer.plan, record.measured
    allocator = measured.allocator if measured else None
    allocated = _Peak(
        planned=record.comparable_planned_peak_bytes,
        of_updates=measured.update_peak_allocated_bytes if measured else None,
        whole=measured.peak_allocated_bytes if measured else None,
        basis=peak_basis(plan) if plan else "",
    )
    reserved = _Peak(
        planned=record.comparable_planned_reserved_bytes,
        of_updates=measured.update_peak_reserved_bytes if measured else None,
        whole=allocator.peak_reserved_bytes if allocator else None,
        basis=_reserved_basis(record),
    )
    return allocated, reserved


def _beside_updates(peak: _Peak) -> list[MemoryRow]:
    """Return what updates had allocated beside their plan, and how much more another part of the run had."""
    updates = MemoryRow(
        label="peak of updates", estimated=peak.planned, measured=peak.of_updates, basis=peak.basis, is_sum=True
    )
    more = MemoryRow(label=UNPLANNED, estimated=None, measured=less(peak.whole, peak.of_updates), basis="")
    return [updates, more]


def _in_updates(peak: _Peak) -> MemoryRow:
    """Return what was reserved in updates beside their plan, where another part of the run had more."""
    return MemoryRow(
        label="reserved in updates",
        estimated=peak.planned,
        measured=peak.of_updates,
        basis=peak.basis,
        is_part=True,
    )


def highest_phase(phases: Mapping[Doing, PhasePeak]) -> Doing | None:
    """Return the part of a run in which the most was allocated; None where none was counted."""
    return max(phases, key=lambda phase: phases[phase].peak_allocated_bytes, default=None)


def _cublas(record: RunRecord) -> list[MemoryRow]:
    """Return the workspaces of cuBLAS among the bytes of the peak, where the plan or the allocator names them."""
    plan, measured = record.optimizer.plan, record.measured
    planned = [part for part in plan.parts if part.name == CUBLAS] if plan else []
    estimated = sum(part.num_bytes for part in planned) if planned else None
    found = measured.allocator.cublas_workspace_bytes if measured and measured.allocator else None
    if estimated is None and found is None:
        return []
    basis = loosest(part.basis for part in planned)
    return [MemoryRow(label=CUBLAS, estimated=estimated, measured=found, basis=basis, is_part=True)]


def driver_rows(record: RunRecord) -> list[MemoryRow]:
    """Return what lies outside torch's allocator, this process, other processes, and all that is in use."""
    plan, nvml = record.optimizer.plan, record.measured.nvml if record.measured else None
    context_basis = plan.basis.get("context", Basis.ASSUMED) if plan and plan.context_bytes is not None else ""
    process = record.comparable_planned_process_bytes
    process_basis = loosest((context_basis, _reserved_basis(record))) if process is not None else ""
    planned: Mapping[Sampled, tuple[int | None, str]] = {
        "context": (plan.context_bytes if plan else None, context_basis),
        "process": (process, process_basis),
    }
    rows = []
    for what, label in SAMPLED.items():
        estimated, basis = planned.get(what, (None, ""))
        measured = sampled_bytes(nvml, what) if nvml else None
        is_sum = what in ("process", "device")
        rows.append(MemoryRow(label=label, estimated=estimated, measured=measured, basis=basis, is_sum=is_sum))
    return rows


def sampled_bytes(nvml: NvmlFacts, what: Sampled) -> int | None:
    """Return an amount in the sample in which this process held the most; where that lacks it, its highest."""
    then: int | None = getattr(nvml.highest, f"{what}_bytes") if nvml.highest else None
    peak: int | None = getattr(nvml, what).peak_bytes
    return peak if then is None else then


def _reserved_basis(record: RunRecord) -> str:
    """Return the basis of the reserved bytes, which the allocator's rules give from those that are allocated."""
    plan = record.optimizer.plan
    if plan is None or record.comparable_planned_reserved_bytes is None:
        return ""
    return loosest((peak_basis(plan), plan.basis.get("reserved", Basis.TRACED)))


def _without_twin(label: str, num_bytes: int, basis: str) -> MemoryRow:
    """Return a detail that is predicted and not measured."""
    return MemoryRow(label=label, estimated=num_bytes, measured=None, basis=basis, is_part=True, has_twin=False)
