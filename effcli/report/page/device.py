"""What the page says of runs on CUDA beside its charts: what the numbers are, and the peaks of each phase."""

from __future__ import annotations

from collections.abc import Sequence

from effcli.report.charts.names import Named
from effcli.report.comparison_device import PAIRS
from effcli.report.device_remarks import device_remarks
from effcli.report.number_text import NOT_AVAILABLE, difference, mib
from effcli.report.page.shell import escaped
from effcli.report.page.tables import row_of, table_of
from effcli.report.peak import planned_phases
from effcli.report.text import plain
from effcli.units import listed


def device_table(names: Sequence[Named]) -> str:
    """Return what each name took of the device, as far as any amount is known; nothing where none is."""
    columns = {
        key: f"{what}, {side}"
        for what, pairs in PAIRS.items()
        for key, side in pairs
        if any(getattr(named.summary, key) is not None for named in names)
    }
    rows = (row_of(named.name, *(mib(getattr(named.summary, key)) for key in columns)) for named in names)
    return table_of("On the device", ("optimizer", *columns.values()), rows) if columns else ""


def device_notes(names: Sequence[Named]) -> str:
    """Return what the lines of memory are, which moments they are of and why some are missing; each said once."""
    said: dict[str, list[str]] = {}
    runs = [(named.short, named.run) for named in names if named.run is not None]
    for name, run in runs:
        for label, text in device_remarks(run):
            said.setdefault(f"{label}: {text}", []).append(name)
    lines = (
        f"<li>{escaped(plain(text if len(who) == len(runs) else f'{listed(who, None)}: {text}'))}</li>"
        for text, who in said.items()
    )
    return f'<ul class="notes">{"".join(lines)}</ul>' if said else ""


def measured_phase_table(names: Sequence[Named]) -> str:
    """Return the most of each part of a run in torch's allocator beside its plan; nothing where none was counted."""
    rows = []
    for named in names:
        allocator = named.run.measured.allocator if named.run and named.run.measured else None
        planned = planned_phases(named.run.optimizer.plan) if named.run else {}
        for phase, peak in (allocator.phases if allocator else {}).items():
            estimated, found = planned.get(phase), peak.peak_allocated_bytes
            off = NOT_AVAILABLE if estimated is None else difference(found - estimated)
            cells = (phase, mib(estimated), mib(found), off, mib(peak.peak_reserved_bytes))
            rows.append(row_of(named.name, *cells))
    titles = ("optimizer", "phase", "predicted", "measured", "difference", "reserved")
    return table_of("Most allocated in each phase", titles, rows) if rows else ""
