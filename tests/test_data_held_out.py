"""Rows kept for evaluation: the same ones whatever reads them, none of them trained on, and only where it was asked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from effcli import pipeline
from effcli.data.held_out import held_out_rows
from effcli.data.source import RawTables, load_tables
from effcli.errors import DataError, UsageError
from effcli.report.progress import QuietProgress
from effcli.spec import DataSpec, build_spec
from tests.commands import TINY_DISTILBERT, csv_file, effcli, model_folder, same_weights, saved_weights, untimed
from tests.jobs import ENGINES
from tests.prepared import chosen
from tests.stopped_runs import settings, train_and_stop

pytestmark = pytest.mark.usefixtures("without_plan")


def load(path: Path, *, seed: int = 42, **fields: Any) -> RawTables:
    return load_tables(DataSpec(train=str(path), **fields), seed=seed)


def lines(rows: Any) -> list[int]:
    return list(rows["__line__"])


def test_which_rows_are_kept_stays_the_same_in_every_version() -> None:
    assert np.flatnonzero(held_out_rows(20, 0.25, seed=42)).tolist() == [4, 11, 15, 16, 18]


@pytest.mark.parametrize(
    ("num_rows", "fraction", "num_kept"),
    [(2, 0.5, 1), (2, 0.01, 1), (2, 0.99, 1), (10, 0.1, 1), (100, 0.1, 10), (101, 0.33, 33), (1000, 0.999, 999)],
)
def test_both_parts_have_a_row_and_the_share_is_as_asked(num_rows: int, fraction: float, num_kept: int) -> None:
    assert held_out_rows(num_rows, fraction, seed=0).sum() == num_kept


def test_the_parts_hold_every_row_once_and_in_order(tmp_path: Path) -> None:
    raw = load(csv_file(tmp_path / "d.csv", 40), eval_fraction=0.3)
    train, kept = lines(raw.train), lines(raw.eval)
    assert (len(train), len(kept)) == (28, 12)
    assert (sorted(train), sorted(kept)) == (train, kept)
    assert sorted(train + kept) == list(range(2, 42))
    assert raw.notes == ("12 of 40 rows, drawn by seed 42, are kept for evaluation and not trained on.",)


def test_the_rows_depend_on_the_seed_and_not_on_the_form_of_the_file(tmp_path: Path) -> None:
    path = csv_file(tmp_path / "d.csv", 40)
    as_json = tmp_path / "d.jsonl"
    as_json.write_text(
        "".join(json.dumps({"sentence": row, "label": 0}) + "\n" for row in path.read_text().split("\n")[1:41])
    )
    torch.manual_seed(5)
    assert lines(load(path, eval_fraction=0.3).eval) == lines(load(path, eval_fraction=0.3).eval)
    assert [line - 1 for line in lines(load(path, eval_fraction=0.3).eval)] == lines(
        load(as_json, eval_fraction=0.3).eval
    )
    assert lines(load(path, eval_fraction=0.3).eval) != lines(load(path, eval_fraction=0.3, seed=1).eval)


def test_a_limit_comes_first(tmp_path: Path) -> None:
    raw = load(csv_file(tmp_path / "d.csv", 40), eval_fraction=0.25, limit_rows=8)
    assert sorted(lines(raw.train) + lines(raw.eval)) == list(range(2, 10))
    assert len(raw.train) == 6


def test_labels_are_learnt_from_all_rows(tmp_path: Path) -> None:
    path = tmp_path / "d.csv"
    path.write_text("text,label\n" + "".join(f"row {index},class {index}\n" for index in range(10)))
    assert chosen(path, eval_fraction=0.5)[1].num_labels == 10


@pytest.mark.parametrize("fraction", ["0", "1", "1.5", "-0.1", "nan", "some"])
def test_a_share_that_is_none_is_refused(fraction: str) -> None:
    with pytest.raises(UsageError, match="--eval-fraction"):
        build_spec({"data": {"eval_fraction": fraction}})


def test_evaluation_rows_come_from_one_place(tmp_path: Path) -> None:
    path = csv_file(tmp_path / "d.csv")
    with pytest.raises(UsageError, match=r"--eval-fraction .*--eval-data is given as well"):
        build_spec({"data": {"train": str(path), "eval": str(path), "eval_fraction": 0.1}})
    with pytest.raises(DataError, match=r"--eval-fraction: 'built-in' has a validation split"):
        load_tables(DataSpec(eval_fraction=0.1), seed=42)


def test_a_single_row_cannot_be_shared(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="has 1 row, of which none can be kept"):
        load(csv_file(tmp_path / "d.csv", 1), eval_fraction=0.5)


def test_all_engines_evaluate_the_same_rows_and_train_on_the_others(tmp_path: Path) -> None:
    model, data = model_folder(tmp_path / "m", TINY_DISTILBERT), csv_file(tmp_path / "d.csv", 16)
    records = [
        effcli(
            "train", model, "--data", data, "--eval-fraction", 0.25, "--epochs", 1, "--batch-size", 4, "--engine",
            engine, "--out", tmp_path / engine, "--json",
        ).record
        for engine in ENGINES
    ]  # fmt: skip
    for record in records:
        assert (record["data"]["train_rows"], record["data"]["eval_rows"], record["total_updates"]) == (12, 4, 3)
        assert record["spec"]["data"]["eval_fraction"] == 0.25
        assert "4 of 16 rows, drawn by seed 42, are kept for evaluation and not trained on." in record["notes"]
        assert record["eval"][0]["eval_loss"] == pytest.approx(records[0]["eval"][0]["eval_loss"], rel=1e-5)


@pytest.mark.parametrize("engine", ENGINES)
def test_without_validation_data_evaluation_is_skipped_and_never_done_on_the_training_rows(
    engine: str, tmp_path: Path
) -> None:
    model, data = model_folder(tmp_path / "m", TINY_DISTILBERT), csv_file(tmp_path / "d.csv")
    done = effcli(
        "train", model, "--data", data, "--max-steps", 1, "--engine", engine, "--out", tmp_path / "o", "--json"
    )
    assert (done.record["data"]["eval_rows"], done.record["eval"]) == (0, [])
    assert "Evaluation is skipped: there is no validation data" in done.stderr


def test_a_resumed_run_keeps_the_same_rows(tmp_path: Path) -> None:
    def flags(out: str) -> dict[str, Any]:
        made = settings(tmp_path, out, {"name": "adamw"})
        return {**made, "data": {"train": made["data"]["train"], "eval_fraction": 0.2}}

    whole = pipeline.train(pipeline.resolve_spec(flags("whole")), progress=QuietProgress())
    train_and_stop(flags("parts"), after=3)
    parts = str(tmp_path / "parts")
    changed = pipeline.resolve_spec({"data": {"eval_fraction": 0.4}}, resume_from=parts)
    with pytest.raises(UsageError, match="--eval-fraction"):
        pipeline.train(changed, progress=QuietProgress(), resume=True)
    rest = pipeline.train(pipeline.resolve_spec({}, resume_from=parts), progress=QuietProgress(), resume=True)
    assert rest.data.eval_rows == 4
    assert (untimed(rest.history), rest.eval) == (untimed(whole.history), whole.eval)
    assert same_weights(saved_weights(tmp_path / "whole"), saved_weights(tmp_path / "parts"))
