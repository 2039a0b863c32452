"""The plan of an update, as tables for a terminal: when the peak is, what it is made of, and what would change it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from rich.console import Group
from rich.table import Table
from rich.text import Text

from effcli.report.bars import stacked_bar
from effcli.report.device_rows import highest_phase
from effcli.report.layout import fact_grid, ruled_table
from effcli.report.number_text import NOT_AVAILABLE, in_mib
from effcli.report.skyline import skyline
from effcli.report.text import common_unit, in_unit, plain
from effcli.units import Basis, Category, Phase, count, format_bytes, format_count

if TYPE_CHECKING:
    from rich.console import RenderableType

    from effcli.measure.device_record import AllocatorFacts
    from effcli.memory.plan import Change, MemoryPlan, PhaseBytes

_COLUMNS = {
    Category.WEIGHTS: "weights",
    Category.GRADIENTS: "gradients",
    Category.OPTIMIZER_STATE: "state",
    Category.ACTIVATIONS: "activations",
    Category.TEMPORARIES: "temporaries",
    Category.COMMUNICATION: "exchange",
}
_SHORT = {Category.ACTIVATIONS: "activ.", Category.TEMPORARIES: "temp."}
"""Headings where seven columns of amounts must keep to 80 characters."""
_UPDATES = {"first": "the first update", "later": "later updates"}
_BAR = 20
_FEWEST_PARTS, _SMALLEST_SHARE = 6, 0.002
_TOP_MODULES = 8
_BARELY = 0.05
"""Below this share of the peak, a change is not worth its price."""


def peak_parts(title: str, plan: MemoryPlan, encoding: str) -> list[RenderableType]:
    """Return everything about one plan with a peak, to be printed one below the other; `title` is its headline."""
    parts: list[RenderableType] = [Group(Text(plain(title), style="bold"), fact_grid(peak_facts(plan)))]
    if plan.timeline:
        heading = Text("Live bytes, moment by moment (in order, not to scale of time)", style="bold")
        parts.append(Group(heading, *(Text(line, no_wrap=True) for line in skyline(plan.timeline, encoding))))
    return [
        *parts,
        phase_table(plan),
        _parts_table(plan, encoding),
        _modules_table(plan),
        change_table(plan.changes, plan),
    ]


def peak_table(plans: Sequence[tuple[str, MemoryPlan]]) -> Table:
    """Return a row per optimizer: its peak, what the device must have, and whether that fits."""
    table = ruled_table("Peak of an update", "optimizer", "peak")
    table.add_column("in", no_wrap=True)
    table.add_column("device", justify="right", no_wrap=True)
    with_budget = any(plan.fits is not None for _, plan in plans)
    if with_budget:
        table.add_column("fits", no_wrap=True)
        table.add_column("to spare", justify="right", no_wrap=True)
        table.add_column("largest batch", justify="right", no_wrap=True)
    for name, plan in plans:
        need, largest = plan.device_total_bytes or 0, plan.largest_batch_size
        row = [plain(name), format_bytes(plan.peak_allocated_bytes or 0), plan.peak_phase or "", format_bytes(need)]
        if with_budget:
            row += [plan.fits or "", format_bytes((plan.budget_bytes or 0) - need)]
            row.append("" if largest is None else format_count(largest))
        table.add_row(*row)
    return table


def peak_facts(plan: MemoryPlan) -> Iterable[tuple[str, str]]:
    """Yield what the device needs, whether it fits, and the optimizer's share of the peak."""
    if plan.fits is not None:
        yield "verdict", verdict(plan)
    if plan.peak_allocated_bytes is not None:
        where = f"in the {plan.peak_phase} phase of {_UPDATES[plan.peak_update or 'later']}"
        amount = _with_basis(plan, Category.ACTIVATIONS, plan.peak_allocated_bytes, Basis.TRACED)
        yield "peak", f"{amount}: the most that tensors take at once, {where}"
    if plan.device != "cpu" and plan.peak_reserved_bytes is not None and plan.context_bytes is not None:
        reserved = _with_basis(plan, "reserved", plan.peak_reserved_bytes, Basis.TRACED)
        yield "reserved", f"{reserved}: what the caching allocator takes from the device for that"
        basis = plan.context_source or plan.basis.get("context", Basis.ASSUMED)
        context = f"{format_bytes(plan.context_bytes)} ({basis})"
        yield "context", f"{context}: CUDA itself and the kernels it loads"
        if plan.device_total_bytes is not None:
            yield "device", f"{format_bytes(plan.device_total_bytes)} = reserved + context: what must be free"
    if (peak := plan.at_peak) is not None and peak.total_bytes:
        yield "optimizer", _optimizer_share(plan, peak)


