"""What the numbers of a run on CUDA are: which moment each is of, what they leave out, why some are missing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from effcli.report.device_rows import (
    RISE,
    SAMPLED,
    Sampled,
    highest_phase,
    outside_bytes,
    outside_parts,
    sampled_bytes,
)
from effcli.report.number_text import NOT_AVAILABLE, in_mib
from effcli.units import Placement, count

if TYPE_CHECKING:
    from effcli.measure.device_record import AllocatorFacts, NvmlFacts
    from effcli.measure.record import Measured, RunRecord

_Told = Iterator[tuple[str, str]]


def device_remarks(record: RunRecord) -> _Told:
    """Yield labels and sentences about the rows of a run on CUDA; nothing where it was not, or was not measured."""
    measured = record.measured
    if measured is None or not record.is_on_cuda:
        return
    yield from _about_state(record, measured.allocator)
    if measured.peak_allocated_bytes is not None:
        yield "on top", _about_the_rest(record)
    yield from _about_peaks(record, measured)
    yield "context", _about_context(record)
    yield from _about_samples(measured.nvml, measured.allocator)
    yield from missing_remarks(measured.nvml)


def _about_state(record: RunRecord, allocator: AllocatorFacts | None) -> _Told:
    parts = [f"{in_mib(num_bytes)} {_PLACES[place]}" for place, num_bytes in outside_parts(record).items()]
    if parts:
        yield "state", f"{' and '.join(parts)}, outside torch's allocator"
    if allocator is None:
        return
    if allocator.first_step_change_bytes is None:
        yield "state", f"{RISE} {_missing(allocator.first_step_reason)}"
    else:
        steps = " (of two where state is paged)" if record.optimizer.placements.get(Placement.PAGED) else ""
        yield "state", f"{RISE}{steps}: of allocated bytes, in the allocator's blocks"
    if allocator.cublas_workspace_bytes is None and allocator.cublas_reason:
        yield "cuBLAS", _missing(allocator.cublas_reason)


_PLACES = {Placement.PAGED: "are paged (managed) memory", Placement.HOST: "lie on the host"}
"""Where a part of the state lies outside the allocator -> what is said of its bytes."""


def _about_the_rest(record: RunRecord) -> str:
    """Return what the peak holds on top, and how much less that is as planned than the activations alone."""
    told = "all else that tensors take at the peak: activations, temporaries"
    plan = record.optimizer.plan
    peak = plan.at_peak if plan else None
    if peak is None:
        return f"{told}; less gradients and state that are not there then"
    held = peak.weights_bytes + peak.gradients_bytes + peak.optimizer_state_bytes
    whole = record.optimizer.total_before_activations_bytes - outside_bytes(record)
    if whole <= held:
        return told
    return f"{told}; less what is not there then, {in_mib(whole - held)} as planned"


def _about_peaks(record: RunRecord, measured: Measured) -> _Told:
    """Yield what the peaks are, which unplanned part of the run had the highest, and which are missing."""
    if measured.peak_allocated_bytes is not None:
        told = "the most in the whole run; allocated: what tensors took"
        if measured.allocator is not None:
            told += "; reserved: what torch's allocator held, free blocks included, maybe at another moment"
        yield "peak", told
    lacking = ["allocated"] if measured.peak_allocated_bytes is None else []
    lacking += ["reserved"] if measured.allocator is None else []
    if lacking:
        yield "peak", f"{' and '.join(lacking)} {NOT_AVAILABLE}: the record has no counts of torch's allocator"
    yield from unplanned_remarks(record)


def _about_context(record: RunRecord) -> str:
    """Return what lies outside torch's allocator, and where its prediction comes from."""
    told = "CUDA itself, loaded kernels, and all else outside torch's allocator"
    if record.optimizer.placements.get(Placement.PAGED):
        told += "; what of the paged state is on the device too"
    plan = record.optimizer.plan
    return f"{told}; predicted: {plan.context_source}" if plan is not None and plan.context_source else told


def unplanned_remarks(record: RunRecord) -> _Told:
    """Yield what of a finished run is not planned: its allocator's settings, or a part that took more than updates."""
    allocator = record.measured.allocator if record.measured else None
    if record.measured is not None and record.allocator_settings is not None:
        yield "mind", f"reserved is planned for torch's default allocator; the run had {record.allocator_settings}"
    if allocator is None:
        return
    updates = allocator.of_updates
    if updates is None:
        yield "mind", "the run made no update, and nothing else is planned"
    elif updates.peak_allocated_bytes < allocator.peak_allocated_bytes:
        highest = highest_phase(allocator.phases)
        yield "mind", f"the most was allocated in the {highest} phase, which is not planned"
    elif updates.peak_reserved_bytes < allocator.peak_reserved_bytes:
        yield "mind", "the most was reserved outside updates, which is not planned"


