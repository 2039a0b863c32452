"""`--tolerance`: what a run measured against what was predicted, by an exit code that scripts can read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from effcli.errors import PredictionError, UsageError
from effcli.measure.comparison_record import Attempt, ComparisonRecord, compared
from effcli.measure.device_record import AllocatorFacts, PhasePeak
from effcli.measure.record import ProfiledUpdate, RunRecord
from effcli.memory.plan import MemoryPlan
from effcli.pipeline import check_prediction, check_predictions
from effcli.spec import build_spec
from tests import records
from tests.commands import csv_file, effcli
from tests.fake_runs import fake_runs

WEIGHTS, STATE = 263_132_168, 526_264_752
NO_PEAK = "Not compared: peak allocated (on a CPU --profile-memory measures it)."


def run(**changes: Any) -> RunRecord:
    """Return a run on a CPU that measured what was predicted, but for the changes."""
    record = records.planned()
    return records.completed(record, measured=records.measured(record, **changes))


def on_cuda(*, peaks: dict[str, tuple[int, int]], whole: tuple[int, int], planned: tuple[int, int]) -> RunRecord:
    """Return a run on CUDA: allocated and reserved bytes of parts of it, of the whole run, and as planned."""
    plan = MemoryPlan(phases={}, basis={}, peak_allocated_bytes=planned[0], peak_reserved_bytes=planned[1])
    optimizer = records.planned().optimizer.model_copy(update={"plan": plan})
    record = records.planned(environment={"device": "cuda:0"}, optimizer=optimizer)
    phases = {part: PhasePeak(peak_allocated_bytes=a, peak_reserved_bytes=r) for part, (a, r) in peaks.items()}
    allocator = AllocatorFacts(peak_allocated_bytes=whole[0], peak_reserved_bytes=whole[1], phases=phases)
    measured = records.measured(record, allocator=allocator, peak_allocated_bytes=whole[0])
    return records.completed(record, measured=measured)


def refusal(record: RunRecord, tolerance: float) -> str:
    with pytest.raises(PredictionError) as error:
        check_prediction(record, tolerance)
    assert error.value.exit_code == 6
    return str(error.value)


def test_what_is_within_the_tolerance_is_named_with_what_could_not_be_compared() -> None:
    said = check_prediction(run(), 5)
    assert said == f"Within 5 % of the prediction: optimizer state, weights and gradients. {NO_PEAK}"
    assert check_prediction(run(weights_bytes=None, gradients_bytes=None), 0) == (
        "As predicted, to the byte: optimizer state. "
        "Not compared: weights, gradients, peak allocated (on a CPU --profile-memory measures it)."
    )


def test_the_bound_itself_is_allowed_and_a_byte_more_is_not_in_either_direction() -> None:
    for sign in (1, -1):
        at_the_bound = run(weights_bytes=WEIGHTS + sign * WEIGHTS // 8)
        assert "weights" in check_prediction(at_the_bound, 12.5)
        assert "weights: predicted 250.94 MiB" in refusal(run(weights_bytes=WEIGHTS + sign * (WEIGHTS // 8 + 1)), 12.5)


def test_the_worst_is_named_in_one_line_and_the_others_after_it() -> None:
    record = run(optimizer_state_bytes=STATE // 2, weights_bytes=WEIGHTS * 11 // 10, gradients_bytes=WEIGHTS - 1)
    assert refusal(record, 5) == (
        "optimizer state: predicted 501.89 MiB, measured 250.94 MiB, 50.0 % off; allowed 5 %; also off: weights"
    )


def test_amounts_that_read_the_same_are_shown_in_bytes_and_a_share_with_the_decimals_it_needs() -> None:
    assert refusal(run(optimizer_state_bytes=STATE + 1), 0) == (
        "optimizer state: predicted 526,264,752 B, measured 526,264,753 B, 0.0000002 % off; allowed 0 %"
    )
    assert "5.0002 % off; allowed 5 %" in refusal(run(weights_bytes=round(WEIGHTS * 1.050002)), 5)


def test_something_where_nothing_was_predicted_is_always_off() -> None:
    optimizer = records.optimizer("sgd", {}, state_bytes=0, state_elements=0)
    record = records.planned(optimizer=optimizer)
    measured = records.measured(record)
    assert "optimizer state" in check_prediction(records.completed(record, measured=measured), 0)
    other = measured.model_copy(update={"optimizer_state_bytes": 40})
    said = refusal(records.completed(record, measured=other), 10_000)
    assert said == "optimizer state: predicted 0 B, measured 40 B; allowed 10000 %"


def test_on_a_cpu_the_peak_is_that_of_the_profiled_update() -> None:
    plan = MemoryPlan(phases={}, basis={}, peak_allocated_bytes=900)
    optimizer = records.planned().optimizer.model_copy(update={"plan": plan})
    record = records.planned(optimizer=optimizer)

    def profiled(planned: int | None) -> RunRecord:
        update = ProfiledUpdate(
            update=2, rows=4, tokens=9, peak_allocated_bytes=500, planned_peak_allocated_bytes=planned
        )
        return records.completed(record, measured=records.measured(record, peak_allocated_bytes=500, profiled=update))

    assert check_prediction(profiled(500), 0).endswith("weights, gradients and peak allocated.")
    assert "peak allocated: predicted 400 B, measured 500 B, 25.0 % off" in refusal(profiled(400), 5)
    assert check_prediction(profiled(None), 0).endswith("Not compared: peak allocated.")


def test_what_was_asked_for_in_vain_is_not_advised_again() -> None:
    record = run()
    asked = record.model_copy(update={"spec": {"loop": {**record.spec["loop"], "profile_memory": True}}})
    assert check_prediction(record, 1).endswith(NO_PEAK)
    assert check_prediction(asked, 1).endswith("Not compared: peak allocated.")


@pytest.mark.parametrize("tolerance", [33.3333333333333, 0.1234567])
def test_the_tolerance_is_said_as_it_was_given(tolerance: float) -> None:
    assert check_prediction(run(), tolerance).startswith(f"Within {tolerance} % of the prediction")
    assert refusal(run(weights_bytes=2 * WEIGHTS), tolerance).endswith(f"allowed {tolerance} %")


def test_on_cuda_the_peak_and_what_is_reserved_are_those_of_updates_not_of_an_evaluation() -> None:
    peaks = {"loading": (700, 700), "forward": (1000, 2000), "backward": (1040, 2000), "step": (900, 2000)}
    evaluated = on_cuda(peaks={**peaks, "evaluation": (5000, 6000)}, whole=(5000, 6000), planned=(1000, 2000))
    said = check_prediction(evaluated, 4)
    assert said == (
        "Within 4 % of the prediction: optimizer state, weights, gradients, peak allocated and peak reserved."
    )
    assert "peak allocated: predicted 1,000 B, measured 1.02 KiB, 4.0 % off; allowed 3.9 %" in refusal(evaluated, 3.9)
    reserved = on_cuda(peaks=peaks, whole=(1040, 2000), planned=(1040, 1000))
    assert "peak reserved: predicted 1,000 B, measured 1.95 KiB, 100.0 % off" in refusal(reserved, 4)
    only_evaluated = on_cuda(peaks={"evaluation": (5000, 6000)}, whole=(5000, 6000), planned=(1000, 2000))
    assert check_prediction(only_evaluated, 0).endswith("Not compared: peak allocated, peak reserved.")
    not_told_apart = on_cuda(peaks={}, whole=(1040, 2000), planned=(1000, 2000))
    assert "peak allocated: predicted 1,000 B" in refusal(not_told_apart, 3)


def test_a_run_that_was_only_planned_has_nothing_to_compare() -> None:
    assert check_prediction(records.planned(), 0) == "--tolerance: nothing is compared, for want of measurements."


def comparison(*runs: RunRecord, seeds: tuple[int, ...] = (42, 42)) -> ComparisonRecord:
    names = ("adamw", "adam8bit") if len(set(seeds)) == 1 else ("adamw", "adamw")
    attempts = [
        Attempt(name=name, seed=seed, status="completed", run=place)
        for place, (name, seed, _) in enumerate(zip(names, seeds, runs, strict=False))
    ]
    return compared(attempts, runs, status="completed")


def test_of_a_comparison_the_worst_run_is_named_and_what_every_run_measured() -> None:
    assert check_predictions(comparison(run(), run(gradients_bytes=None)), 1) == (
        "Within 1 % of the prediction: optimizer state and weights. "
        "Not compared: peak allocated (on a CPU --profile-memory measures it), gradients."
    )
    profiled = ProfiledUpdate(update=2, rows=4, tokens=9, peak_allocated_bytes=500, planned_peak_allocated_bytes=500)
    peak = run(peak_allocated_bytes=500, profiled=profiled)
    assert check_predictions(comparison(peak, peak), 1).endswith("gradients and peak allocated.")
    for runs in ((run(), peak), (peak, run())):  # one that lacks it leaves it out
        assert check_predictions(comparison(*runs), 1).endswith(f"weights and gradients. {NO_PEAK}")
    half = run(optimizer_state_bytes=STATE // 2)
    with pytest.raises(PredictionError, match=r"^adam8bit: optimizer state: .* 50\.0 % off; allowed 1 %$"):
        check_predictions(comparison(run(), half), 1)
    with pytest.raises(
        PredictionError, match=r"^adamw, seed 43: optimizer state: .*; also off: adamw, seed 42: weights"
    ):
        check_predictions(comparison(run(weights_bytes=WEIGHTS + WEIGHTS // 4), half, seeds=(42, 43)), 1)


@pytest.mark.parametrize(
    ("written", "read"), [("5", 5.0), ("5%", 5.0), (" 0.5 % ", 0.5), (7, 7.0), (0, 0.0), ("-0", 0.0), (None, None)]
)
def test_a_percentage_is_read_with_and_without_its_sign(written: object, read: float | None) -> None:
    tolerance = build_spec({"output": {"tolerance": written}}).output.tolerance
    assert tolerance == read
    assert not str(tolerance).startswith("-")


@pytest.mark.parametrize(
    "written", ["nan", "inf", "-1", "-5%", "", "%", "5%%", "five", "1e400", True, float("nan"), [5]]
)
def test_anything_else_is_refused_by_its_flag_and_key(written: object) -> None:
    with pytest.raises(UsageError, match=r"^--tolerance \(output\.tolerance\): .* percentage of 0 or more; give one"):
        build_spec({"output": {"tolerance": written}})


def test_a_wrong_one_ends_a_command_before_anything_is_read() -> None:
    for command in ("train", "compare"):
        done = effcli(command, "--model", "no/such", "--tolerance", "-1")
        assert done.code == 2
        assert "-1 is no percentage" in done.error


@pytest.fixture
def flags(distilbert: Path, tmp_path: Path) -> tuple[object, ...]:
    return ("--model", distilbert, "--data", csv_file(tmp_path / "d.csv", 16), "--max-steps", 2)


def test_a_run_within_its_tolerance_says_so_and_one_beyond_it_has_its_report_and_files_too(
    flags: tuple[object, ...], tmp_path: Path
) -> None:
    command = ("train", *flags, "--profile-memory", "--out", tmp_path / "run")
    good = effcli(*command, "--tolerance", "5%")
    assert good.code == 0
    assert good.stderr.splitlines()[-1] == (
        "Within 5 % of the prediction: optimizer state, weights, gradients and peak allocated."
    )
    # the last fixed bytes of a peak are the numbers that a loop holds on to: a prediction to the byte would be luck
    bad = effcli(*command, "--overwrite", "--tolerance", "0", "--json")
    assert bad.code == 6
    assert bad.error.startswith("peak allocated: predicted ")
    assert bad.error.endswith("% off; allowed 0 %")
    document = json.loads(bad.stdout)
    assert document["status"] == "completed"
    assert document == json.loads((tmp_path / "run" / "record.json").read_text())
    assert (tmp_path / "run" / "model").is_dir()
    quiet = effcli(*command, "--overwrite", "--tolerance", "0", "--quiet")
    assert quiet.code == 6
    assert len(quiet.stderr.splitlines()) == 1
    assert "optimizer state" in quiet.stdout


@pytest.mark.usefixtures("without_plan")
def test_it_may_stand_in_a_recipe_and_change_when_a_run_is_resumed(flags: tuple[object, ...], tmp_path: Path) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text("output:\n  tolerance: 2%\n")
    first = effcli("train", *flags, "--recipe", recipe, "--out", tmp_path / "run", "--json")
    assert first.record["spec"]["output"]["tolerance"] == 2.0
    assert f"Within 2 % of the prediction: optimizer state, weights and gradients. {NO_PEAK}" in first.stderr
    again = effcli("train", "--resume", "--out", tmp_path / "run", "--max-steps", 4, "--set", "output.tolerance=3")
    assert again.code == 0
    assert "Within 3 % of the prediction" in again.stderr
    planned = effcli("train", *flags, "--out", tmp_path / "p", "--tolerance", 1, "--dry-run")
    assert planned.code == 0
    assert "--tolerance: nothing is compared, for want of measurements." in planned.stderr


def test_a_comparison_ends_with_it_only_where_nothing_worse_happened(
    flags: tuple[object, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_runs(monkeypatch)
    command = ("compare", "adamw", "adam8bit", *flags)
    first = effcli(*command, "--out", tmp_path / "c", "--tolerance", 0, "--json")
    assert first.code == 6
    assert first.error.startswith(("adamw: peak allocated: predicted ", "adam8bit: peak allocated: predicted "))
    assert [attempt["exit_code"] for attempt in json.loads(first.stdout)["attempts"]] == [0, 0]
    again = effcli("compare", "--resume", "--out", tmp_path / "c", "--tolerance", 90, "--csv", tmp_path / "c.csv")
    assert again.code == 0
    assert "Within 90 % of the prediction: optimizer state, weights, gradients and peak allocated." in again.stderr
    fake_runs(monkeypatch, {"adam8bit": "fail"})
    failed = effcli(*command, "--out", tmp_path / "d", "--tolerance", 0)
    assert failed.code == 7
    assert "update 2: the loss is nan" in failed.error


@pytest.mark.usefixtures("without_plan")
def test_a_comparison_that_only_estimates_has_nothing_to_compare(flags: tuple[object, ...]) -> None:
    done = effcli("compare", "adamw", *flags, "--estimate-only", "--tolerance", 0)
    assert done.code == 0
    assert "nothing is compared" in done.stderr
