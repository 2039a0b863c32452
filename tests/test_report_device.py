"""The table of a run on CUDA, from tensors to the whole device: four numbers apart, and nothing made up."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from rich.console import Console

from effcli.measure.comparison_record import ComparisonRecord
from effcli.measure.device_record import AllocatorFacts, Amount, DeviceMoment, NvmlFacts, PhasePeak
from effcli.measure.record import RunRecord
from effcli.pipeline.tolerance import check_prediction
from effcli.report.charts.memory import measured_bar
from effcli.report.charts.names import names_of
from effcli.report.comparison import render_comparison
from effcli.report.csv_rows import csv_text
from effcli.report.device_rows import CUBLAS
from effcli.report.headline import headline
from effcli.report.page import write_page
from effcli.report.page.device import device_notes, device_table, measured_phase_table
from effcli.report.page.tables import memory_table, phase_table
from effcli.report.tables import render_run
from effcli.trace.kinds import LIBRARY
from tests import comparisons, cuda_records, watched
from tests.commands import csv_file, effcli
from tests.nvml.standin import Driver

MIB = 2**20
NEVER = ("None", "nan", "inf ", "1844674407370955", "17,592,186,044,416", "17,179,869,184", "…")
"""What no report shows: no value, no number, and a driver's "not available" in bytes, MiB and GiB."""


def shown(record: RunRecord, *, columns: int = 80) -> str:
    file = io.StringIO()
    render_run(record, Console(file=file, width=columns, color_system=None, markup=False, emoji=False), notes=False)
    return file.getvalue()


def row(text: str, label: str) -> list[str]:
    """Return the cells of the first row with that label."""
    line = next(line for line in text.splitlines() if line.strip().startswith(f"{label}  "))
    return re.split(r"\s{2,}", line.strip())


def mib(cell: str) -> float:
    number, unit = cell.split()
    return float(number.replace(",", "")) * {"B": 1 / MIB, "KiB": 1 / 1024, "MiB": 1}[unit]


def facts(text: str, label: str) -> str:
    """Return all that stands beside a label below the table, on one line."""
    found = re.findall(rf"^{label}  +(.*(?:\n {{12}}.*)*)", text, re.MULTILINE)
    return " | ".join(" ".join(one.split()) for one in found)


# The four numbers -----------------------------------------------------------------------------------------------------


def test_tensors_reserved_context_and_the_process_stand_apart() -> None:
    text = shown(cuda_records.completed())
    for label, cell in (
        ("peak allocated", "15,006.00 MiB"),
        ("peak reserved", "16,726.00 MiB"),
        ("CUDA context and other", "574.00 MiB"),
        ("this process", "17,300.00 MiB"),
        ("other processes", "1,000.00 MiB"),
        ("device in use", "18,300.00 MiB"),
    ):
        assert row(text, label)[2] == cell


@pytest.mark.parametrize("side", [1, 2], ids=["estimated", "measured"])
@pytest.mark.parametrize("kind", ["whole", "peak in the backward phase", "paged", "MIG", "driver lost"])
def test_each_sum_is_that_of_the_lines_above_it(kind: str, side: int) -> None:
    text = shown(cuda_records.ALL[kind]())
    amount = {label: mib(row(text, label)[side]) for label in (
        "weights", "gradients", "optimizer state", "total before activations", "on top at the peak", "peak allocated",
        "unused of reserved", "peak reserved", "CUDA context and other", "this process",
    )}  # fmt: skip
    outside = -6000 if kind == "paged" else 0
    for parts, whole in (
        (("weights", "gradients", "optimizer state"), "total before activations"),
        (("total before activations", "on top at the peak"), "peak allocated"),
        (("peak allocated", "unused of reserved"), "peak reserved"),
        (("peak reserved", "CUDA context and other"), "this process"),
    ):
        more = outside if whole == "peak allocated" else 0
        assert sum(amount[part] for part in parts) + more == pytest.approx(amount[whole], abs=0.02)
    if side == 2:
        parts = [mib(row(text, label)[side]) for label in ("this process", "other processes")]
        assert sum(parts) == pytest.approx(mib(row(text, "device in use")[side]), abs=0.02)


