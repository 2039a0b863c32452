"""Speed and results of several runs side by side, and below them models that learnt nothing from the model."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from effcli.report.comparison_memory import add_lines
from effcli.report.layout import ruled_table
from effcli.report.number_text import NOT_AVAILABLE, ratio
from effcli.report.text import plus_minus
from effcli.units import format_count

if TYPE_CHECKING:
    from rich.table import Table

    from effcli.measure.comparison_record import ComparisonRecord, Summary
    from effcli.measure.record import Baselines

_SPEED = "seconds_per_update"
_SHOWN: Mapping[str, tuple[str, str]] = {
    _SPEED: ("s/update", "{:,.4f}"),
    "samples_per_second": ("samples/s", "{:,.1f}"),
    "final_loss": ("training\nloss", "{:.4f}"),
    "eval_loss": ("eval\nloss", "{:.4f}"),
    "eval_accuracy": ("\naccuracy", "{:.4f}"),
    "eval_f1": ("\nF1", "{:.4f}"),
    "eval_perplexity": ("\nperplexity", "{:,.2f}"),
}
"""Amount of a summary -> heading and format."""


def results_table(record: ComparisonRecord, encoding: str) -> Table:
    """Return a row per name, with the deviation over seeds below it, and the baselines where all runs share them."""
    keys = [key for key in _SHOWN if any(getattr(line, key) is not None for line in record.summary)]
    headings = [heading for key in keys for heading in (_SHOWN[key][0], *(("ratio",) if key == _SPEED else ()))]
    table = ruled_table("Speed and results", "optimizer", *headings)
    for column in table.columns:
        column.vertical = "bottom"
    if not keys:
        return table
    sign = plus_minus(encoding)
    for line in record.summary:
        deviations = [cell for key in keys for cell in _deviation(line, key, sign)]
        add_lines(table, record, line, [cell for key in keys for cell in _mean(line, key)], deviations)
    _add_baselines(table, record, keys)
    return table


def _mean(line: Summary, key: str) -> list[str]:
    """Return the cells of one amount: its mean and, for the time of an update, the ratio to the first."""
    value = getattr(line, key)
    cells = [NOT_AVAILABLE if value is None else _shown(key, value)]
    if key == _SPEED:
        cells.append(ratio(line.ratios[key]) if key in line.ratios else NOT_AVAILABLE)
    return cells


def _deviation(line: Summary, key: str, sign: str) -> list[str]:
    cells = [f"{sign}{_shown(key, line.spread[key].deviation)}" if key in line.spread else ""]
    return [*cells, ""] if key == _SPEED else cells


def _shown(key: str, value: float) -> str:
    return _SHOWN[key][1].format(value) if math.isfinite(value) else "not finite"


def _add_baselines(table: Table, record: ComparisonRecord, keys: Iterable[str]) -> None:
    base = _shared_baselines(record)
    if base is None:
        return
    table.add_section()
    for label, accuracy, f1 in (
        ("majority class", base.majority_accuracy, base.majority_f1),
        ("bag of words", base.bag_of_words_accuracy, base.bag_of_words_f1),
    ):
        scores = {"eval_accuracy": f"{accuracy:.4f}", "eval_f1": f"{f1:.4f}"}
        cells = [cell for key in keys for cell in (scores.get(key, ""), *([""] if key == _SPEED else []))]
        table.add_row(label, *cells)


def _shared_baselines(record: ComparisonRecord) -> Baselines | None:
    """Return the baselines where all runs have the same, which needs the same rows, and some run was scored."""
    found = [run.baselines for run in record.runs]
    scored = any(line.eval_accuracy is not None for line in record.summary)
    return found[0] if found and scored and all(base == found[0] for base in found) else None


def results_remarks(record: ComparisonRecord) -> Iterable[tuple[str, str]]:
    """Yield what the times leave out, what the baselines are, and which runs had fewer updates than the others."""
    if any(line.seconds_per_update is not None for line in record.summary):
        yield "s/update", "training time alone: evaluation and saving are left out"
    if any(line.final_loss is not None for line in record.summary):
        yield "losses", "training: that of the last update; eval, and the scores: those of the last evaluation"
    if _shared_baselines(record) is not None:
        yield (
            "baselines",
            "the last two rows: always the commoner class, and a bag of words, on the same evaluation rows",
        )
    for attempt in record.attempts:
        run = record.record_of(attempt)
        if run is not None and run.history and not attempt.ended_well:
            done, planned = format_count(run.history[-1].update), format_count(run.total_updates)
            yield "mind", f"{attempt.name}, seed {attempt.seed}: its results are those after update {done} of {planned}"
