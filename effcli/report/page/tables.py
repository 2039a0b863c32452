"""The tables of the page: the summary, and the numbers behind each chart."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from effcli.report.charts.names import Named
from effcli.report.charts.style import LAYERS
from effcli.report.charts.tradeoff import kept_by
from effcli.report.number_text import NOT_AVAILABLE, amount, difference, mib, number, ratio
from effcli.report.page.shell import escaped
from effcli.report.ranks import rank_rows
from effcli.report.rows import BEFORE_ACTIVATIONS, memory_rows
from effcli.report.text import common_unit, in_unit, plain
from effcli.units import count, format_bytes, format_count

if TYPE_CHECKING:
    from effcli.measure.comparison_record import Summary
    from effcli.measure.record import RunRecord

_BYTES = {
    "predicted_state_bytes": "state, predicted",
    "measured_state_bytes": "state, measured",
    "predicted_peak_allocated_bytes": "peak, predicted",
    "peak_allocated_bytes": "peak, measured",
    "peak_rss_bytes": "peak resident set",
}
_NUMBERS = {
    "seconds_per_update": "seconds per update",
    "samples_per_second": "samples per second",
    "final_loss": "final loss",
    "eval_loss": "evaluation loss",
    "eval_accuracy": "accuracy",
    "eval_f1": "F1",
    "eval_perplexity": "perplexity",
}


def summary_table(names: Sequence[Named]) -> str:
    """Return the summary: a row a name, a column for each amount that any name has, sortable by each."""
    lines = [named.summary for named in names]
    columns = [key for key in (*_BYTES, *_NUMBERS) if any(getattr(line, key) is not None for line in lines)]
    titles = ["optimizer", "status", *(({**_BYTES, **_NUMBERS})[key] for key in columns)]
    head = "".join(
        f'<th scope="col"{" class=text" if title == "status" else ""}><button type="button">{title}</button></th>'
        for title in titles
    )
    rows = []
    units = {key: common_unit(max(getattr(line, key) or 0 for line in lines)) for key in columns if key in _BYTES}
    for place, named in enumerate(names):
        line = named.summary
        cells = [f'<th scope="row" data-value="{escaped(named.name)}">{_name(named.name)}</th>', _status(line)]
        cells += [_cell(line, key, units.get(key), first=place == 0) for key in columns]
        rows.append(f"<tr>{''.join(cells)}</tr>")
    return _boxed("The comparison", f"<thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody>", "sortable")


def _status(line: Summary) -> str:
    seeds = f"{len(line.seeds)} seeds" if len(line.seeds) > 1 else f"seed {line.seeds[0]}" if line.seeds else ""
    look = "text" if line.ended_well else "text bad"
    return f'<td class="{look}" data-value="{line.status}">{line.status}<small>{seeds}</small></td>'


def _cell(line: Summary, key: str, unit: tuple[int, str] | None, *, first: bool) -> str:
    """Return an amount, in the unit of its column, with its deviation over seeds and its ratio to the first name's."""
    value = getattr(line, key)
    if value is None:
        return f'<td class="none">{NOT_AVAILABLE}</td>'

    def written(amount: float, digits: int = 4) -> str:
        if unit is None:
            return number(amount, digits)
        tiny = 0 < amount < unit[0] / 100
        return format_bytes(round(amount)) if tiny else f"{in_unit(round(amount), unit[0])} {unit[1]}"

    spread, share = line.spread.get(key), line.ratios.get(key)
    small = [] if spread is None else [f"&plusmn; {written(spread.deviation, 2)}"]
    if share is not None and not first:
        small.append(f"&times; {ratio(share)}")
    full = f' title="{count(value, "byte")}"' if unit else ""
    below = "".join(f"<small>{text}</small>" for text in small)
    sorted_by = f' data-value="{value}"' if math.isfinite(value) else ""
    return f"<td{sorted_by}{full}>{written(value)}{below}</td>"


def memory_table(names: Sequence[Named]) -> str:
    """Return the components of each name's memory: predicted with its basis, measured, and the difference."""
    head = _head("optimizer", "component", "predicted", "basis", "measured", "difference", texts=("component", "basis"))
    bodies = []
    for named in names:
        if named.run is not None:
            rows = list(_memory_rows(named.run))
            first = f'<th scope="rowgroup" rowspan="{len(rows)}">{_name(named.name)}</th>'
            lines = (f"<tr>{first if place == 0 else ''}{row}</tr>" for place, row in enumerate(rows))
            bodies.append(f"<tbody>{''.join(lines)}</tbody>")
    return _boxed("Memory by component", head + "".join(bodies))


def _memory_rows(run: RunRecord) -> Iterable[str]:
    plan = run.optimizer.plan
    peak = plan.at_peak if plan else None
    in_bytes = mib if run.is_on_cuda and run.measured else amount
    for row in memory_rows(run):
        written: Callable[[int | None], str] = _elements if row.in_elements else in_bytes
        gap = row.difference
        told = difference(gap) if not row.in_elements else NOT_AVAILABLE if gap is None else f"{gap:+,}" if gap else "0"
        yield _memory_row(row.label, written(row.estimated), row.basis, written(row.measured), told)
        if row.label == BEFORE_ACTIVATIONS and plan is not None and peak is not None:
            for category in plan.categories:
                held = getattr(peak, f"{category}_bytes")
                basis = plan.basis.get(category, "")
                label = f"{LAYERS[category][0]} at the peak ({plan.peak_phase})"
                yield _memory_row(label, in_bytes(held), basis, NOT_AVAILABLE, NOT_AVAILABLE)