def test_predictions_name_their_basis_down_to_the_context() -> None:
    text = shown(cuda_records.completed())
    assert row(text, "CUDA context and other")[1:] == ["481.28 MiB", "574.00 MiB", "+92.72 MiB", "assumed"]
    assert row(text, "peak reserved")[-1] == "traced"
    assert row(text, "this process")[-1] == "assumed"
    plan = cuda_records.plan()
    learnt = plan.model_copy(update={"basis": {**plan.basis, "context": "learnt"}})
    text = shown(cuda_records.completed(cuda_records.planned(optimizer=cuda_records.optimizer(plan=learnt))))
    assert row(text, "CUDA context and other")[-1] == "learnt"
    assert row(text, "this process")[-1] == "learnt"


def test_the_state_is_held_against_the_rise_of_allocated_bytes_alone() -> None:
    text = shown(cuda_records.completed())
    assert row(text, "rise at the first step") == [
        "rise at the first step", "6,000.01 MiB", "6,000.01 MiB", "0 B", "exact",
    ]  # fmt: skip
    more = cuda_records.allocator(first_step_change_bytes=8 * cuda_records.PARAMETERS + 30 * 512)
    assert row(shown(cuda_records.completed(allocator=more)), "rise at the first step")[3] == "+1.00 KiB"
    text = shown(cuda_records.ALL["resumed"]())
    assert row(text, "rise at the first step")[2] == "n/a"
    assert "rise at the first step n/a: the state was loaded from a checkpoint" in facts(text, "state")


def test_cublas_is_named_as_the_plan_names_it() -> None:
    assert CUBLAS == LIBRARY
    text = shown(cuda_records.completed())
    assert row(text, CUBLAS) == [CUBLAS, "16.25 MiB", "16.25 MiB", "0 B", "assumed"]
    text = shown(cuda_records.ALL["resumed"]())
    assert row(text, CUBLAS) == [CUBLAS, "16.25 MiB", "n/a", "assumed"]
    assert facts(text, "cuBLAS") == "n/a: torch does not tell"


def test_paged_state_is_named_and_lies_outside_the_allocator() -> None:
    text = shown(cuda_records.ALL["paged"]())
    assert row(text, "paged (managed)") == ["paged (managed)", "6,000.00 MiB", "exact"]
    assert row(text, "outside the allocator") == ["outside the allocator", "-6,000.00 MiB", "exact"]
    assert "6,000.00 MiB are paged (managed) memory" in facts(text, "state")
    assert "outside torch's allocator" in facts(text, "state")
    assert row(text, "on top at the peak")[1] == "2,944.00 MiB"


def test_what_a_peak_before_the_step_lacks_is_told() -> None:
    text = shown(cuda_records.ALL["peak in the backward phase"]())
    assert facts(text, "on top") == (
        "all else that tensors take at the peak: activations, temporaries; "
        "less what is not there then, 100.00 MiB as planned"
    )
    assert facts(shown(cuda_records.completed()), "on top").endswith("activations, temporaries")


# Moments --------------------------------------------------------------------------------------------------------------


def test_the_sample_that_the_driver_s_numbers_are_of_is_named() -> None:
    told = facts(shown(cuda_records.completed()), "NVML")
    assert told == "what stands below reserved: when this process held the most of 412 samples, one every 0.10 s"


def test_where_sums_are_of_other_moments_that_is_said() -> None:
    text = shown(cuda_records.ALL["other moments"]())
    assert [row(text, label)[2] for label in ("this process", "other processes", "device in use")] == [
        "16,574.00 MiB", "500.00 MiB", "17,074.00 MiB",
    ]  # fmt: skip
    told = facts(text, "NVML")
    assert "16,000.00 MiB were reserved when that sample was taken" in told
    assert (
        "more in other samples: CUDA context and other 598.00 MiB, other processes 6,000.00 MiB, "
        "device in use 20,100.00 MiB" in told
    )