def _about_samples(nvml: NvmlFacts, allocator: AllocatorFacts | None) -> _Told:
    """Yield which sample the driver's numbers are from, what was higher in others, and the size of the device."""
    known = [what for what in SAMPLED if sampled_bytes(nvml, what) is not None]
    if not known:
        return
    yield "NVML", f"what stands below reserved: {_which_sample(nvml)}"
    if "process" in known and nvml.process.how is None:
        yield "nvidia-smi", "shows this process and the device in use: with all of reserved, used by tensors or not"
    if nvml.num_failed:
        yield "NVML", f"{count(nvml.num_failed, 'sample')} more brought nothing"
    then = nvml.highest.reserved_bytes if nvml.highest else None
    if then is not None and (allocator is None or then != allocator.peak_reserved_bytes):
        yield "NVML", f"{in_mib(then)} were reserved when that sample was taken"
    if elsewhere := [SAMPLED[what] for what in known if _is_elsewhere(nvml, what)]:
        yield "NVML", f"not known of that sample, so the highest of others: {', '.join(elsewhere)}"
    higher = [
        f"{SAMPLED[what]} {in_mib(peak)}"
        for what in known
        if (peak := getattr(nvml, what).peak_bytes) is not None and peak != sampled_bytes(nvml, what)
    ]
    if higher:
        yield "NVML", f"more in other samples: {', '.join(higher)}"
    for how, whats in _grouped({what: getattr(nvml, what).how for what in known}).items():
        yield "NVML", f"{', '.join(whats)}: {how}"
    if nvml.total_bytes is not None:
        kept = nvml.driver_reserved_bytes
        keeps = f"; the driver keeps {in_mib(kept)} of them for itself" if kept else ""
        yield "device", f"{nvml.name or 'the device'}: {in_mib(nvml.total_bytes)} in all{keeps}"


def _which_sample(nvml: NvmlFacts) -> str:
    interval_s = nvml.interval_s if nvml.mean_interval_s is None else nvml.mean_interval_s
    every = "" if interval_s is None else f", one every {interval_s:.2f} s"
    samples = f"of {count(nvml.num_samples, 'sample')}{every}" if nvml.num_samples else "of what was read"
    if nvml.highest is None:
        return f"the highest {samples}, each at a moment of its own"
    whose = "the device" if nvml.highest.process_bytes is None else "this process"
    return f"when {whose} held the most {samples}"


def _is_elsewhere(nvml: NvmlFacts, what: Sampled) -> bool:
    """Return whether the sample that is shown lacks an amount that others have."""
    return nvml.highest is not None and getattr(nvml.highest, f"{what}_bytes") is None


def missing_remarks(nvml: NvmlFacts) -> _Told:
    """Yield why amounts are missing, each reason once, and why reading ended early."""
    wanted: tuple[Sampled, ...] = ("process", "context", "others", "device")  # the first is why there are no others
    missing = {what: getattr(nvml, what).reason for what in wanted if sampled_bytes(nvml, what) is None}
    if nvml.reason and len(missing) == len(SAMPLED):  # nothing was read at all
        yield "NVML", _missing(nvml.reason)
    elif nvml.reason:
        yield "NVML", nvml.reason
    for reason, whats in _grouped(missing).items():
        if reason != nvml.reason:
            yield "NVML", f"{', '.join(whats)} {_missing(reason)}"
    if missing and not nvml.reason and not any(missing.values()):
        yield "NVML", f"{NOT_AVAILABLE}: the record does not say why"


def _missing(reason: str | None) -> str:
    """Return "n/a" with the reason; one that says so itself stands alone."""
    if not reason:
        return f"{NOT_AVAILABLE}: no reason was recorded"
    return reason if reason.startswith(NOT_AVAILABLE) else f"{NOT_AVAILABLE}: {reason}"


def _grouped(texts: Mapping[Sampled, str | None]) -> Mapping[str, list[str]]:
    """Return the labels of amounts by the text they share; those without one are left out."""
    found: dict[str, list[str]] = {}
    for what, text in texts.items():
        if text:
            found.setdefault(text, []).append(SAMPLED[what])
    return found
