"""What each of several processes holds, predicted and measured: the least, the most, and all; reads only the record."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING

from effcli.report.layout import ruled_table
from effcli.report.memory_row import total
from effcli.report.text import plain
from effcli.units import count, format_bytes, format_count, listed

if TYPE_CHECKING:
    from rich.table import Table

    from effcli.measure.estimate_record import EstimateRecord
    from effcli.measure.rank_record import DistributionFacts, RankAmounts
    from effcli.measure.record import OptimizerFacts, RunRecord

EXCHANGE = "exchange"
"""What a process holds to exchange with others, in a word."""
_SHARDED = {
    "ddp": "each has all weights, gradients and optimizer state",
    "fsdp": "weights, gradients and optimizer state are sharded",
    "zero1": "the optimizer state is sharded, weights and gradients are whole",
    "zero2": "gradients and optimizer state are sharded, weights are whole",
    "zero3": "weights, gradients and optimizer state are sharded",
}
_PARTS = {
    "weights": "weights_bytes",
    "gradients": "gradients_bytes",
    "optimizer state": "optimizer_state_bytes",
    EXCHANGE: "communication_bytes",
    "total": "total_before_activations_bytes",
}
"""Part of what a rank is predicted to hold -> the amount's name; the last is the sum."""
_TWINS = ("optimizer state", "weights", "gradients")
_PEAKS = {"peak allocated": "peak_allocated_bytes", "peak resident set": "peak_rss_bytes"}


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRow:
    """One amount over all ranks, in bytes: the least, the most, and the sum; None where a rank's is not known."""

    label: str
    side: str
    least: int | None
    most: int | None
    all: int | None


def how_spread(facts: DistributionFacts) -> str:
    """Return how many processes there are and what of a run is shared between them, in words."""
    return f"{format_count(facts.world_size)} ({facts.shard}): {_SHARDED[facts.shard]}"


def fullest(optimizer: OptimizerFacts) -> RankAmounts:
    """Return what the rank holds that holds most before activations."""
    return max(optimizer.per_rank, key=lambda rank: rank.total_before_activations_bytes)


def rank_rows(record: RunRecord) -> list[RankRow]:
    """Return what the ranks of a run hold, each amount as predicted and, after the run, as measured."""
    predicted, measured = record.optimizer.per_rank, record.measured.per_rank if record.measured else ()
    rows = []
    for label in _TWINS:
        rows.append(_row(label, "predicted", [getattr(rank, _PARTS[label]) for rank in predicted]))
        rows.append(_row(label, "measured", [getattr(rank, _PARTS[label]) for rank in measured]))
    exchanged = [rank.communication_bytes for rank in predicted]
    if any(exchanged):
        rows.append(_row(EXCHANGE, "predicted", exchanged))
    for label, key in _PEAKS.items():
        rows.append(_row(label, "measured", [getattr(rank, key) for rank in measured]))
    return [row for row in rows if row.all is not None]


def _row(label: str, side: str, amounts: Sequence[int | None]) -> RankRow:
    known = [amount for amount in amounts if amount is not None]
    whole = len(known) == len(amounts) > 0
    return RankRow(
        label=label,
        side=side,
        least=min(known) if whole else None,
        most=max(known) if whole else None,
        all=total(amounts) if whole else None,
    )


def rank_table(record: RunRecord) -> Table:
    """Return what the ranks of a run hold; without rows where there is one process."""
    rows = rank_rows(record)
    number = len(record.optimizer.per_rank)
    table = ruled_table(f"By process, {format_count(number)} of them", "", "", "least", "most", "all together")
    for row, following in zip_longest(rows, rows[1:]):
        ends = following is None or following.label != row.label
        table.add_row(row.label, row.side, *map(_written, (row.least, row.most, row.all)), end_section=ends)
    return table


def agreement(record: RunRecord) -> Iterable[tuple[str, str]]:
    """Yield whether each rank's optimizer state came out as predicted; nothing unless both sides are known."""
    predicted, measured = record.optimizer.per_rank, record.measured.per_rank if record.measured else ()
    if not predicted or len(predicted) != len(measured):
        return
    off = [
        str(mine.rank)
        for mine, found in zip(predicted, measured, strict=True)
        if mine.optimizer_state_bytes != found.optimizer_state_bytes
    ]
    if off:
        yield "ranks", f"optimizer state is off its prediction on {count(len(off), 'rank')}: {listed(off)}"
    else:
        yield "ranks", f"optimizer state of all {format_count(len(measured))} as predicted, to the byte"


def parts_table(optimizer: OptimizerFacts) -> Table:
    """Return what the ranks of an estimate hold with an optimizer, part by part."""
    ranks = optimizer.per_rank
    rows = [(label, _row(label, "", [getattr(rank, key) for rank in ranks])) for label, key in _PARTS.items()]
    differ = any(row.least != row.most for _, row in rows)
    amounts = ("the most", "the least") if differ else ("each",)
    table = ruled_table(f"By process, with {plain(optimizer.name)}", "", *amounts, f"all {format_count(len(ranks))}")
    for label, row in rows:
        if row.all == 0 and label == EXCHANGE:
            continue
        held = (row.most, row.least) if differ else (row.most,)
        is_sum = label == "total"
        table.add_row(label, *map(_written, (*held, row.all)), style="bold" if is_sum else "")
    return table


def modes_table(record: EstimateRecord) -> Table:
    """Return what the fullest process would hold in each mode; without rows where there is one process."""
    facts = record.distribution
    name = record.modes[0].optimizer if record.modes else ""
    columns = ("weights", "gradients", "state", EXCHANGE, "total")
    table = ruled_table(f"By --shard with {plain(name)}: the fullest process", "", *columns)
    for mode in record.modes:
        amounts = (getattr(mode.fullest, key) for key in _PARTS.values())
        is_chosen = facts is not None and facts.shard == mode.shard
        table.add_row(mode.shard, *map(_written, amounts), style="bold" if is_chosen else "")
    return table


def _written(num_bytes: int | None) -> str:
    return "" if num_bytes is None else format_bytes(num_bytes)
