"""The table of optimizers, and the page about one of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from effcli.report.layout import fact_grid, print_parts, ruled_table
from effcli.report.text import plain
from effcli.units import DTYPE_BYTES, Basis, Placement, format_count

if TYPE_CHECKING:
    from rich.console import Console

    from effcli.optim.summary import OptimizerOverview, OptimizerPage, Setting, Statistic

_SHORT = {"float32": "fp32", "bfloat16": "bf16"}
_PLACES = {Placement.DEVICE: "", Placement.PAGED: ", paged", Placement.HOST: ", on the host"}
_BASES = {Basis.EXACT: "exact, by this law", Basis.PROBED: "probed: a trial step of the class"}
_SCHEDULES = {
    "any": "any --scheduler",
    "constant": "only --scheduler constant",
    "own": "sets its own learning rate; takes no schedule",
}


def render_overview(rows: Sequence[OptimizerOverview], shape: tuple[int, int], console: Console) -> None:
    """Print the table of optimizers, one group per package; `shape` is the matrix that its numbers are about."""
    table = ruled_table("Optimizers, with bytes of state per parameter for fp32 and bf16 weights", "name")
    table.add_column("statistics", overflow="fold")
    for dtype in _SHORT.values():
        table.add_column(dtype, justify="right", overflow="fold")
    table.add_column("runs on", overflow="fold")
    for package, members in groupby(rows, key=lambda row: row.package):
        group = list(members)
        table.add_row(plain(package), _how_to_install(group[0], "\n"), style="bold")
        for row in group:
            numbers = [_per_parameter(row.bytes_per_parameter[dtype]) for dtype in _SHORT]
            table.add_row(f" {row.name}", _statistics(row, "\n"), *numbers, ", ".join(row.devices))
        table.add_section()
    print_parts((table, fact_grid(_explanations(shape))), console)


def render_page(page: OptimizerPage, console: Console) -> None:
    """Print everything about one optimizer."""
    headline = Text(plain(f"{page.name}: "), style="bold").append(plain(page.summary), style="not bold")
    print_parts(
        (Group(headline, Text(), fact_grid(_facts(page))), _examples(page), _settings(page.settings)),
        console,
    )


def _explanations(shape: tuple[int, int]) -> Iterable[tuple[str, str]]:
    yield (
        "statistics",
        "how many x precision of an element; factor: one number per row or per column; rank-r: r numbers per row or "
        "per column; quantisation constants and steps are not listed",
    )
    yield (
        "fp32, bf16",
        f"bytes of state, everything included, divided by the parameters of a {_shape(shape)} matrix in a model's "
        "body; vectors and small tensors differ",
    )
    yield "one of them", "effcli optimizers NAME: law, formula, examples in bytes, defaults and flags"
    yield "any other", "--optim package.module:Class, sized by a trial step of the class"


def _facts(page: OptimizerPage) -> Iterable[tuple[str, str]]:
    yield "law", page.law
    if page.formula:
        yield "formula", page.formula
    for name, meaning in page.legend.items():
        yield "", f"{name}: {meaning}"
    if page.shared_bytes:
        yield "shared", f"{format_count(page.shared_bytes)} bytes of tables, once per optimizer"
    yield "basis", _BASES[page.basis]
    if page.rule_of_thumb_bytes_per_parameter is not None:
        amount = page.rule_of_thumb_bytes_per_parameter
        yield "rule of thumb", f"{amount:g} byte{'' if amount == 1 else 's'} x parameters"
    yield "statistics", _statistics(page)
    yield "source", page.source
    yield "package", " ".join(filter(None, (page.package, _how_to_install(page))))
    yield "runs on", ", ".join(page.devices)
    yield "schedule", _SCHEDULES[page.schedule]
    if page.aliases:
        yield "aliases", ", ".join(page.aliases)
    if page.cpu_note:
        yield "note", page.cpu_note


def _how_to_install(row: OptimizerOverview, separator: str = " ") -> str:
    return "" if row.installed else f"not installed;{separator}pip install {row.pip or row.package}"


def _statistics(row: OptimizerOverview, separator: str = "; ") -> str:
    """Return what both weight dtypes have in common, or both where they differ in more than the width."""
    absolute = [_described(row.statistics[dtype]) for dtype in _SHORT]
    relative = [_described(row.statistics[dtype], 8 * DTYPE_BYTES[dtype]) for dtype in _SHORT]
    for texts in (absolute, relative):
        if texts[0] == texts[1]:
            return texts[0]
    return separator.join(f"{short}: {text}" for short, text in zip(_SHORT.values(), absolute, strict=True))


def _described(statistics: Sequence[Statistic], weight_bits: int | None = None) -> str:
    return " + ".join(_kind(statistic, weight_bits) for statistic in statistics) or "none"


def _kind(statistic: Statistic, weight_bits: int | None) -> str:
    per_side, plural = statistic.per_side, "" if statistic.count == 1 else "s"
    if per_side == 0:
        return f"{statistic.count} number{plural}"
    noun = "" if per_side is None else f"factor{plural} " if per_side == 1 else f"rank-{per_side} "
    if statistic.bits is None:
        return f"{statistic.count} {noun}in a larger tensor"
    bits = "weight's dtype" if statistic.bits == weight_bits else f"{statistic.bits} bit"
    return f"{statistic.count} {noun}x {bits}{_PLACES[statistic.placement]}"


def _per_parameter(amount: float) -> str:
    return "0" if amount == 0 else "<0.001" if amount < 0.0005 else f"{amount:,.3f}"


def _examples(page: OptimizerPage) -> Table:
    """Return elements and bytes of each example, key by key, and below them what all parameters share."""
    columns = [f"{dtype} weights" for dtype in _SHORT.values()]
    table = ruled_table("Bytes of state, with these defaults", "parameter", "elements", *columns)
    for example in page.examples:
        elements = {dtype: sum(tensor.elements[dtype] for tensor in example.tensors) for dtype in _SHORT}
        sums = [format_count(example.own_bytes[dtype]) for dtype in _SHORT]
        table.add_row(_shape(example.shape), _elements(elements), *sums, style="bold")
        for tensor in example.tensors:
            amounts = [format_count(tensor.bytes[dtype]) for dtype in _SHORT]
            if tensor.shared:
                amounts = ["shared"] * len(amounts)
            table.add_row(f"  {plain(tensor.key)}", _elements(tensor.elements), *amounts)
        table.add_section()
    return table


def _elements(counts: Mapping[str, int]) -> str:
    """Return one number, or two where the weight's dtype makes a difference."""
    return " / ".join(dict.fromkeys(format_count(counts[dtype]) for dtype in _SHORT))


def _settings(settings: Sequence[Setting]) -> Table:
    table = ruled_table("Hyperparameters", "set by")
    table.add_column("default", justify="right", overflow="fold")
    table.add_column("meaning", overflow="fold")
    for setting in settings:
        table.add_row(plain(setting.flag), plain(_value(setting.default)), plain(setting.help))
    return table


def _value(value: Any) -> str:
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _shape(shape: Sequence[int]) -> str:
    return " x ".join(map(format_count, shape)) if len(shape) > 1 else f"vector of {format_count(shape[0])}"
