"""What the record of a run says of its device, whichever way the run ends: the driver is the stand-in."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from effcli import pipeline
from effcli.measure.cuda_allocator import Counted
from effcli.report.progress import QuietProgress
from tests.commands import csv_file, effcli
from tests.full_memory import no_memory_above, no_memory_in
from tests.jobs import ONE_FAST_ENGINE
from tests.nvml.standin import Driver
from tests.stopped_runs import settings, train_and_stop
from tests.watched import CARD, MIB, FakeCounters, LiveTensors, believe_in_a_device

pytestmark = pytest.mark.usefixtures("without_plan")

SCRIPT = f"""
card {CARD} NVIDIA A10
memory {24_000 * MIB} {18_000 * MIB} {300 * MIB}
process self {17_300 * MIB}
"""
F1_ADAMW = 1_115_824


@pytest.fixture
def run(distilbert: Path, tmp_path: Path) -> tuple[object, ...]:
    """Return a run of 20 rows in two epochs of three updates, evaluated after each."""
    data = csv_file(tmp_path / "d.csv", 20)
    return ("train", distilbert, "--data", data, "--eval-data", data, "--epochs", 2, "--json")


def watched(driver: Driver, monkeypatch: pytest.MonkeyPatch, script: str = SCRIPT, **options: Any) -> FakeCounters:
    driver.play(script)
    counters = options.pop("counters", None) or FakeCounters(15_006 * MIB, 16_726 * MIB)
    believe_in_a_device(monkeypatch, counters, **options)
    return counters


def nothing_left(driver: Driver) -> bool:
    names = [thread.name for thread in threading.enumerate()]
    return driver.num_open() == 0 and not any(name.startswith("effcli") for name in names)


@pytest.mark.parametrize("engine", ONE_FAST_ENGINE)
def test_the_record_has_what_allocator_and_driver_counted(
    engine: str, run: tuple[object, ...], driver: Driver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched(driver, monkeypatch, counters=LiveTensors())
    measured = effcli(*run, "--engine", engine, "--nvml-interval", 2, "--out", tmp_path / "run").record["measured"]
    allocator, nvml = measured["allocator"], measured["nvml"]
    assert list(allocator["phases"]) == ["loading", "forward", "backward", "step", "evaluation"]
    peaks = [phase["peak_allocated_bytes"] for phase in allocator["phases"].values()]
    assert allocator["peak_allocated_bytes"] == measured["peak_allocated_bytes"] == max(peaks)
    assert (allocator["first_step_change_bytes"], allocator["first_step_reason"]) == (F1_ADAMW, None)
    assert measured["optimizer_state_bytes"] == F1_ADAMW
    assert allocator["phases"]["step"]["peak_allocated_bytes"] >= 557_832 * 2 + F1_ADAMW
    assert (nvml["name"], nvml["uuid"], nvml["reason"], nvml["interval_s"]) == ("NVIDIA A10", CARD, None, 2)
    assert nvml["process"]["peak_bytes"] == 17_300 * MIB
    assert nvml["driver_reserved_bytes"] == 300 * MIB
    assert nvml["num_samples"] >= 1
    assert nothing_left(driver)


def test_the_split_of_case_c23_is_in_the_record_and_on_the_screen(
    run: tuple[object, ...], driver: Driver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched(driver, monkeypatch)
    nvml = effcli(*run, "--out", tmp_path / "run").record["measured"]["nvml"]
    amounts = [nvml[name]["peak_bytes"] // MIB for name in ("process", "context", "others", "device")]
    assert amounts == [17_300, 574, 700, 18_000]
    assert (nvml["highest"]["allocated_bytes"], nvml["highest"]["reserved_bytes"]) == (15_006 * MIB, 16_726 * MIB)
    assert nvml["interval_s"] == 0.2


def test_in_a_container_a_run_is_what_the_device_took_since_it_began(
    run: tuple[object, ...], driver: Driver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = f"card {CARD} NVIDIA A10\nmemory {24_000 * MIB} {700 * MIB}"
    later = f"card {CARD} NVIDIA A10\nmemory {24_000 * MIB} {18_000 * MIB}\nprocess 645400 {9 * 1024 * MIB}"
    watched(driver, monkeypatch, before)
    monkeypatch.setattr("effcli.pipeline.settling.activate", lambda device: driver.play(later))
    nvml = effcli(*run, "--out", tmp_path / "run").record["measured"]["nvml"]
    assert nvml["process"]["peak_bytes"] == 17_300 * MIB
    assert "the whole device less what was in use before this run" in nvml["process"]["how"]
    assert (nvml["context"]["peak_bytes"], nvml["others"]["peak_bytes"]) == (574 * MIB, 700 * MIB)

    believe_in_a_device(monkeypatch, FakeCounters(), has_context=lambda: True)
    nvml = effcli(*run, "--out", tmp_path / "second").record["measured"]["nvml"]
    assert nvml["process"]["peak_bytes"] is None
    assert "this process had used CUDA before this run began" in nvml["process"]["reason"]
    assert nvml["device"]["peak_bytes"]


def test_runs_of_one_process_have_peaks_of_their_own(
    run: tuple[object, ...], driver: Driver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counters = watched(driver, monkeypatch)
    counters.hold(20_000 * MIB, 20_000 * MIB)
    counters.hold(10 * MIB, 20 * MIB)
    for out in ("one", "two"):
        allocator = effcli(*run, "--out", tmp_path / out).record["measured"]["allocator"]
        assert (allocator["peak_allocated_bytes"], allocator["peak_reserved_bytes"]) == (10 * MIB, 20 * MIB)
        counters.hold(15_000 * MIB, 20_000 * MIB)
        counters.hold(10 * MIB, 20 * MIB)
    assert nothing_left(driver)


def test_what_an_earlier_run_of_the_process_left_is_none_of_this_runs(
    run: tuple[object, ...], driver: Driver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched(driver, monkeypatch, counters=LiveTensors())
    first, second = (
        effcli(*run, "--max-steps", 1, "--nvml-interval", 2, "--out", tmp_path / out).record["measured"]
        for out in ("first", "second")
    )
    assert second["peak_allocated_bytes"] <= first["peak_allocated_bytes"]
    assert second["allocator"]["phases"]["loading"]["peak_allocated_bytes"] < F1_ADAMW


def test_a_resumed_run_did_not_make_the_state(driver: Driver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watched(driver, monkeypatch)
    flags = settings(tmp_path, "o", {})
    train_and_stop(flags, after=3)
    interrupted = json.loads((tmp_path / "o" / "record.json").read_text())
    assert interrupted["status"] == "interrupted"
    assert interrupted["measured"]["nvml"]["process"]["peak_bytes"] == 17_300 * MIB
    assert interrupted["measured"]["allocator"]["first_step_change_bytes"] == 0
    assert nothing_left(driver)
    flags["loop"]["nvml_interval"] = 0.5  # may change when a run is resumed
    resumed = pipeline.train(pipeline.resolve_spec(flags), progress=QuietProgress(), resume=True)
    assert resumed.measured.allocator.first_step_change_bytes is None
    assert resumed.measured.allocator.first_step_reason == "the state was loaded with a checkpoint"
    assert resumed.measured.nvml.interval_s == 0.5


def test_a_run_that_fails_keeps_what_was_measured(
    run: tuple[object, ...], driver: Driver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched(driver, monkeypatch)
    calls: list[int] = []

    def fail(*ignored: Any) -> None:
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("the cable")

    handle = register_optimizer_step_pre_hook(fail)
    try:
        failed = effcli(*run, "--out", tmp_path / "run")
    finally:
        handle.remove()
    assert "the cable" in failed.error
    record = json.loads((tmp_path / "run" / "record.json").read_text())
    assert (record["status"], len(record["history"])) == ("failed", 2)
    assert record["measured"]["nvml"]["context"]["peak_bytes"] == 574 * MIB
    assert record["measured"]["allocator"]["peak_allocated_bytes"] == 15_006 * MIB
    assert nothing_left(driver)


def test_a_batch_that_does_not_fit_is_told_with_the_peaks_of_its_attempt_and_the_next_has_its_own(
    run: tuple[object, ...], driver: Driver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counters = watched(driver, monkeypatch)

    def full() -> Exception:
        counters.hold(22_000 * MIB, 23_000 * MIB)
        counters.hold(15_006 * MIB, 16_726 * MIB)
        return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")

    no_memory_above(monkeypatch, 4, full)
    record = effcli(*run, "--batch-size", 8, "--auto-batch", "--out", tmp_path / "run").record
    (facts,) = record["out_of_memory"]
    assert (facts["peak_allocated_bytes"], facts["peak_reserved_bytes"]) == (22_000 * MIB, 23_000 * MIB)
    assert record["measured"]["allocator"]["peak_allocated_bytes"] == 15_006 * MIB
    assert record["measured"]["nvml"]["process"]["peak_bytes"] == 17_300 * MIB
    assert nothing_left(driver)


def test_memory_that_runs_out_while_the_model_is_loaded_leaves_nothing_open(
    run: tuple[object, ...], driver: Driver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched(driver, monkeypatch)
    no_memory_in(monkeypatch, "loading")
    failed = effcli(*run, "--out", tmp_path / "run")
    assert "while the model was loaded" in failed.error
    assert "14.65 GiB allocated at most" in failed.error
    assert nothing_left(driver)


@pytest.mark.parametrize("failure", ["fail nvmlInit 9", "fail nvmlInit 999", "fail * 15", "fail * 3", "fail * 4"])
def test_a_driver_that_fails_is_a_reason_and_training_goes_on(
    failure: str, run: tuple[object, ...], driver: Driver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched(driver, monkeypatch, f"{SCRIPT}\n{failure}")
    record = effcli(*run, "--out", tmp_path / "run").record
    nvml = record["measured"]["nvml"]
    assert record["status"] == "completed"
    for name in ("device", "process", "context", "others"):
        assert nvml[name]["peak_bytes"] is None
        assert nvml[name]["reason"] or nvml["reason"]
    assert record["measured"]["allocator"]["peak_allocated_bytes"] == 15_006 * MIB
    assert nothing_left(driver)


def test_an_allocator_that_counts_nothing_ends_no_run(
    run: tuple[object, ...], driver: Driver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class PluggedIn(FakeCounters):
        def read(self) -> Counted:
            raise RuntimeError("CUDAPluggableAllocator does not yet support getDeviceStats.")

        def reset_peaks(self) -> None:
            raise RuntimeError("CUDAPluggableAllocator does not yet support resetPeakStats.")

    watched(driver, monkeypatch, counters=PluggedIn())
    record = effcli(*run, "--out", tmp_path / "run").record
    assert record["status"] == "completed"
    assert record["measured"]["allocator"] is None
    nvml = record["measured"]["nvml"]
    assert nvml["reason"] is None
    assert (nvml["process"]["peak_bytes"], nvml["device"]["peak_bytes"]) == (17_300 * MIB, 18_000 * MIB)
    assert (nvml["context"]["peak_bytes"], nvml["others"]["peak_bytes"]) == (None, 700 * MIB)
    assert "torch counts nothing of this allocator" in nvml["context"]["reason"]
    assert nothing_left(driver)


@pytest.mark.parametrize("wrong", ["-1", "nan", "inf", "0.001", "1e9", "soon"])
def test_an_interval_that_is_no_use_is_refused(wrong: str, run: tuple[object, ...], tmp_path: Path) -> None:
    refused = effcli(*run, "--nvml-interval", wrong, "--out", tmp_path / "run")
    assert refused.code == 2
    assert "--nvml-interval (loop.nvml_interval)" in refused.error


def test_sampling_can_be_switched_off(
    run: tuple[object, ...], driver: Driver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched(driver, monkeypatch)
    measured = effcli(*run, "--nvml-interval", 0, "--out", tmp_path / "run").record["measured"]
    assert measured["nvml"]["reason"] == "sampling is switched off (--nvml-interval 0)"
    assert measured["allocator"]["peak_allocated_bytes"] == 15_006 * MIB
    assert driver.calls() == []


def test_on_a_cpu_nothing_is_opened(run: tuple[object, ...], driver: Driver, tmp_path: Path) -> None:
    driver.play(SCRIPT)
    measured = effcli(*run, "--device", "cpu", "--out", tmp_path / "run").record["measured"]
    assert measured["allocator"] is None
    assert measured["nvml"]["reason"] == "the run was on cpu, not on an NVIDIA GPU"
    assert driver.calls() == []
