"""What a comparison makes of its runs: means over seeds, ratios, predicted beside measured; and records of others."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from effcli.measure.comparison_record import ComparisonRecord
from effcli.measure.record import RunRecord
from tests import comparisons
from tests.commands import effcli


def with_last_loss(record: RunRecord, loss: float | None) -> RunRecord:
    last = record.history[-1].model_copy(update={"loss": loss})
    return record.model_copy(update={"history": (*record.history[:-1], last)})


def with_perplexity(record: RunRecord, perplexity: float) -> RunRecord:
    last = record.eval[-1].model_copy(update={"eval_perplexity": perplexity})
    return record.model_copy(update={"eval": (*record.eval[:-1], last)})


def two_seeds() -> list[RunRecord]:
    return [comparisons.run("adamw", seed) for seed in (42, 43)]


def test_an_amount_that_one_seed_lacks_is_no_mean_over_the_others() -> None:
    one, other = two_seeds()
    (line,) = comparisons.comparison([one, with_last_loss(other, None)]).summary
    assert line.final_loss is None
    assert "final_loss" not in {*line.ratios, *line.spread}
    assert line.measured_state_bytes == one.measured.optimizer_state_bytes


@pytest.mark.parametrize("perplexity", [math.inf, math.nan])
def test_a_mean_that_is_not_finite_has_neither_deviation_nor_ratio(perplexity: float) -> None:
    first, one, other = comparisons.run("adafactor"), *two_seeds()
    runs = [with_perplexity(first, 8.0), with_perplexity(one, perplexity), with_perplexity(other, 2.0)]
    line = comparisons.comparison(runs).summary[1]
    assert not math.isfinite(line.eval_perplexity)
    assert "eval_perplexity" not in {*line.ratios, *line.spread}


def test_a_speed_of_nothing_is_none() -> None:
    record = comparisons.run("adamw")
    stopped = record.model_copy(update={"throughput": record.throughput.model_copy(update={"updates_per_second": 0.0})})
    assert comparisons.comparison([stopped]).summary[0].seconds_per_update is None


def test_the_planned_peak_of_one_batch_never_stands_beside_the_measured_peak_of_another(tmp_path: Path) -> None:
    record = comparisons.run("adamw")
    largest = record.optimizer.plan.peak_allocated_bytes
    assert record.measured.profiled.planned_peak_allocated_bytes is not None
    profiled = record.measured.profiled.model_copy(update={"planned_peak_allocated_bytes": None})
    record = record.model_copy(update={"measured": record.measured.model_copy(update={"profiled": profiled})})
    assert record.comparable_planned_peak_bytes is None
    assert comparisons.comparison([record]).summary[0].predicted_peak_allocated_bytes is None
    unprofiled = record.model_copy(update={"measured": record.measured.model_copy(update={"profiled": None})})
    assert unprofiled.comparable_planned_peak_bytes == largest
    assert record.model_copy(update={"measured": None}).comparable_planned_peak_bytes == largest


def test_a_saved_summary_is_made_anew_from_the_runs(tmp_path: Path) -> None:
    record = comparisons.comparison([comparisons.run(name) for name in ("adamw", "adam8bit")])
    path = tmp_path / "comparison.json"
    path.write_text(record.model_copy(update={"summary": ()}).model_dump_json())
    assert ComparisonRecord.model_validate(effcli("report", path, "--json").record) == record


@pytest.mark.parametrize(
    ("version", "words"),
    [(2, "is of schema version 2, and this effcli reads 1"), *((odd, "no whole number") for odd in ("1", True, 1.0))],
)
@pytest.mark.parametrize("inside", [False, True])
def test_another_schema_version_is_refused_wherever_it_stands(
    version: Any, words: str, inside: bool, tmp_path: Path
) -> None:
    document = json.loads(comparisons.comparison([comparisons.run("adamw")]).model_dump_json())
    (document["runs"][0] if inside else document)["schema_version"] = version
    path = tmp_path / "comparison.json"
    path.write_text(json.dumps(document))
    done = effcli("report", path)
    assert done.code == 2
    assert words in done.error
