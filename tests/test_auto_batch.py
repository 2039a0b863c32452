"""`--auto-batch` takes a smaller micro-batch until it fits; the run is the one that was started with that size."""

from __future__ import annotations

import gc
import json
import os
import signal
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DistilBertForSequenceClassification

from effcli.data.fingerprint import fingerprint
from effcli.measure.out_of_memory_record import BatchSizes
from effcli.pipeline import prepare
from effcli.pipeline.running.auto_batch import smaller
from tests.commands import csv_file, effcli, same_weights, saved_weights, untimed
from tests.full_memory import CUDA_ALLOCATOR, cuda_error, no_memory_above, no_memory_in
from tests.jobs import ONE_FAST_ENGINE

pytestmark = pytest.mark.usefixtures("without_plan")


@pytest.fixture
def run(distilbert: Path, tmp_path: Path) -> tuple[object, ...]:
    """Return a run of 20 rows in two epochs: windows of 8 rows, the last one of 4."""
    return ("train", distilbert, "--data", csv_file(tmp_path / "d.csv", 20), "--epochs", 2, "--json")


def sizes(micro: int, accum: int, eval_batch: int | None = None) -> BatchSizes:
    return BatchSizes(micro=micro, accum=accum, eval_batch=micro if eval_batch is None else eval_batch)


@pytest.mark.parametrize("engine", ONE_FAST_ENGINE)
def test_a_run_that_fits_only_in_halves_is_the_run_that_was_started_so_bit_for_bit(
    engine: str, run: tuple[object, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    common = (*run, "--engine", engine, "--longest-first")
    asked = effcli(*common, "--batch-size", 2, "--accum", 4, "--out", tmp_path / "asked").record
    models: list[weakref.ref[torch.nn.Module]] = []
    first_weights: list[torch.Tensor] = []
    given = no_memory_above(monkeypatch, 2)
    load = DistilBertForSequenceClassification.to

    def to(model: Any, *args: Any) -> Any:
        if not models or models[-1]() is not model:
            gc.collect()
            assert [before for before in models if before() is not None] == []
            models.append(weakref.ref(model))
            first_weights.append(model.classifier.weight.detach().clone())
        return load(model, *args)

    monkeypatch.setattr(DistilBertForSequenceClassification, "to", to)
    found = effcli(*common, "--batch-size", 8, "--accum", 1, "--auto-batch", "--out", tmp_path / "found")
    record = found.record
    assert given[:4] == [8, 4, 2, 2]
    assert len(models) == 3
    assert all(torch.equal(weights, first_weights[0]) for weights in first_weights)
    assert record["batch"] == {"micro": 2, "accum": 4, "world_size": 1, "effective": 8}
    assert (record["spec"]["loop"]["batch_size"], record["spec"]["loop"]["accum"]) == (2, 4)
    assert record["total_updates"] == asked["total_updates"] == 6
    assert untimed(record["history"]) == untimed(asked["history"])
    assert same_weights(saved_weights(tmp_path / "found"), saved_weights(tmp_path / "asked"))
    tried = [(facts["sizes"]["micro"], facts["next_sizes"]["micro"]) for facts in record["out_of_memory"]]
    assert tried == [(8, 4), (4, 2)]
    assert "beginning again from the start weights with --batch-size 2 --accum 4, the same 8 rows" in found.stderr
    assert "batch_size: 2" in (tmp_path / "found" / "recipe.yaml").read_text()


def test_memory_that_runs_out_later_costs_no_more_than_what_the_newest_checkpoint_lacks(
    run: tuple[object, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    common = (*run, "--batch-size", 8, "--save-every", 1)
    whole = effcli(*common, "--out", tmp_path / "whole").record
    given: list[int] = []
    forward = DistilBertForSequenceClassification.forward

    def fails_in_the_third(model: Any, input_ids: torch.Tensor, **kwargs: Any) -> Any:
        if type(input_ids) is torch.Tensor:
            given.append(len(input_ids))
            if len(given) == 3:
                raise cuda_error()
        return forward(model, input_ids, **kwargs)

    monkeypatch.setattr(DistilBertForSequenceClassification, "forward", fails_in_the_third)
    read: list[object] = []
    monkeypatch.setattr(prepare, "fingerprint", lambda rows: read.append(rows) or fingerprint(rows))
    found = effcli(*common, "--auto-batch", "--out", tmp_path / "found")
    assert "Resumed after update 2 of 6." in found.stderr
    assert "beginning again from the newest checkpoint with --batch-size 4 --accum 2" in found.stderr
    assert given == [8, 8, 4, *[4] * 6]
    for mine, expected in zip(found.record["history"], whole["history"], strict=True):
        assert mine["loss"] == pytest.approx(expected["loss"], rel=1e-6)
        assert mine["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-5)
    assert found.record["out_of_memory"][0]["update"] == 3
    assert len(read) == 1


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_in_the_update_that_runs_out_of_memory_stops_the_run(
    number: int, code: int, run: tuple[object, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped_and_full() -> Exception:
        os.kill(os.getpid(), number)
        return cuda_error()

    given = no_memory_above(monkeypatch, 2, stopped_and_full)
    failed = effcli(*run, "--batch-size", 8, "--auto-batch", "--out", tmp_path / "run")
    assert failed.code == code
    assert "stopped at once after update 0 of 6; no state was saved before" in failed.error
    assert given == [8]
    record = json.loads((tmp_path / "run" / "record.json").read_text())
    assert (record["status"], len(record["out_of_memory"])) == ("interrupted", 1)


def test_a_row_that_does_not_fit_alone_is_one_clear_error_with_the_allocators_words(
    run: tuple[object, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = no_memory_above(monkeypatch, 0)
    failed = effcli(*run, "--batch-size", 6, "--auto-batch", "--out", tmp_path / "run")
    assert failed.code == 5
    assert given == [6, 3, 2, 1]
    assert "with 1 row of" in failed.error
    assert CUDA_ALLOCATOR in failed.error
    assert "Planned there" in failed.error


def test_an_evaluation_that_does_not_fit_is_made_in_smaller_batches_and_changes_no_result(
    run: tuple[object, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    common = (*run, "--eval-data", tmp_path / "d.csv", "--eval-batch-size", 16)
    asked = effcli(*common, "--out", tmp_path / "asked").record
    no_memory_in(monkeypatch, "evaluation", above=8)
    found = effcli(*common, "--auto-batch", "--out", tmp_path / "found").record
    loop = found["spec"]["loop"]
    assert (loop["batch_size"], loop["accum"], loop["eval_batch_size"]) == (8, 1, 8)
    assert [line["eval_loss"] for line in found["eval"]] == pytest.approx([line["eval_loss"] for line in asked["eval"]])
    assert same_weights(saved_weights(tmp_path / "found"), saved_weights(tmp_path / "asked"))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (sizes(8, 1), sizes(4, 2)),
        (sizes(6, 1), sizes(3, 2)),
        (sizes(3, 2), sizes(2, 3)),
        (sizes(7, 1), sizes(1, 7)),
        (sizes(9, 1), sizes(3, 3)),
        (sizes(1, 9), None),
        (sizes(64, 1), sizes(8, 8)),  # there are 16 rows
        (sizes(8, 1, 2), sizes(4, 2, 2)),
        (sizes(8, 1, 32), sizes(4, 2, 4)),
    ],
)
def test_the_next_micro_batch_divides_the_rows_of_an_update(before: BatchSizes, after: BatchSizes | None) -> None:
    assert smaller(before, doing="backward", train_rows=16, eval_rows=16) == after
    if after is not None:
        assert after.micro * after.accum == before.micro * before.accum
