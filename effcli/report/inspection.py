"""What an inspection says, as tables for a terminal; reads only the record."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

from rich.text import Text

from effcli.report.bars import stacked_bar
from effcli.report.layout import fact_grid, print_parts, ruled_table
from effcli.report.number_text import ratio
from effcli.report.text import plain
from effcli.units import count, format_bytes, format_count

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table

    from effcli.measure.inspection_record import InspectionRecord, SavedValues

_WIDTH = 79
_SHORTEST_BAR, _LONGEST_BAR = 8, 30


def render_inspection(record: InspectionRecord, console: Console, *, top: int | None, notes: bool) -> None:
    """Print amounts by state name and by parameter, what is quantised, and what other optimizers would take.

    `top` limits the parameters to the largest ones; None shows all of them.
    """
    title = Text(plain(f"effcli inspect: {record.path}"), style="bold")
    parts: list[RenderableType] = [
        fact_grid(_facts(record)),
        _by_name(record),
        _by_parameter(record, top),
        fact_grid(_left_out(record, top)),
        fact_grid(_quantised(record)),
        _alternatives(record, console.encoding),
        *_values(record),
    ]
    if notes:
        parts.append(fact_grid(("note", note) for note in record.notes))
    console.print(title)
    print_parts(parts, console)


def _facts(record: InspectionRecord) -> Iterable[tuple[str, str]]:
    yield "format", record.format
    others = f"; the same state: {', '.join(record.also_fits)}" if record.also_fits else ""
    yield "optimizer", f"{record.optimizer}{others}" if record.optimizer else "not known"
    yield "because", record.resemblance
    exact = f" ({format_count(record.state_bytes)} B)" if record.state_bytes >= 1024 else ""
    yield "state", f"{format_bytes(record.state_bytes)}{exact} in {count(record.num_tensors, 'tensor')}"
    yield "elements", format_count(record.state_elements)
    if record.shared_bytes:
        yield "shared", f"{format_bytes(record.shared_bytes)} of that is shared by several parameters"


def _by_name(record: InspectionRecord) -> Table:
    table = ruled_table("By state name", "name", "elements", "size")
    table.add_column("stored as", overflow="fold")
    for key, amount in record.tensors.items():
        elements = format_count(amount.elements) if amount.elements else "-"
        table.add_row(plain(key), elements, format_bytes(amount.bytes), plain(amount.dtype).replace("+", " + "))
    return table


def _by_parameter(record: InspectionRecord, top: int | None) -> Table:
    table = ruled_table("By parameter, the largest first", "parameter", "shape", "elements", "size")
    some = any(parameter.quantised for parameter in record.parameters)
    if some:
        table.add_column("quantised", overflow="fold")
    for parameter in record.parameters[:top]:
        row = [_name(parameter.name, record), _shape(parameter.shape), format_count(parameter.elements)]
        row.append(format_bytes(parameter.bytes))
        table.add_row(*row, *(["yes" if parameter.quantised else "no"] if some else []))
    return table


def _left_out(record: InspectionRecord, top: int | None) -> Iterable[tuple[str, str]]:
    left = record.parameters[top:] if top is not None else ()
    if left:
        size = format_bytes(sum(parameter.bytes for parameter in left))
        yield "more", f"{count(len(left), 'parameter')} with {size}: --per-layer shows all, --top N the largest"


def _name(label: str, record: InspectionRecord) -> str:
    return f"position {label}" if label.isdecimal() and not record.names_known else plain(label)


def _shape(shape: tuple[int, ...] | None) -> str:
    if shape is None:
        return "not known"
    return " x ".join(map(format_count, shape)) or "1 number"


def _quantised(record: InspectionRecord) -> Iterable[tuple[str, str]]:
    """Yield how much is quantised, and each reason with how many parameters it holds for."""
    parameters = record.parameters
    quantised = [parameter for parameter in parameters if parameter.quantised]
    if not any(parameter.quantised or parameter.reason for parameter in parameters):
        if parameters:
            yield "quantised", "none: every statistic has 16 bits or more"
        return
    share = 100 * sum(parameter.elements for parameter in quantised) / max(1, record.state_elements)
    yield "quantised", f"{len(quantised)} of {count(len(parameters), 'parameter')}, {share:.1f} % of the elements"
    reasons = Counter(parameter.reason for parameter in parameters if not parameter.quantised)
    for reason, number in reasons.most_common():
        held = [parameter for parameter in parameters if not parameter.quantised and parameter.reason == reason]
        size = format_bytes(sum(parameter.bytes for parameter in held))
        yield "not", f"{count(number, 'parameter')} with {size}: {reason or 'the reason is not known'}"


def _alternatives(record: InspectionRecord, encoding: str) -> Table:
    """Return a row per optimizer with a bar; the saved state is the first of them where it was recognised."""
    heads = ("optimizer", "state", "of this")
    rows = [
        (_as_saved(row.name, record), format_bytes(row.state_bytes), _ratio(row.state_bytes, record.state_bytes))
        for row in record.alternatives
    ]
    table = ruled_table("The same parameters with other optimizers, by their defaults", *heads)
    table.add_column("", no_wrap=True)
    used = sum(max(len(head), *(len(row[column]) for row in rows), 0) + 2 for column, head in enumerate(heads))
    width = min(_LONGEST_BAR, max(_SHORTEST_BAR, _WIDTH - used))
    largest = max((row.state_bytes for row in record.alternatives), default=0)
    for cells, row in zip(rows, record.alternatives, strict=True):
        table.add_row(*cells, stacked_bar((row.state_bytes,), largest, width, encoding))
    return table


def _as_saved(name: str, record: InspectionRecord) -> str:
    return f"{plain(name)} (as saved)" if name == record.optimizer else plain(name)


def _ratio(num_bytes: int, saved: int) -> str:
    return f"{ratio(num_bytes / saved)} x" if saved else "-"


def _values(record: InspectionRecord) -> Iterable[RenderableType]:
    """Yield a paragraph with three lines per tensor: its name, what it is, its first values; with one per number."""
    if not record.values:
        return
    text = Text("Values as they are stored", style="bold")
    for tensor in record.values:
        text.append(f"\n{_name(tensor.parameter, record)}.{plain(tensor.key)}", style="not bold")
        if not tensor.shape:
            text.append(f" = {_first(tensor)} ({plain(tensor.dtype)})", style="not bold dim")
            continue
        ends = f", {_number(tensor.minimum)} to {_number(tensor.maximum)}" if tensor.minimum is not None else ""
        dtype = plain(tensor.dtype) + (" (magnitudes)" if tensor.dtype.startswith("complex") else "")
        text.append(f"\n  {_shape(tensor.shape)}, {dtype}{ends}", style="not bold dim")
        text.append(f"\n  {_first(tensor)}", style="not bold dim")
    yield text


def _first(tensor: SavedValues) -> str:
    """Return the first values, and how many of all are not finite."""
    more = " ..." if math.prod(tensor.shape) > len(tensor.first) else ""
    text = " ".join(map(_number, tensor.first)) + more
    odd = [
        count(number, noun) for number, noun in ((tensor.num_nan, "NaN"), (tensor.num_infinite, "infinity")) if number
    ]
    return f"{text} (not finite: {', '.join(odd)})" if odd else text


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
