"""Memory of several runs side by side: state and peak, predicted beside measured, and where the numbers come from."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from effcli.report.layout import ruled_table
from effcli.report.memory_row import peak_basis
from effcli.report.number_text import NOT_AVAILABLE, ratio
from effcli.report.text import common_unit, in_unit, plain, plus_minus
from effcli.setting_texts import mapping
from effcli.units import Basis, Category, count, format_count, listed

if TYPE_CHECKING:
    from rich.table import Table

    from effcli.measure.comparison_record import ComparisonRecord, Summary
    from effcli.measure.record import ProfiledUpdate, RunRecord

_STATE = ("predicted_state_bytes", "measured_state_bytes")
_PEAK = ("predicted_peak_allocated_bytes", "peak_allocated_bytes")
_RESIDENT = "peak_rss_bytes"


def add_lines(
    table: Table, record: ComparisonRecord, line: Summary, means: Sequence[str], deviations: Sequence[str]
) -> None:
    """Add the row of one name and, below it, what did not end well and its deviations over seeds."""
    table.add_row(plain(line.name).strip() or "(no name)", *means)
    status = _status(record, line)
    if status or any(deviations):
        table.add_row(f"  {status}", *deviations, style="yellow" if status else "dim")


def _status(record: ComparisonRecord, line: Summary) -> str:
    """Return how the runs of a name ended, and how many of them, where that is not well; else nothing."""
    if line.ended_well:
        return ""
    ended = [attempt for attempt in record.attempts if attempt.name == line.name]
    not_well = [attempt for attempt in ended if not attempt.ended_well]
    return line.status if len(not_well) == len(ended) else f"{len(not_well)} of {len(ended)} {line.status}"


def memory_table(record: ComparisonRecord, encoding: str) -> Table:
    """Return state and peak of each name, one unit for all states and one for all peaks."""
    measured = any(has(record, key) for key in (_STATE[1], _PEAK[1], _RESIDENT))
    resident = has(record, _RESIDENT) and not any(run.is_on_cuda for run in record.runs)
    columns = list(_columns(record, measured=measured))
    unit, unit_name = unit_of(record, (*_PEAK, _RESIDENT))
    table = ruled_table("Memory", "optimizer", *(heading for heading, _, _ in columns))
    if resident:
        table.add_column(f"resident\nset, {unit_name}", justify="right", overflow="fold")
        columns.append(("", _RESIDENT, unit))
    for column in table.columns:
        column.vertical = "bottom"
    for line in record.summary:
        cells = [_cell(line, key, unit) for _, key, unit in columns]
        spreads = [byte_spread(line, key, unit, plus_minus(encoding)) for _, key, unit in columns]
        add_lines(table, record, line, cells, spreads if _varies(line) else [])
    return table


def _columns(record: ComparisonRecord, *, measured: bool) -> Iterator[tuple[str, str, int]]:
    """Yield heading, key and unit of each column; ratios have the unit 0."""
    for what, (predicted, found) in (("state", _STATE), ("peak", _PEAK)):
        unit, unit_name = unit_of(record, (predicted, found))
        yield f"{what}, {unit_name}\npredicted", predicted, unit
        if measured:
            yield "\nmeasured", found, unit
        yield "\nratio", found if has(record, found) else predicted, 0


def has(record: ComparisonRecord, key: str) -> bool:
    """Return whether any name has an amount."""
    return any(getattr(line, key) is not None for line in record.summary)


def unit_of(record: ComparisonRecord, keys: Sequence[str]) -> tuple[int, str]:
    """Return the unit, in bytes and by name, for all amounts of some columns."""
    return common_unit(max((getattr(line, key) or 0 for line in record.summary for key in keys), default=0))


def _cell(line: Summary, key: str, unit: int) -> str:
    if unit == 0:
        return NOT_AVAILABLE if key not in line.ratios else ratio(line.ratios[key])
    return byte_cell(line, key, unit)


def byte_cell(line: Summary, key: str, unit: int) -> str:
    """Return an amount of a name in the column's unit."""
    num_bytes = getattr(line, key)
    return NOT_AVAILABLE if num_bytes is None else amount(num_bytes, unit)


def amount(num_bytes: float, unit: int) -> str:
    """Return bytes in a unit with two decimals; what would be 0 by rounding is not."""
    return "<0.01" if 0 < num_bytes < 0.005 * unit else in_unit(round(num_bytes), unit)


def byte_spread(line: Summary, key: str, unit: int, sign: str) -> str:
    """Return the deviation over seeds in the column's unit; nothing where there is one seed, and for ratios."""
    if unit == 0 or key not in line.spread:
        return ""
    return f"{sign}{amount(line.spread[key].deviation, unit)}"


def _varies(line: Summary) -> bool:
    """Return whether any amount of memory differs between seeds."""
    return any(key in line.spread and line.spread[key].deviation > 0 for key in (*_STATE, *_PEAK, _RESIDENT))


