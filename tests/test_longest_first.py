"""`--longest-first`: the longest rows make the first update, so that a run that cannot fit fails at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import DistilBertForSequenceClassification

from effcli.data.batches import EpochBatchSampler
from effcli.data.order import longest_rows
from tests.commands import csv_file, effcli
from tests.full_memory import cuda_error
from tests.jobs import ENGINES, ONE_FAST_ENGINE
from tests.stopped_runs import check_that_a_stop_changes_nothing

pytestmark = pytest.mark.usefixtures("without_plan")

FORWARD = DistilBertForSequenceClassification.forward


def order(sampler: EpochBatchSampler, epoch: int) -> list[int]:
    sampler.set_epoch(epoch)
    return [row for batch in sampler for row in batch]


def test_only_the_first_epoch_begins_with_them_and_every_row_comes_once() -> None:
    usual = EpochBatchSampler(11, 2, 42)
    sampler = EpochBatchSampler(11, 2, 42, torch.tensor([7, 3, 10]))
    first = order(sampler, 0)
    assert first[:3] == [7, 3, 10]
    assert first[3:] == [row for row in order(usual, 0) if row not in (7, 3, 10)]
    assert order(sampler, 1) == order(usual, 1)
    sampler.set_epoch(0)
    sampler.skip_next(4)
    assert [row for batch in sampler for row in batch] == first[4:]


def test_the_longest_come_first_and_of_equals_the_earlier() -> None:
    lengths = [3, 5, 2, 5, 4]
    rows = Dataset.from_dict({"input_ids": [[1] * length for length in lengths], "labels": [0, 1, 0, 1, 0]})
    assert longest_rows(rows, 3).tolist() == [1, 3, 4]
    assert longest_rows(rows, 9).tolist() == [1, 3, 4, 0, 2]


def test_the_tokens_of_a_target_count() -> None:
    rows = Dataset.from_dict({"input_ids": [[1] * 4, [1] * 3, [1] * 2], "labels": [[1], [1] * 4, [1]]})
    assert longest_rows(rows, 2).tolist() == [1, 0]


def lengths_given(monkeypatch: pytest.MonkeyPatch, *, limit: int = 99) -> list[list[int]]:
    """Return the lengths of the rows of each micro-batch, as the model is given them; too many tokens do not fit."""
    given: list[list[int]] = []

    def forward(model: Any, input_ids: torch.Tensor, attention_mask: torch.Tensor, **kwargs: Any) -> Any:
        if type(input_ids) is torch.Tensor:
            given.append(attention_mask.sum(1).tolist())
            if input_ids.shape[1] > limit:
                raise cuda_error()
        return FORWARD(model, input_ids=input_ids, attention_mask=attention_mask, **kwargs)

    monkeypatch.setattr(DistilBertForSequenceClassification, "forward", forward)
    return given


def test_every_engine_is_given_the_same_rows_and_the_longest_in_its_first_update(
    distilbert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = csv_file(tmp_path / "d.csv", 20)
    common = ("train", distilbert, "--data", data, "--batch-size", 2, "--accum", 3, "--longest-first", "--json")
    seen, losses = [], []
    for engine in ENGINES:
        with monkeypatch.context() as patched:
            given = lengths_given(patched)
            done = effcli(*common, "--epochs", 2, "--engine", engine, "--out", tmp_path / engine)
        assert "The first update takes the 6 longest rows, up to 10 tokens." in done.stderr
        seen.append(given)
        losses.append([line["loss"] for line in done.record["history"]])
    assert seen[0] == seen[1] == seen[2]
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
    assert losses[2] == pytest.approx(losses[0], rel=1e-6)
    first, second = seen[0][:10], seen[0][10:]
    rows = sorted((length for batch in first for length in batch), reverse=True)
    assert [length for batch in first[:3] for length in batch] == rows[:6]
    assert sorted((length for batch in second for length in batch), reverse=True) == rows
    assert [length for batch in second[:3] for length in batch] != rows[:6]


@pytest.mark.parametrize("engine", ONE_FAST_ENGINE)
def test_a_stopped_run_goes_on_in_the_same_order(engine: str, tmp_path: Path) -> None:
    check_that_a_stop_changes_nothing(tmp_path, {"name": "adamw"}, engine=engine, longest_first=True)


@pytest.mark.parametrize(("flags", "update"), [(("--longest-first",), 1), ((), 4)])
def test_what_cannot_fit_fails_at_the_first_update(
    flags: tuple[str, ...], update: int, distilbert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = tmp_path / "d.csv"
    long = 11  # in the usual order, this row is in the fourth batch
    data.write_text(
        "text,label\n" + "".join(f"{'word ' * (40 if row == long else 4)},{row % 2}\n" for row in range(20))
    )
    lengths_given(monkeypatch, limit=20)
    failed = effcli(
        "train", distilbert, "--data", data, "--batch-size", 2, "--epochs", 1, *flags, "--out", tmp_path / "run"
    )
    assert failed.code == 5
    assert f"in the forward pass of update {update} with 2 rows of 42 tokens" in failed.error
