"""What is live at the peak of several runs: bars on one scale, as predicted."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.console import Group
from rich.text import Text

from effcli.report.bars import fills, stacked_bar
from effcli.report.comparison_memory import amount
from effcli.report.layout import ruled_table
from effcli.report.text import common_unit, plain

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from effcli.measure.comparison_record import ComparisonRecord
    from effcli.measure.record import RunRecord

_LOOKS = ("cyan", "yellow", "green", "magenta")
"""Colours of weights, gradients, state, and the rest, where there are colours; the fills differ without them."""
_SHORTEST_BAR, _LONGEST_BAR, _LONGEST_NAME = 8, 60, 24


def memory_bars(record: ComparisonRecord, console: Console) -> Iterator[RenderableType]:
    """Yield a bar for each name on one scale: what is live at the predicted peak, or before activations without one."""
    runs = [(line.name, run) for line in record.summary if (run := record.run_for(line.name)) is not None]
    at_peak = [(name, _parts_at_peak(run)) for name, run in runs]
    if not all(parts for _, parts in at_peak):
        at_peak = [(name, _parts_before_activations(run)) for name, run in runs]
        title = "Before activations, as predicted"
    else:
        title = "At the predicted peak of the largest batch"
    if not at_peak:
        return
    largest = max(sum(parts) for _, parts in at_peak)
    unit, unit_name = common_unit(largest)
    headings = ("optimizer", f"total, {unit_name}")
    longest = max(len(headings[0]), *(len(plain(name)) for name, _ in at_peak))
    used = min(longest, _LONGEST_NAME) + len(headings[1]) + 4
    width = min(_LONGEST_BAR, max(_SHORTEST_BAR, console.width - used))
    table = ruled_table("", headings[0])
    table.title, table.columns[0].max_width = None, _LONGEST_NAME
    table.add_column("", no_wrap=True, overflow="crop")
    table.add_column(headings[1], justify="right", overflow="fold")
    for name, parts in at_peak:
        bar = stacked_bar(parts, largest, width, console.encoding)
        table.add_row(plain(name), _coloured(bar, console.encoding), amount(sum(parts), unit))
    yield Group(Text(title, style="bold"), _legend(console.encoding, len(at_peak[0][1])), table)


def _parts_at_peak(run: RunRecord) -> tuple[int, ...]:
    """Return weights, gradients, state, and activations with temporaries, in bytes; nothing without a traced peak."""
    peak = run.optimizer.plan.at_peak if run.optimizer.plan else None
    if peak is None or peak.activations_bytes is None or peak.temporaries_bytes is None:
        return ()
    rest = peak.activations_bytes + peak.temporaries_bytes + peak.communication_bytes
    return (peak.weights_bytes, peak.gradients_bytes, peak.optimizer_state_bytes, rest)


def _parts_before_activations(run: RunRecord) -> tuple[int, ...]:
    return (run.model.weights_bytes, run.model.gradients_bytes, run.optimizer.state_bytes)


def _legend(encoding: str, num_parts: int) -> Text:
    names = ("weights", "gradients", "state", "activations and temporaries")[:num_parts]
    legend = Text()
    for fill, look, name in zip(fills(encoding), _LOOKS, names, strict=False):
        legend.append(fill, style=look).append(f" {name}  ")
    legend.rstrip()
    return legend


def _coloured(bar: str, encoding: str) -> Text:
    text = Text(no_wrap=True)
    for fill, look in zip(fills(encoding), _LOOKS, strict=True):
        text.append(fill * bar.count(fill), style=look)
    return text
