"""What runs on CUDA took of the device, side by side: reserved by torch, this process, and all that is in use."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from effcli.report.comparison_memory import add_lines, byte_cell, byte_spread, has
from effcli.report.device_remarks import missing_remarks, unplanned_remarks
from effcli.report.layout import ruled_table
from effcli.report.text import plus_minus
from effcli.units import MIB, listed

if TYPE_CHECKING:
    from rich.table import Table

    from effcli.measure.comparison_record import ComparisonRecord

PAIRS: Mapping[str, tuple[tuple[str, str], ...]] = {
    "reserved": (("predicted_peak_reserved_bytes", "predicted"), ("peak_reserved_bytes", "measured")),
    "context": (("peak_context_bytes", "measured"),),
    "process": (("predicted_process_bytes", "predicted"), ("peak_process_bytes", "measured")),
    "in use": (("peak_device_bytes", "measured"),),
}
"""Heading -> the amounts of a summary below it, and which side each is."""


def device_table(record: ComparisonRecord, encoding: str) -> Table:
    """Return what each name took of the device, in MiB; without rows where nothing ran, or would, on CUDA."""
    shown = {what: [pair for pair in pairs if has(record, pair[0])] for what, pairs in PAIRS.items()}
    keys = [key for pairs in shown.values() for key, _ in pairs]
    headings = [
        f"{what if place == 0 else ''}\n{side}"
        for what, pairs in shown.items()
        for place, (_, side) in enumerate(pairs)
    ]
    table = ruled_table("On the device, in MiB", "optimizer", *headings)
    for column in table.columns:
        column.vertical = "bottom"
    varies = any(key in line.spread and line.spread[key].deviation > 0 for line in record.summary for key in keys)
    for line in record.summary if keys else ():
        spreads = [byte_spread(line, key, MIB, plus_minus(encoding)) for key in keys] if varies else []
        add_lines(table, record, line, [byte_cell(line, key, MIB) for key in keys], spreads)
    return table


def device_remarks(record: ComparisonRecord) -> Iterator[tuple[str, str]]:
    """Yield what the columns are, why numbers are missing, and which peaks are of unplanned parts of a run."""
    if has(record, "peak_reserved_bytes") or has(record, "predicted_peak_reserved_bytes"):
        yield "reserved", "what torch's allocator holds of the device for tensors"
    if has(record, "peak_context_bytes"):
        yield "context", "what this process holds beside that: CUDA's context, loaded kernels and other"
    if has(record, "predicted_process_bytes"):
        basis = listed(list(dict.fromkeys(_context_bases(record))), None, last="or")
        yield "process", f"reserved and context; predicted with {basis} context"
    if has(record, "peak_device_bytes"):
        yield "in use", "by all processes; the highest of the driver's samples, each column at a moment of its own"
    for reason, names in _reasons(record).items():
        whose = "" if len(names) == len(record.summary) else f"{listed(names, None, last='and')}: "
        yield "NVML", f"{whose}{reason}"
    for line in record.summary:
        run = record.run_for(line.name)
        for label, text in unplanned_remarks(run) if run is not None else ():
            yield label, f"{line.name}: {text}"


def _context_bases(record: ComparisonRecord) -> Iterator[str]:
    """Yield where the planned context of each run comes from, with its article."""
    for run in record.runs:
        if run.is_on_cuda and run.optimizer.plan is not None:
            basis = run.optimizer.plan.basis.get("context", "assumed")
            yield f"{'an' if basis[:1] in 'aeiou' else 'a'} {basis}"


def _reasons(record: ComparisonRecord) -> Mapping[str, list[str]]:
    """Return why the driver's amounts are missing, with the names whose runs said so."""
    found: dict[str, list[str]] = {}
    for line in record.summary:
        run = record.run_for(line.name)
        if run is not None and run.measured is not None and run.is_on_cuda:
            for _, reason in missing_remarks(run.measured.nvml):
                found.setdefault(reason, []).append(line.name)
    return found