def verdict(plan: MemoryPlan) -> str:
    """Return in a sentence whether the plan fits its budget, and the largest batch that does."""
    need, budget = plan.device_total_bytes or 0, plan.budget_bytes or 0
    if plan.fits == "no":
        words = (
            f"no: {format_bytes(need)}, {format_bytes(need - budget)} more than the {format_bytes(budget)} there are"
        )
    else:
        words = f"{plan.fits}: {format_bytes(need)} of {format_bytes(budget)}, {format_bytes(budget - need)} to spare"
    largest = plan.largest_batch_size
    if largest is None:
        return words
    batch = f"the largest batch that fits is {format_count(largest)}" if largest else "not even a batch of 1 fits"
    return f"{words}; {batch}"


def phase_table(plan: MemoryPlan) -> Table:
    """Return the highest moment of each phase, of the first update and of later ones, in one unit."""
    both = {"first update": plan.first_phases, "later updates": plan.phases}
    title, mark, headings = "The highest moment of each phase", "> ", _COLUMNS
    if Category.COMMUNICATION in plan.categories:
        both = {"first": plan.first_phases, "later": plan.phases}
        title, mark, headings = "Highest moments, first and later updates", ">", {**_COLUMNS, **_SHORT}
    amounts = [phase.total_bytes or 0 for phases in both.values() for phase in phases.values()]
    unit, unit_name = common_unit(max(amounts, default=0))
    shown = {category: name for category, name in headings.items() if category in plan.categories}
    table = ruled_table(f"{title}, in {unit_name}; > is the peak", "", *shown.values(), "total")
    for name, phases in both.items():
        if not phases:
            continue
        table.add_row(name, style="dim")
        for phase, parts in phases.items():
            is_peak = phase == plan.peak_phase and name.startswith(plan.peak_update or "later")
            cells = [getattr(parts, f"{category}_bytes") for category in shown]
            numbers = [NOT_AVAILABLE if cell is None else in_unit(cell, unit) for cell in (*cells, parts.total_bytes)]
            table.add_row(f"{mark if is_peak else ' ' * len(mark)}{phase}", *numbers, style="bold" if is_peak else "")
        table.add_section()
    if amounts:
        table.add_row("basis", *(plan.basis.get(category, "") for category in shown), style="dim")
    return table


def measured_phase_table(plan: MemoryPlan | None, allocator: AllocatorFacts) -> Table:
    """Return the most of each part of a run in torch's allocator, over all its times, beside the plan of any update."""
    planned, highest = planned_phases(plan), highest_phase(allocator.phases)
    titles = ("estimated", "measured", "difference", "reserved")
    seen = "" if allocator.num_updates_seen is None else f" of {count(allocator.num_updates_seen, 'update')}"
    table = ruled_table(f"Most allocated in each phase{seen}; > is the peak", "phase", *titles)
    for phase, peak in allocator.phases.items():
        estimated, found = planned.get(phase), peak.peak_allocated_bytes
        off = 0 if estimated is None else found - estimated
        table.add_row(
            f"{'> ' if phase == highest else '  '}{phase}",
            NOT_AVAILABLE if estimated is None else in_mib(estimated),
            in_mib(found),
            "" if estimated is None else f"{'+' if off > 0 else ''}{in_mib(off)}",
            in_mib(peak.peak_reserved_bytes),
            style="bold" if phase == highest else "",
        )
    return table


def planned_phases(plan: MemoryPlan | None) -> dict[str, int]:
    """Return the highest planned bytes of each phase, whichever update they are of; nothing that is not planned."""
    highest: dict[str, int] = {}
    for phases in (plan.first_phases, plan.phases) if plan else ():
        for phase, parts in phases.items():
            if parts.total_bytes is not None:
                highest[phase] = max(highest.get(phase, 0), parts.total_bytes)
    return highest


