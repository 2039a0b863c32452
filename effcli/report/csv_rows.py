"""A comparison as rows for a spreadsheet: one for each run that was wanted, amounts as plain numbers."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from effcli.measure.comparison_record import COMPARED, compared
from effcli.report.text import plain
from effcli.setting_texts import mapping, setting_text

if TYPE_CHECKING:
    from effcli.measure.comparison_record import Attempt, ComparisonRecord
    from effcli.measure.record import RunRecord

_FORMULA = ("=", "+", "-", "@")

Cell = str | int | float | None


def csv_text(record: ComparisonRecord) -> str:
    """Return the rows with a header; bytes and seconds as plain numbers, an empty cell for what is not known."""
    rows = [_row(attempt, record.record_of(attempt)) for attempt in record.attempts]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(rows[0] if rows else ())
    writer.writerows([_cell(value) for value in row.values()] for row in rows)
    return text.getvalue()


def _row(attempt: Attempt, run: RunRecord | None) -> Mapping[str, Cell]:
    """Return one run by the names of the columns, the same for every run."""
    own = attempt if run is None else attempt.model_copy(update={"run": 0})
    (summary,) = compared([own], [run] if run else [], status="planned").summary
    identity: dict[str, Cell] = {
        "name": attempt.name,
        "seed": attempt.seed,
        "status": attempt.status,
        "failure": attempt.failure,
        "exit_code": attempt.exit_code,
        "folder": attempt.folder,
    }
    return {**identity, **_settings(run), **{key: getattr(summary, key) for key in COMPARED}}


def _settings(run: RunRecord | None) -> Mapping[str, Cell]:
    """Return what was run, as far as a table of several runs is sorted and filtered by it."""
    loop = mapping(run.spec.get("loop")) if run else {}
    return {
        "model": run.model.name if run else None,
        "optimizer": run.optimizer.name if run else None,
        "engine": setting_text(loop.get("engine"), ""),
        "precision": setting_text(loop.get("precision"), ""),
        "device": str(run.environment.get("device", "")) if run else None,
        "rows_per_update": run.batch.effective if run else None,
        "planned_updates": run.total_updates if run else None,
        "updates": run.history[-1].update if run and run.history else None,
        "num_parameters": run.model.num_parameters if run else None,
        "weights_bytes": run.model.weights_bytes if run else None,
        "gradients_bytes": run.model.gradients_bytes if run else None,
        "predicted_state_basis": run.optimizer.basis if run else None,
    }


def _cell(value: Cell) -> str | int | float | None:
    """Return a cell; a text that a spreadsheet would run as a formula begins with an apostrophe."""
    if isinstance(value, str):
        text = plain(value)
        return f"'{text}" if text.lstrip().startswith(_FORMULA) else text
    return None if isinstance(value, float) and not math.isfinite(value) else value
