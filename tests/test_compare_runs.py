"""Comparisons of real runs: neither order nor what ran before changes a number, and a stopped one goes on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from effcli.catalogue import lookup
from tests.commands import TINY_DISTILBERT, csv_file, effcli, model_folder, same_weights, saved_weights, untimed
from tests.fake_runs import attempts, saved


def flags(folder: Path) -> tuple[object, ...]:
    """Return the flags of a tiny classifier with dropout on twelve sentences."""
    model, data = model_folder(folder / "encoder", TINY_DISTILBERT, dropout=0.1), csv_file(folder / "d.csv")
    return ("--model", model, "--data", data, "--eval-data", data, "--device", "cpu")


def check_same_run(one: dict[str, Any], other: dict[str, Any]) -> None:
    """Check that two runs are the same but for time: state to the byte, losses in every bit, peaks within 1 %."""
    assert one["measured"]["optimizer_state_bytes"] == other["measured"]["optimizer_state_bytes"]
    assert one["measured"]["tensors"] == other["measured"]["tensors"]
    assert untimed(one["history"]) == untimed(other["history"])
    assert one["eval"] == other["eval"]
    assert one["measured"]["peak_allocated_bytes"] == pytest.approx(other["measured"]["peak_allocated_bytes"], rel=0.01)
    assert one["measured"]["peak_rss_bytes"] == pytest.approx(other["measured"]["peak_rss_bytes"], rel=0.05)


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a comparison of adamw with itself."""
    folder = tmp_path_factory.mktemp("compared")
    done = effcli("compare", "adamw", "adamw", *flags(folder), "--max-steps", 3, "--out", folder / "c")
    assert done.code == 0, done.stderr
    return folder / "c"


def test_the_same_optimizer_twice_gives_the_same_numbers_whatever_ran_before(compared: Path) -> None:
    document = saved(compared)
    assert attempts(document) == [("adamw", "completed", 0), ("adamw (2)", "completed", 0)]
    check_same_run(*document["runs"])
    assert same_weights(saved_weights(compared / "adamw"), saved_weights(compared / "adamw-2"))
    once, again = document["summary"]
    for amount in ("predicted_state_bytes", "measured_state_bytes", "peak_allocated_bytes", "final_loss", "eval_loss"):
        assert once[amount] == again[amount] is not None
        assert again["ratios"][amount] == 1.0


def test_predicted_and_measured_amounts_of_a_comparison_agree(compared: Path) -> None:
    line = saved(compared)["summary"][0]
    assert line["predicted_state_bytes"] == line["measured_state_bytes"]
    assert line["predicted_peak_allocated_bytes"] == pytest.approx(line["peak_allocated_bytes"], rel=0.01)
    assert line["seconds_per_update"] > 0


@pytest.mark.slow
def test_a_run_that_fails_leaves_its_record_and_the_rows_of_the_others(tmp_path: Path) -> None:
    out = tmp_path / "c"
    done = effcli("compare", "adamw", "sgd,lr=1e38", "adafactor", *flags(tmp_path), "--max-steps", 3, "--out", out)
    assert done.code == 7
    document = saved(out)
    assert [status for _, status, _ in attempts(document)] == ["completed", "failed", "completed"]
    assert [run["status"] for run in document["runs"]] == ["completed", "failed", "completed"]
    assert "update 2: the loss is nan" in document["summary"][1]["failure"]
    assert len({run["history"][0]["loss"] for run in document["runs"]}) == 1
    assert not any("losses of the first update differ" in note for note in document["notes"])


@pytest.mark.slow
def test_both_orders_give_the_same_numbers(tmp_path: Path) -> None:
    names = ("adamw", "adafactor", "adam8bit")
    for out, order in (("there", names), ("back", names[::-1])):
        assert effcli("compare", *order, *flags(tmp_path), "--max-steps", 3, "--out", tmp_path / out).code == 0
    there, back = saved(tmp_path / "there")["runs"], saved(tmp_path / "back")["runs"]
    for one, other in zip(there, reversed(back), strict=True):
        check_same_run(one, other)
    for name in names:
        assert same_weights(saved_weights(tmp_path / "there" / name), saved_weights(tmp_path / "back" / name))


@pytest.mark.slow
def test_a_comparison_that_a_signal_stops_goes_on_to_the_numbers_of_one_that_was_left_alone(tmp_path: Path) -> None:
    # Evaluation and checkpoints of each of its epochs, which are two updates, would take minutes.
    learning, unsaved = flags(tmp_path)[:4], ("--device", "cpu", "--save-every", 400)
    given = [str(flag) for flag in (*learning, *unsaved, "--max-steps", 400)]
    assert effcli("compare", "adamw", *given, "--out", tmp_path / "whole").code == 0
    log, out = tmp_path / "log", tmp_path / "parts"
    command = [sys.executable, "-m", "effcli", "compare", "adamw", "sgd", *given, "--out", str(out)]
    with log.open("wb") as said, subprocess.Popen(
        [*command, "--logging-steps", "1"], stdout=said, stderr=said, env={**os.environ, "OMP_NUM_THREADS": "1"}
    ) as process:  # fmt: skip
        deadline = time.monotonic() + 120
        while "update 2/" not in log.read_text():
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.001)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 130, log.read_text()
    assert [status for _, status, _ in attempts(saved(out))] == ["interrupted", "missing"]
    assert 1 < len(saved(out)["runs"][0]["history"]) < 400
    document = effcli("compare", "--resume", "--out", out, "--json").record
    assert attempts(document) == [("adamw", "completed", 0), ("sgd", "completed", 0)]
    (whole,) = saved(tmp_path / "whole")["runs"]
    assert untimed(document["runs"][0]["history"]) == untimed(whole["history"])
    assert same_weights(saved_weights(out / "adamw"), saved_weights(tmp_path / "whole" / "adamw"))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_8_bit_adam_keeps_about_a_quarter_of_the_state_of_adamw(tmp_path: Path) -> None:
    (model,) = lookup.matching("distilbert-base-cased")
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text(json.dumps(dict(model.config)))
    done = effcli("compare", "--model", tmp_path / "m", "--max-steps", 3, "--out", tmp_path / "c", "--json")
    adamw, adafactor, adam8bit = done.record["summary"]
    assert adamw["measured_state_bytes"] == 526_264_752
    assert adafactor["measured_state_bytes"] == 714_432
    assert adam8bit["measured_state_bytes"] == 134_004_336
    assert adam8bit["ratios"]["measured_state_bytes"] <= 0.27
    for line in done.record["summary"]:
        assert line["predicted_state_bytes"] == line["measured_state_bytes"]
        assert line["predicted_peak_allocated_bytes"] == pytest.approx(line["peak_allocated_bytes"], rel=0.01)