def memory_remarks(record: ComparisonRecord) -> Iterable[tuple[str, str]]:
    """Yield where the numbers come from, what they leave out, and by how much state was predicted wrongly."""
    if any(line.ratios.keys() & {*_STATE, *_PEAK} for line in record.summary):
        yield "ratio", f"to {record.summary[0].name}, the first; {_ratio_basis(record)}{_no_ratio(record)}"
    if predicted := "; ".join(_predicted(record)):
        yield "predicted", predicted
    if has(record, _STATE[1]):
        yield "state", _state_differences(record)
    yield from _measured_peak(record)
    if any(line.spread for line in record.summary) and not any(map(_varies, record.summary)):
        yield "spread", "none: every seed took the same bytes"


def _ratio_basis(record: ComparisonRecord) -> str:
    basis = {
        what: "measured" if has(record, found) else "predicted"
        for what, (_, found) in (("state", _STATE), ("peak", _PEAK))
    }
    if len(set(basis.values())) == 1:
        return f"{basis['state']} amounts"
    return ", ".join(f"{word} {what}s" for what, word in basis.items())


def _no_ratio(record: ComparisonRecord) -> str:
    """Return why there is no ratio of states or of peaks, where the first name has nothing to divide by."""
    first, *others = record.summary
    why = []
    for what, (predicted, found) in (("states", _STATE), ("peaks", _PEAK)):
        key = found if has(record, found) else predicted
        if others and not getattr(first, key) and has(record, key):
            why.append(f"no ratio of {what}: its own is {NOT_AVAILABLE if getattr(first, key) is None else 0}")
    return "".join(f"; {reason}" for reason in why)


def _predicted(record: ComparisonRecord) -> Iterator[str]:
    """Yield the basis of states and of peaks, with names where they do not share it."""
    runs = [(line.name, run) for line in record.summary if (run := record.run_for(line.name)) is not None]
    states = _by_basis((name, run.optimizer.basis) for name, run in runs)
    peaks = _by_basis((name, _peak_basis(run)) for name, run in runs)
    for what, names in (("state", states), ("peak", peaks)):
        told = [
            basis if len(names) == 1 else f"{basis} for {listed(who, None, last='and')}" for basis, who in names.items()
        ]
        if told:
            yield f"{what} {', '.join(told)}"


def _peak_basis(run: RunRecord) -> str:
    plan = run.optimizer.plan
    if plan is None or plan.peak_allocated_bytes is None:
        return f"{NOT_AVAILABLE} (activations could not be traced)"
    whole, activations = peak_basis(plan), plan.basis.get(Category.ACTIVATIONS, Basis.TRACED)
    return activations if whole in ("", activations) else f"{activations} (temporaries {whole})"


def _by_basis(pairs: Iterable[tuple[str, str]]) -> Mapping[str, Sequence[str]]:
    found: dict[str, list[str]] = {}
    for name, basis in pairs:
        found.setdefault(basis, []).append(name)
    return found


def _state_differences(record: ComparisonRecord) -> str:
    """Return by how many bytes each measured state is off."""
    off = []
    for line in record.summary:
        if line.measured_state_bytes is None or line.predicted_state_bytes is None:
            continue
        if difference := line.measured_state_bytes - line.predicted_state_bytes:
            more = "more" if difference > 0 else "less"
            off.append(f"{line.name} {format_count(abs(difference))} bytes {more} than predicted")
    return f"measured: {'; '.join(off)}" if off else "measured to the byte as predicted"


def _measured_peak(record: ComparisonRecord) -> Iterator[tuple[str, str]]:
    """Yield what the measured peak is, or why there is none."""
    measured = [(run, run.measured) for run in record.runs if run.measured is not None]
    if not measured:
        return
    profiled = [found.profiled for _, found in measured if found.profiled is not None]
    if any(run.is_on_cuda for run, _ in measured):
        yield "peak", "measured: CUDA's counter of allocated bytes over the whole run"
    if profiled:
        yield "peak", f"measured: the CPU's allocator during one warm update: {_shape(profiled)}"
    silent = [run for run, found in measured if found.peak_allocated_bytes is None and not run.is_on_cuda]
    if silent:
        asked = all(mapping(run.spec.get("loop")).get("profile_memory") for run in silent)
        hint = "the notes say why" if asked else "--profile-memory does that"
        yield "peak", f"{NOT_AVAILABLE}: no update was profiled on this CPU; {hint}"
    if any(not run.is_on_cuda for run, _ in measured):
        yield "resident", "the most that the whole process held, Python and libraries included"


def _shape(profiled: Sequence[ProfiledUpdate]) -> str:
    """Return of which batch the profiled updates were, and what was predicted for it."""
    shapes = dict.fromkeys((update.update, update.rows, update.tokens) for update in profiled)
    told = [
        f"update {format_count(update)}, {count(rows, 'row')} x {count(tokens, 'token')}"
        for update, rows, tokens in shapes
    ]
    planned = [update for update in profiled if update.planned_peak_allocated_bytes is not None]
    where = "" if len(planned) == len(profiled) else " where there is a number"
    predicted = f"predicted for that batch{where}" if planned else "no peak was predicted for that batch"
    return f"{' or '.join(told)}; {predicted}"