def test_an_amount_that_this_sample_lacks_is_said_to_be_of_another() -> None:
    driver = cuda_records.nvml(highest=cuda_records.moment(context_bytes=None))
    text = shown(cuda_records.completed(nvml=driver))
    assert row(text, "CUDA context and other")[2] == "574.00 MiB"
    assert "not known of that sample, so the highest of others: CUDA context and other" in facts(text, "NVML")


def test_amounts_without_a_common_moment_are_told_as_such() -> None:
    assert "each at a moment of its own" in facts(shown(cuda_records.ALL["peaks without a moment"]()), "NVML")


def test_the_plan_of_updates_is_not_held_against_the_peak_of_an_evaluation() -> None:
    text = shown(cuda_records.ALL["highest in the evaluation"]())
    assert row(text, "peak of updates") == [
        "peak of updates", "14,944.00 MiB", "15,006.00 MiB", "+62.00 MiB", "traced",
    ]  # fmt: skip
    assert row(text, "peak allocated") == ["peak allocated", "n/a", "15,900.00 MiB"]
    assert row(text, "more outside updates") == ["more outside updates", "n/a", "894.00 MiB"]
    assert "the most was allocated in the evaluation phase, which is not planned" in facts(text, "mind")


def test_what_was_reserved_outside_updates_is_told_apart_too() -> None:
    peaks = dict(cuda_records.allocator().phases)
    peaks["step"] = PhasePeak(peak_allocated_bytes=15_006 * MIB, peak_reserved_bytes=16_700 * MIB)
    text = shown(cuda_records.completed(allocator=cuda_records.allocator(phases=peaks)))
    assert row(text, "peak allocated")[1:4] == ["14,944.00 MiB", "15,006.00 MiB", "+62.00 MiB"]
    assert row(text, "reserved in updates")[1:4] == ["16,600.00 MiB", "16,700.00 MiB", "+100.00 MiB"]
    assert row(text, "peak reserved") == ["peak reserved", "n/a", "16,726.00 MiB"]
    assert facts(text, "mind") == "the most was reserved outside updates, which is not planned"
    assert row(text, "this process")[1:3] == ["n/a", "17,300.00 MiB"]


def test_where_parts_of_some_updates_were_counted_the_rest_is_theirs_unless_something_else_took_as_much() -> None:
    peaks = dict(cuda_records.allocator().phases)
    peaks["step"] = PhasePeak(peak_allocated_bytes=14_900 * MIB, peak_reserved_bytes=16_726 * MIB)
    counted = cuda_records.allocator(phases=peaks, num_updates_seen=120)
    text = shown(cuda_records.completed(allocator=counted))
    assert row(text, "peak allocated")[1:4] == ["14,944.00 MiB", "15,006.00 MiB", "+62.00 MiB"]
    assert "peak of updates" not in text
    assert "Most allocated in each phase of 120 updates" in text
    peaks["evaluation"] = PhasePeak(peak_allocated_bytes=15_006 * MIB, peak_reserved_bytes=16_726 * MIB)
    seen = counted.model_copy(update={"phases": peaks}).of_updates
    assert seen is not None
    assert seen.peak_allocated_bytes == 14_900 * MIB


def test_a_run_that_made_no_update_has_no_peak_to_hold_against_the_plan() -> None:
    loading = {"loading": PhasePeak(peak_allocated_bytes=3000 * MIB, peak_reserved_bytes=3020 * MIB)}
    counted = cuda_records.allocator(
        peak_allocated_bytes=3000 * MIB, peak_reserved_bytes=3020 * MIB, phases=loading, first_step_change_bytes=None
    )
    text = shown(cuda_records.completed(peak_allocated_bytes=3000 * MIB, allocator=counted))
    assert row(text, "peak allocated")[1:] == ["n/a", "3,000.00 MiB"]
    assert row(text, "on top at the peak")[1:3] == ["2,944.00 MiB", "n/a"]
    assert "the run made no update" in facts(text, "mind")


