"""Updates, epochs and learning rates of a run, counted with its short last window."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.commands import csv_file, effcli
from tests.jobs import ENGINES

pytestmark = pytest.mark.usefixtures("without_plan")


@pytest.mark.parametrize(
    ("rows", "batch", "accum", "epochs", "total"),
    [(9, 2, 2, 3, 9), (101, 2, 2, 3, 78), (10, 4, 4, 1, 1), (91, 10, 4, 10, 30)],
)  # fmt: skip
def test_updates_are_counted_with_the_short_last_window(
    rows: int, batch: int, accum: int, epochs: int, total: int, distilbert: Path, tmp_path: Path
) -> None:
    record = effcli(
        "train", distilbert, "--data", csv_file(tmp_path / "d.csv", rows), "--batch-size", batch, "--accum", accum,
        "--epochs", epochs, "--dry-run", "--json",
    ).record  # fmt: skip
    assert record["total_updates"] == total
    assert record["status"] == "planned"
    assert record["measured"] is None


@pytest.mark.parametrize("engine", ENGINES)
def test_a_run_ends_with_its_last_epoch_and_says_so(engine: str, distilbert: Path, tmp_path: Path) -> None:
    # 9 rows are 5 batches and so 3 updates an epoch: rounding down would end after 6 updates, in epoch 2.
    done = effcli(
        "train", distilbert, "--data", csv_file(tmp_path / "d.csv", 20), "--limit-rows", 9, "--batch-size", 2,
        "--accum", 2, "--epochs", 3, "--engine", engine, "--lr", 1, "--warmup-ratio", 0.1, "--optim", "sgd",
        "--logging-steps", 1, "--out", tmp_path / "o", "--json",
    )  # fmt: skip
    history = done.record["history"]
    assert [line["update"] for line in history] == list(range(1, 10))
    assert [line["epoch"] for line in history] == pytest.approx([update / 3 for update in range(1, 10)])
    # A tenth of 9 updates, rounded up, is 1 update of warm-up from rate 0; the other 8 go down to 1/8.
    assert [line["lr"] for line in history] == pytest.approx([0.0] + [step / 8 for step in range(8, 0, -1)])
    assert sum(line.startswith("update ") for line in done.stderr.splitlines()) == 9
    assert "update 9/9  epoch 3.00" in done.stderr
