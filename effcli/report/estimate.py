"""What an estimate says, as tables for a terminal; reads only the record."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from rich.text import Text

from effcli.report.bars import fills, stacked_bar
from effcli.report.layout import fact_grid, print_parts, ruled_table
from effcli.report.peak import peak_parts, peak_table
from effcli.report.ranks import EXCHANGE, fullest, how_spread, modes_table, parts_table
from effcli.report.text import parameter_counts, plain, tokens_of_rows
from effcli.units import Basis, count, format_bytes, format_count, listed

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table

    from effcli.measure.estimate_record import EstimateRecord, PeakFacts
    from effcli.measure.record import OptimizerFacts
    from effcli.memory.layers import PartAmount

_WIDTH = 79
_SHORTEST_BAR, _LONGEST_BAR = 8, 30
_MOST_STATES = 3


def render_estimate(record: EstimateRecord, console: Console, *, notes: bool) -> None:
    """Print model, optimizers and, where they were asked for, the peak, layers and largest tensors."""
    title = Text(plain(f"effcli estimate: {record.model.name}"), style="bold")
    parts: list[RenderableType] = [
        fact_grid(_facts(record)),
        *_spread(record),
        _optimizers(record, console.encoding),
        fact_grid(_rule_of_thumb(record)),
        *_peaks(record, console.encoding),
        _parts("By layer", record.layers, record),
        _parts("Largest tensors", record.largest, record),
        fact_grid(_left_out(record)),
    ]
    planned = next((optimizer.plan.notes for optimizer in record.optimizers if optimizer.plan), ())
    if notes and (record.notes or planned):
        parts.append(fact_grid(("note", note) for note in dict.fromkeys((*record.notes, *planned))))
    console.print(title)
    print_parts(parts, console)


def _facts(record: EstimateRecord) -> Iterable[tuple[str, str]]:
    model = record.model
    yield "type", f"{model.architecture}, {model.task}"
    yield "parameters", parameter_counts(model)
    if record.tied:
        yield "tied", f"counted once: {listed(record.tied)}"
    yield "precision", record.precision
    bound = "every total is a lower bound"
    if record.distribution is None:
        yield "weights", format_bytes(model.weights_bytes)
        yield "gradients", format_bytes(model.gradients_bytes)
    else:
        yield "processes", how_spread(record.distribution)
        if any(rank.communication_bytes for rank in record.optimizers[0].per_rank):
            yield EXCHANGE, "held at most beside its share: gathered parameters, and buffers to reduce"
            bound = "totals have the most of everything, which need not meet"
    if record.buffers_bytes:
        yield "buffers", f"{format_bytes(record.buffers_bytes)}, no parameters and in no total"
    if record.peak is None:
        yield "activations", f"not included: {bound}; --batch-size 8 asks for the peak"
        return
    yield from _peak_settings(record.peak)


def _peak_settings(peak: PeakFacts) -> Iterable[tuple[str, str]]:
    """Yield what the peak was predicted for."""
    batch = peak.batch
    processes = f" x {format_count(batch.world_size)}" if batch.world_size > 1 else ""
    rows = f"{batch.micro} x {batch.accum}{processes} = {count(batch.effective, 'row')} per update"
    yield "batch", ", ".join([rows, *tokens_of_rows(peak.max_length, peak.max_target_length)])
    kept = "recomputed in the backward pass" if peak.gradient_checkpointing else "kept for the backward pass"
    yield "activations", kept + (f", attention {peak.attn}" if peak.attn else "")
    yield "device", peak.device
    if peak.gpu is not None:
        name = f", {peak.gpu.name}" if peak.gpu.name else ""
        yield "gpu", f"{format_bytes(peak.gpu.usable_bytes)}{name}"
    if peak.budget_bytes is not None:
        yield "budget", format_bytes(peak.budget_bytes)


def _peaks(record: EstimateRecord, encoding: str) -> Iterable[RenderableType]:
    """Yield a row per optimizer where there are several, and the details of the first."""
    planned = [(optimizer, optimizer.plan) for optimizer in record.optimizers if optimizer.plan is not None]
    if len(planned) > 1:
        yield peak_table([(optimizer.name, plan) for optimizer, plan in planned])
    if planned:
        first, plan = planned[0]
        yield from peak_parts(f"Peak of an update with {first.name}", plan, encoding)


def _spread(record: EstimateRecord) -> Iterable[RenderableType]:
    """Yield what several processes hold with the first optimizer, and what they would in other modes."""
    if record.distribution is not None:
        yield parts_table(record.optimizers[0])
        yield modes_table(record)


def _optimizers(record: EstimateRecord, encoding: str) -> Table:
    """Return a row per optimizer; the bars take what the amounts leave of 80 columns.

    Of several processes it is what the fullest holds, and the total of all; one optimizer alone was shown before.
    """
    if (spread := record.distribution) is not None:
        return _optimizers_of_ranks(record, spread.world_size)
    rows = [_amounts(optimizer) for optimizer in record.optimizers]
    heads = ("optimizer", "state", "rule of thumb", "total")
    used = sum(max(len(head), *(len(row[column]) for row in rows)) + 2 for column, head in enumerate(heads))
    width = min(_LONGEST_BAR, max(_SHORTEST_BAR, _WIDTH - used))
    weights, gradients, state, *_ = fills(encoding)
    table = ruled_table(f"Before activations: {weights} weights, {gradients} gradients, {state} state", *heads)
    table.add_column("", no_wrap=True)
    largest = max(optimizer.total_before_activations_bytes for optimizer in record.optimizers)
    for row, optimizer in zip(rows, record.optimizers, strict=True):
        parts = (record.model.weights_bytes, record.model.gradients_bytes, optimizer.state_bytes)
        table.add_row(*row, stacked_bar(parts, largest, width, encoding))
    return table


def _optimizers_of_ranks(record: EstimateRecord, world_size: int) -> Table:
    heads = ("optimizer", "state", "rule of thumb", "total", f"all {format_count(world_size)}")
    table = ruled_table("By optimizer: the fullest process, and all together", *heads)
    for optimizer in record.optimizers if len(record.optimizers) > 1 else ():
        most, (name, _, rule, _) = fullest(optimizer), _amounts(optimizer)
        everywhere = sum(rank.total_before_activations_bytes for rank in optimizer.per_rank)
        amounts = (most.optimizer_state_bytes, most.total_before_activations_bytes, everywhere)
        state, whole, everything = map(format_bytes, amounts)
        table.add_row(name, state, rule, whole, everything)
    return table


def _amounts(optimizer: OptimizerFacts) -> tuple[str, str, str, str]:
    rule = optimizer.rule_of_thumb_bytes
    return (
        plain(optimizer.name) + ("" if optimizer.basis == Basis.EXACT else f" ({optimizer.basis})"),
        format_bytes(optimizer.state_bytes),
        "-" if rule is None else format_bytes(rule),
        format_bytes(optimizer.total_before_activations_bytes),
    )


def _parts(title: str, parts: tuple[PartAmount, ...], record: EstimateRecord) -> Table:
    """Return a row per part: its weights, and its state in each of the first optimizers."""
    names = [plain(optimizer.name) for optimizer in record.optimizers[:_MOST_STATES]]
    whose = " on rank 0" if record.distribution else ""
    table = ruled_table(f"{title}{whose}: weights, and the state of each optimizer", "part", "weights", *names)
    for part in parts:
        table.add_row(
            plain(part.name) + (f" ({part.repeats} x)" if part.repeats > 1 else ""),
            *(format_bytes(num_bytes) for num_bytes in (part.weights_bytes, *part.state_bytes[: len(names)])),
        )
    return table


def _rule_of_thumb(record: EstimateRecord) -> Iterable[tuple[str, str]]:
    is_shown = record.distribution is None or len(record.optimizers) > 1
    if is_shown and any(optimizer.rule_of_thumb_bytes is not None for optimizer in record.optimizers):
        yield "rule", "bytes per parameter as people quote them; the state beside it is by tensor and by law"


def _left_out(record: EstimateRecord) -> Iterable[tuple[str, str]]:
    if (record.layers or record.largest) and len(record.optimizers) > _MOST_STATES:
        yield "parts", f"the first {_MOST_STATES} optimizers; --json has all"