def test_a_plan_of_torchs_default_allocator_is_not_held_against_what_another_reserved() -> None:
    record = cuda_records.planned()
    settings = "PYTORCH_ALLOC_CONF=expandable_segments:True"
    environment = {**record.environment, "allocator_settings": settings}
    run = cuda_records.completed(record.model_copy(update={"environment": environment}))
    text = shown(run)
    assert row(text, "peak allocated")[1:4] == ["14,944.00 MiB", "15,006.00 MiB", "+62.00 MiB"]
    for label, measured in (
        ("unused of reserved", "1,720.00 MiB"),
        ("peak reserved", "16,726.00 MiB"),
        ("this process", "17,300.00 MiB"),
    ):
        assert row(text, label)[1:] == ["n/a", measured]
    told = f"reserved is planned for torch's default allocator; the run had {settings}"
    assert facts(text, "mind") == told
    assert told in facts(compared(comparisons.comparison([run])), "mind")
    assert "Not compared: peak reserved." in check_prediction(run, 1)


def test_what_nvidia_smi_shows_is_told_where_the_driver_knows_the_process() -> None:
    told = facts(shown(cuda_records.completed()), "nvidia-smi")
    assert told == "shows this process and the device in use: with all of reserved, used by tensors or not"
    for kind in ("process not listed", "less what was before", "no permission"):
        assert not facts(shown(cuda_records.ALL[kind]()), "nvidia-smi")


def test_paged_state_on_the_device_is_said_to_be_beside_the_context() -> None:
    assert "paged state" in facts(shown(cuda_records.ALL["paged"]()), "context")
    assert "paged state" not in facts(shown(cuda_records.completed()), "context")


def test_the_simulated_rise_comes_before_that_of_the_smallest_blocks() -> None:
    plan = cuda_records.plan(first_step_bytes=6002 * MIB)
    text = shown(cuda_records.completed(cuda_records.planned(optimizer=cuda_records.optimizer(plan=plan))))
    assert row(text, "rise at the first step")[1:] == ["6,002.00 MiB", "6,000.01 MiB", "-1.99 MiB", "traced"]


def test_samples_that_brought_nothing_and_where_the_context_comes_from_are_told() -> None:
    plan = cuda_records.plan(context_source="learnt from 4 runs on this card")
    driver = cuda_records.nvml(num_failed=3, mean_interval_s=0.25)
    text = shown(cuda_records.completed(cuda_records.planned(optimizer=cuda_records.optimizer(plan=plan)), nvml=driver))
    assert facts(text, "context").endswith("outside torch's allocator; predicted: learnt from 4 runs on this card")
    assert "of 412 samples, one every 0.25 s | 3 samples more brought nothing" in facts(text, "NVML")


def test_each_phase_stands_beside_its_plan() -> None:
    text = shown(cuda_records.completed()).partition("Most allocated in each phase; > is the peak")[2]
    assert row(text, "loading") == ["loading", "n/a", "3,000.00 MiB", "3,020.00 MiB"]
    assert row(text, "forward") == ["forward", "11,700.00 MiB", "11,720.00 MiB", "+20.00 MiB", "14,500.00 MiB"]
    assert row(text, "> step") == ["> step", "14,944.00 MiB", "15,006.00 MiB", "+62.00 MiB", "16,726.00 MiB"]
    assert row(text, "evaluation") == ["evaluation", "n/a", "12,300.00 MiB", "16,726.00 MiB"]


# What is missing ------------------------------------------------------------------------------------------------------