def rank_table(names: Sequence[Named]) -> str:
    """Return what the processes of each name's run hold: the least, the most, and all; nothing where each is alone."""
    rows = [
        row_of(named.name, f"{row.label}, {row.side}", *map(amount, (row.least, row.most, row.all)))
        for named in names
        if named.run is not None
        for row in rank_rows(named.run)
    ]
    return table_of("By process", ("optimizer", "amount", "least", "most", "all together"), rows) if rows else ""


def _memory_row(label: str, predicted: str, basis: str, measured: str, told: str) -> str:
    numbers = "".join(f"<td>{text}</td>" for text in (measured, told))
    return f'<td class="text">{escaped(label)}</td><td>{predicted}</td><td class="text">{escaped(basis)}</td>{numbers}'


def _elements(elements: int | None) -> str:
    return NOT_AVAILABLE if elements is None else format_count(elements)


def tradeoff_table(names: Sequence[Named]) -> str:
    """Return the numbers of the trade-off."""
    head = _head("optimizer", "statistics for a parameter", "bits for a statistic", "state", "as")
    rows = (
        row_of(
            one.named.name,
            number(one.statistics),
            number(one.bits) if one.statistics else NOT_AVAILABLE,
            amount(one.state_bytes),
            "measured" if one.measured else "predicted",
        )
        for one in kept_by(names)
    )
    return _boxed("State by number and precision of statistics", f"{head}<tbody>{''.join(rows)}</tbody>")


def evaluation_table(names: Sequence[Named]) -> str:
    """Return the evaluations of all runs; nothing where there are none."""
    head = _head("optimizer", "seed", "update", "evaluation loss", "accuracy", "F1", "perplexity")
    rows = [
        row_of(
            named.name,
            str(seed),
            format_count(line.update),
            *map(number, (line.eval_loss, line.eval_accuracy, line.eval_f1, line.eval_perplexity)),
        )
        for named in names
        for seed, run, _ in named.runs
        for line in run.eval
    ]
    return _boxed("Evaluations", f"{head}<tbody>{''.join(rows)}</tbody>") if rows else ""


def phase_table(names: Sequence[Named]) -> str:
    """Return the planned peak of each phase of a later update beside the measured peak, which is that of updates."""
    measured_title = "peak of updates, measured"  # elsewhere the measured peak is that of the whole run
    head = _head("optimizer", "forward", "backward", "step", "peak planned", "planned as profiled", measured_title)
    rows = []
    for named in names:
        run = named.run
        plan = run.optimizer.plan if run else None
        if run is None or plan is None:
            continue
        measured = run.measured
        profiled = measured.profiled if measured else None
        phases = (plan.phases.get(phase) for phase in ("forward", "backward", "step"))
        rows.append(
            row_of(
                named.name,
                *(amount(phase.total_bytes if phase else None) for phase in phases),
                amount(plan.peak_allocated_bytes),
                amount(profiled.planned_peak_allocated_bytes if profiled else None),
                amount(measured.update_peak_allocated_bytes if measured else None),
            )
        )
    return _boxed("Peaks by phase", f"{head}<tbody>{''.join(rows)}</tbody>") if rows else ""


def text_table(caption: str, titles: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a table of texts, each escaped and on one line."""
    lines = (
        f'<tr><th scope="row">{escaped(plain(str(first)))}</th>'
        + "".join(f'<td class="text wide">{escaped(plain(str(cell)))}</td>' for cell in rest)
        + "</tr>"
        for first, *rest in rows
    )
    return _boxed(caption, f"{_head(*titles, texts=titles)}<tbody>{''.join(lines)}</tbody>")


def table_of(caption: str, titles: Sequence[str], rows: Iterable[str]) -> str:
    """Return a table of rows, titles above numbers."""
    return _boxed(caption, f"{_head(*titles)}<tbody>{''.join(rows)}</tbody>")


def _head(*titles: str, texts: Sequence[str] = ()) -> str:
    """Return the head of a table; the titles that are in `texts` stand above text, the others above numbers."""
    looks = dict.fromkeys(texts, ' class="text"')
    cells = "".join(f'<th scope="col"{looks.get(title, "")}>{escaped(title)}</th>' for title in titles)
    return f"<thead><tr>{cells}</tr></thead>"


def row_of(name: str, *cells: str) -> str:
    """Return a row of texts that a name begins."""
    return f'<tr><th scope="row">{_name(name)}</th>{"".join(f"<td>{escaped(cell)}</td>" for cell in cells)}</tr>'


def _name(name: str) -> str:
    """Return the name that begins a row; one that is too long is whole for readers, copies and searches alone."""
    return f"<span>{escaped(name)}</span>"


def _boxed(caption: str, inside: str, look: str = "") -> str:
    """Return a table that scrolls in a box of its own, which the keyboard reaches."""
    box = f'<div class="scroll" role="region" aria-label="{escaped(caption)}" tabindex="0">'
    return f'{box}<table class="{look}">{inside}</table></div>'