def change_table(changes: Sequence[Change], plan: MemoryPlan) -> Table:
    """Return what single changes of settings would do to the peak, the most useful first."""
    table = ruled_table("What a change would do to the peak", "change: what to type")
    table.add_column("peak", justify="right", no_wrap=True)
    table.add_column("", justify="right", no_wrap=True)
    table.add_column("then in", no_wrap=True)
    for change in sorted(changes, key=lambda change: change.peak_allocated_bytes):
        grows = -change.saved_bytes
        sign = "+" if grows > 0 else ""
        share = _percent(grows, plan.peak_allocated_bytes)
        cells = (f"{sign}{format_bytes(grows)}", f"{sign}{share}") if grows else ("the same", "")
        table.add_row(f"{plain(change.name)}: {plain(change.flags)}", *cells, plain(change.peak_phase))
    return table


def _parts_table(plan: MemoryPlan, encoding: str) -> Table:
    """Return a row per named part, the largest first; those that hardly count are one row."""
    parts = plan.parts
    peak = plan.peak_allocated_bytes or sum(part.num_bytes for part in parts)
    table = ruled_table("Live at the peak", "part", "size", "share")
    table.add_column("basis")
    table.add_column("", no_wrap=True)
    ordered = sorted(parts, key=lambda part: -part.num_bytes)
    shown = [part for at, part in enumerate(ordered) if at < _FEWEST_PARTS or part.num_bytes >= peak * _SMALLEST_SHARE]
    largest = ordered[0].num_bytes if ordered else 0
    names = [part.name for part in parts]
    for part in shown:
        name = part.name if names.count(part.name) == 1 else f"{part.name} ({_COLUMNS[Category(part.category)]})"
        bar = stacked_bar((part.num_bytes,), largest, _BAR, encoding)
        share = _percent(part.num_bytes, peak)
        table.add_row(plain(name), format_bytes(part.num_bytes), share, plain(part.basis), bar)
    if rest := ordered[len(shown) :]:
        num_bytes = sum(part.num_bytes for part in rest)
        table.add_row(f"{len(rest)} smaller: --json", format_bytes(num_bytes), _percent(num_bytes, peak))
    return table


def _modules_table(plan: MemoryPlan) -> Table:
    """Return what single modules and parameters hold, the most first; what belongs to none is in the parts alone."""
    table = ruled_table("Who holds most at the peak", "name")
    table.add_column("what", no_wrap=True)
    table.add_column("size", justify="right", no_wrap=True)
    table.add_column("share", justify="right", no_wrap=True)
    named = [module for module in plan.modules if module.name]
    for module in sorted(named, key=lambda module: -module.num_bytes)[:_TOP_MODULES]:
        what = _COLUMNS[Category(module.category)]
        share = _percent(module.num_bytes, plan.peak_allocated_bytes)
        table.add_row(plain(module.name), what, format_bytes(module.num_bytes), share)
    return table


def _optimizer_share(plan: MemoryPlan, peak: PhaseBytes) -> str:
    """Return the share of the state in the peak, and what 8-bit state would do to it where the plan says so."""
    share = f"its state is {_percent(peak.optimizer_state_bytes, peak.total_bytes)} of the peak"
    activations = peak.activations_bytes or 0
    dominate = activations > max(peak.weights_bytes, peak.gradients_bytes, peak.optimizer_state_bytes)
    if dominate:
        share += f", activations are {_percent(activations, peak.total_bytes)}"
    if plan.peak_phase == Phase.STEP and peak.temporaries_bytes:
        share += f", temporaries of its step are {_percent(peak.temporaries_bytes, peak.total_bytes)}"
    eight_bit = next((change for change in plan.changes if "8-bit" in change.name), None)
    if eight_bit is None or plan.peak_allocated_bytes is None:
        return share
    saved = f"{format_bytes(eight_bit.saved_bytes)} ({_percent(eight_bit.saved_bytes, plan.peak_allocated_bytes)})"
    if eight_bit.saved_bytes >= _BARELY * plan.peak_allocated_bytes:
        return f"{share}; 8-bit state would save {saved}"
    why = "activations dominate" if dominate else f"the peak is in the {plan.peak_phase} phase"
    return f"{share}; 8-bit state would barely help, by {saved}: {why}"


def _with_basis(plan: MemoryPlan, key: str, num_bytes: int, usual: Basis) -> str:
    return f"{format_bytes(num_bytes)} ({plan.basis.get(key, usual)})"


def _percent(part: int, whole: int | None) -> str:
    return f"{round(100 * part / whole, 1) + 0.0:.1f} %" if whole else ""  # + 0.0 makes no difference but to -0.0