def test_a_process_that_the_driver_does_not_list_is_unknown_and_the_reason_stands_once() -> None:
    text = shown(cuda_records.ALL["process not listed"]())
    for label in ("CUDA context and other", "this process", "other processes"):
        assert row(text, label)[2] == "n/a"
    assert row(text, "device in use")[2] == "18,300.00 MiB"
    told = facts(text, "NVML")
    assert told.count("the driver does not list this process") == 1
    assert "this process, CUDA context and other, other processes n/a: the driver does not list" in told
    assert "when the device held the most" in told


def test_how_a_number_was_come_by_is_told_where_that_is_second_best() -> None:
    told = facts(shown(cuda_records.ALL["less what was before"]()), "NVML")
    assert "CUDA context and other, this process: the whole device less what was in use before the run" in told
    assert "other processes n/a:" in told


@pytest.mark.parametrize("kind", ["no permission", "no permission, told by amount"])
def test_one_reason_for_everything_is_said_once(kind: str) -> None:
    text = shown(cuda_records.ALL[kind]())
    assert text.count("permission") == 1
    assert row(text, "peak reserved")[2] == "16,726.00 MiB"
    assert {row(text, label)[2] for label in ("this process", "device in use")} == {"n/a"}


def test_a_driver_that_was_lost_leaves_what_it_said_and_the_reason() -> None:
    text = shown(cuda_records.ALL["driver lost"]())
    assert row(text, "this process")[2] == "17,300.00 MiB"
    assert "of 37 samples" in facts(text, "NVML")
    assert "the driver was lost after 3.7 s: GPU is lost" in facts(text, "NVML")


def test_the_card_is_named_with_what_it_has_and_what_the_driver_keeps() -> None:
    assert facts(shown(cuda_records.completed()), "device") == (
        "NVIDIA GeForce RTX 4090: 24,564.00 MiB in all; the driver keeps 450.00 MiB of them for itself"
    )


@pytest.mark.parametrize("columns", [40, 60, 80])
@pytest.mark.parametrize("kind", cuda_records.ALL)
def test_nothing_is_wider_than_the_terminal_and_nothing_unknown_has_a_number(kind: str, columns: int) -> None:
    text = shown(cuda_records.ALL[kind](), columns=columns)
    assert max(len(line.rstrip()) for line in text.splitlines()) <= columns
    assert not [word for word in NEVER if word in text]


def test_a_saved_run_is_reported_as_it_was_when_it_ended(tmp_path: Path) -> None:
    record = cuda_records.completed()
    (tmp_path / "record.json").write_text(record.model_dump_json())
    told = effcli("report", tmp_path).stdout
    assert row(told, "CUDA context and other") == row(shown(record), "CUDA context and other")
    assert facts(told, "NVML") == facts(shown(record), "NVML")
    document = effcli("report", tmp_path, "--json").record
    (run,) = document["runs"]
    assert run["measured"]["nvml"]["highest"]["context_bytes"] == 574 * MIB
    assert document["summary"][0]["peak_process_bytes"] == 17_300 * MIB


def test_what_a_driver_says_comes_out_as_the_split(
    distilbert: Path, driver: Driver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = f"memory {24_000 * MIB} {18_000 * MIB} {300 * MIB}"
    driver.play(f"card {watched.CARD} NVIDIA A10\n{memory}\nprocess self {17_300 * MIB}\n")
    watched.believe_in_a_device(monkeypatch, watched.FakeCounters(15_006 * MIB, 16_726 * MIB))
    data = csv_file(tmp_path / "d.csv", 20)
    run = effcli("train", distilbert, "--data", data, "--max-steps", 2, "--json", "--out", tmp_path / "run").record
    run["environment"]["device"] = "cuda:0"
    (tmp_path / "run.json").write_text(json.dumps(run))
    text = effcli("report", tmp_path / "run.json").stdout
    for label, cell in (
        ("peak allocated", "15,006.00 MiB"),
        ("peak reserved", "16,726.00 MiB"),
        ("CUDA context and other", "574.00 MiB"),
        ("this process", "17,300.00 MiB"),
        ("other processes", "700.00 MiB"),
        ("device in use", "18,000.00 MiB"),
    ):
        assert row(text, label)[2] == cell
    assert facts(text, "device") == ("NVIDIA A10: 24,000.00 MiB in all; the driver keeps 300.00 MiB of them for itself")


# Several runs ---------------------------------------------------------------------------------------------------------


def compared(record: ComparisonRecord, *, columns: int = 80) -> str:
    file = io.StringIO()
    console = Console(file=file, width=columns, color_system=None, markup=False, emoji=False)
    render_comparison(record, console, notes=False)
    return file.getvalue()


def test_runs_on_cuda_are_compared_by_what_they_took_of_the_device() -> None:
    text = compared(cuda_records.three()).partition("On the device, in MiB")[2]
    for name, *amounts in (
        ("adamw", 16_600, 16_726, 574, 17_081.28, 17_300, 18_300),
        ("adafactor", 10_610, 10_736, 574, 11_091.28, 11_310, 12_310),
        ("adam8bit", 12_130, 12_256, 574, 12_611.28, 12_830, 13_830),
    ):
        assert row(text, name)[1:] == [f"{amount:,.2f}" for amount in amounts]
    assert facts(text, "process") == "reserved and context; predicted with an assumed context"
    assert not facts(text, "NVML")


def test_a_plan_alone_shows_what_the_device_must_have() -> None:
    plans = [cuda_records.planned(), cuda_records.named(cuda_records.planned(), "lion")]
    text = compared(comparisons.comparison(plans, status="planned"))
    assert row(text.partition("On the device, in MiB")[2], "lion") == ["lion", "16,600.00", "17,081.28"]
    assert "measured" not in text


def test_on_a_cpu_there_is_no_table_of_the_device() -> None:
    text = compared(comparisons.three())
    assert "On the device" not in text
    assert "NVML" not in text


def test_reasons_of_some_runs_say_whose_they_are() -> None:
    told = facts(compared(cuda_records.every_kind()), "NVML")
    assert "no permission: n/a: no permission to ask" in told
    assert "driver lost: the driver was lost after 3.7 s" in told
    assert "process not listed: this process, CUDA context and other, other processes n/a:" in told


@pytest.mark.parametrize("columns", [40, 80])
def test_every_kind_is_compared_within_the_terminal(columns: int) -> None:
    text = compared(cuda_records.every_kind(), columns=columns)
    assert max(len(line.rstrip()) for line in text.splitlines()) <= columns
    assert not [word for word in NEVER if word in text]


def test_means_over_seeds_stand_with_their_deviation() -> None:
    heavy, light = cuda_records.lighter(10), cuda_records.lighter(30)
    record = comparisons.comparison([cuda_records.named(heavy, "x"), cuda_records.named(light, "x", seed=43)])
    text = compared(record).partition("On the device, in MiB")[2]
    assert row(text, "x")[2] == "16,706.00"
    assert "\u00b114.14" in text  # the deviation of 16,716 and 16,696


def test_each_run_is_a_row_of_bytes_with_empty_cells_for_what_is_unknown() -> None:
    rows = {row["name"]: row for row in csv.DictReader(io.StringIO(csv_text(cuda_records.every_kind())))}
    amounts = ("peak_reserved_bytes", "peak_context_bytes", "peak_process_bytes", "peak_device_bytes")
    whole = [16_726 * MIB, 574 * MIB, 17_300 * MIB, 18_300 * MIB]
    assert [rows["whole"][key] for key in amounts] == [str(amount) for amount in whole]
    assert [rows["process not listed"][key] for key in amounts] == [str(whole[0]), "", "", str(whole[3])]
    assert [rows["nothing at all"][key] for key in amounts] == [""] * 4
    assert rows["whole"]["predicted_peak_reserved_bytes"] == str(16_600 * MIB)
    assert rows["whole"]["predicted_process_bytes"] == str(16_600 * MIB + cuda_records.CONTEXT)
    on_cpu = next(csv.DictReader(io.StringIO(csv_text(comparisons.three()))))
    assert [on_cpu[key] for key in (*amounts, "predicted_peak_reserved_bytes", "predicted_process_bytes")] == [""] * 6


def test_a_plan_of_updates_stands_beside_what_updates_took_wherever_the_two_are_compared(tmp_path: Path) -> None:
    record = comparisons.comparison([cuda_records.ALL["highest in the evaluation"]()])
    (cells,) = csv.DictReader(io.StringIO(csv_text(record)))
    assert cells["peak_allocated_bytes"] == str(15_900 * MIB)
    assert cells["update_peak_allocated_bytes"] == str(15_006 * MIB)
    assert cells["update_peak_reserved_bytes"] == str(16_726 * MIB)
    assert headline(names_of(record)).endswith("and peaked at 15.53 GiB.")  # with an evaluation, which is not predicted
    assert headline(names_of(comparisons.comparison([cuda_records.completed()]))).endswith(
        "and peaked at 14.65 GiB (14.59 GiB predicted)."
    )
    table = phase_table(names_of(record))
    (last,) = re.findall(r"<td>([^<]*)</td></tr>", table)
    assert re.findall(r"<th[^>]*>([^<]*)</th></tr>", table) == ["peak of updates, measured"]
    assert last == "14.65 GiB"
    told = "most was allocated outside updates, which alone are predicted"
    for shown_record, is_told in ((record, True), (cuda_records.three(), False)):
        write_page(shown_record, tmp_path / "page.html")
        assert (told in (tmp_path / "page.html").read_text()) is is_told


def test_the_page_shows_the_device_and_says_what_its_numbers_are(tmp_path: Path) -> None:
    write_page(cuda_records.three(), tmp_path / "three.html")
    page = (tmp_path / "three.html").read_text()
    table = page.partition("<h3>On the device</h3>")[2].partition("</table>")[0]
    adamw = re.findall(r"<td>(.*?)</td>", table.partition("adamw")[2].partition("</tr>")[0])
    assert adamw == [
        "16,600.00 MiB", "16,726.00 MiB", "574.00 MiB", "17,081.28 MiB", "17,300.00 MiB", "18,300.00 MiB",
    ]  # fmt: skip
    assert "NVML: what stands below reserved: when this process held the most of 412 samples" in page
    assert "12,300.00 MiB" in page.partition("Most allocated in each phase</summary>")[2].partition("</table>")[0]
    write_page(comparisons.three(), tmp_path / "cpu.html")
    assert "On the device" not in (tmp_path / "cpu.html").read_text()


def test_gradients_are_told_apart_where_the_highest_phase_is_counted_to_hold_all_of_them() -> None:
    for kind, has_gradients in (
        ("whole", True),
        ("peak in the backward phase", True),
        ("highest in the evaluation", False),
    ):
        bar = measured_bar(cuda_records.ALL[kind]())
        assert bar is not None
        assert ("gradients" in dict(bar.parts)) is has_gradients


def test_paged_state_is_no_part_of_a_measured_bar() -> None:
    bar = measured_bar(cuda_records.ALL["paged"]())
    assert bar is not None
    assert dict(bar.parts) == {
        "weights": 3000 * MIB, "optimizer state": 0, "gradients": 3000 * MIB, "rest of the measured peak": 3006 * MIB,
    }  # fmt: skip


# Any record -----------------------------------------------------------------------------------------------------------

BYTES = st.one_of(st.none(), st.integers(0, 2**41))
WORDS = st.one_of(st.none(), st.sampled_from(["", "n/a (the driver doesn't report it)", "no [permission]", "x" * 200]))
AMOUNTS = st.builds(Amount, peak_bytes=BYTES, last_bytes=BYTES, reason=WORDS, how=WORDS)
PEAKS = st.builds(PhasePeak, peak_allocated_bytes=st.integers(0, 2**41), peak_reserved_bytes=st.integers(0, 2**41))
PHASES = st.sampled_from(["loading", "forward", "backward", "step", "evaluation"])


def any_of(kind: type[Any], *names: str, **given: Any) -> st.SearchStrategy[Any]:
    """Return a strategy for a fact whose named fields are bytes or missing."""
    return st.builds(kind, **dict.fromkeys(names, BYTES), **given)


MOMENTS = any_of(DeviceMoment, *DeviceMoment.model_fields)
DRIVERS = any_of(
    NvmlFacts, "total_bytes", "driver_reserved_bytes", name=WORDS, interval_s=st.sampled_from([None, 0.1]),
    num_samples=st.integers(0, 10**6), num_failed=st.integers(0, 2),
    mean_interval_s=st.sampled_from([None, 0.2]), device=AMOUNTS, process=AMOUNTS, context=AMOUNTS, others=AMOUNTS,
    highest=st.one_of(st.none(), MOMENTS), reason=WORDS,
)  # fmt: skip
ALLOCATORS = any_of(
    AllocatorFacts, "first_step_change_bytes", "cublas_workspace_bytes", peak_allocated_bytes=st.integers(0, 2**41),
    peak_reserved_bytes=st.integers(0, 2**41), first_step_reason=WORDS, cublas_reason=WORDS,
    phases=st.dictionaries(PHASES, PEAKS), num_updates_seen=st.sampled_from([None, 0, 7]),
)  # fmt: skip
PLACES = st.dictionaries(st.sampled_from(["device", "host", "paged"]), st.integers(0, 2**41))


@st.composite
def any_run(draw: st.DrawFn) -> RunRecord:
    """Return a finished run on CUDA in which anything may be missing, and nothing need fit together."""
    plan: Any = draw(
        st.sampled_from([cuda_records.plan(), None, cuda_records.plan(phases={}, first_phases={}, peak_phase=None)])
    )
    if plan is not None:
        names = ("peak_allocated_bytes", "peak_reserved_bytes", "context_bytes", "device_total_bytes")
        plan = plan.model_copy(update={name: draw(BYTES) for name in names})
    optimizer = cuda_records.optimizer(plan=plan, placements=draw(PLACES), allocator_state_bytes=draw(BYTES))
    return cuda_records.completed(
        cuda_records.planned(optimizer=optimizer),
        weights_bytes=draw(BYTES), gradients_bytes=draw(BYTES), peak_allocated_bytes=draw(BYTES),
        allocator=draw(st.one_of(st.none(), ALLOCATORS)), nvml=draw(DRIVERS),
    )  # fmt: skip


SHOWN_ANYHOW = settings(
    max_examples=40, deadline=None, derandomize=True, phases=(Phase.generate, Phase.shrink),
    suppress_health_check=list(HealthCheck),
)  # fmt: skip


def lines_of(record: RunRecord) -> Iterable[str]:
    for columns in (40, 80):
        lines = shown(record, columns=columns).splitlines()
        assert max(len(line.rstrip()) for line in lines) <= columns
        yield from lines


@SHOWN_ANYHOW
@given(record=any_run())
def test_any_run_is_shown(record: RunRecord) -> None:
    text = "\n".join(lines_of(record))
    assert not [word for word in NEVER if word in text]
    assert "this process" in text


@SHOWN_ANYHOW
@given(record=any_run(), other=any_run())
def test_any_runs_are_compared(record: RunRecord, other: RunRecord) -> None:
    both = comparisons.comparison([record, cuda_records.named(other, "other")])
    for columns in (40, 80):
        text = compared(both, columns=columns)
        assert max(len(line.rstrip()) for line in text.splitlines()) <= columns
        assert not [word for word in NEVER if word in text]
    assert not [word for word in NEVER if word in csv_text(both)]
    names = names_of(both)
    for part in (memory_table(names), device_table(names), device_notes(names), measured_phase_table(names)):
        assert not [word for word in NEVER if word in re.sub(r"<[^>]*>", " ", part)]
