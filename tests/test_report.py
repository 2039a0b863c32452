"""Tables and JSON of a run: what stands in them, and what must never."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from effcli.cli.report import report
from effcli.measure.device_record import Amount, NvmlFacts
from effcli.measure.record import EvalFacts, MemoryPlan, ProfiledUpdate, RunRecord, StateAmount
from effcli.report.output import emit
from tests import plans, records

M = 7_241_732_096
UNITS = {"B": 1, "KiB": 1024, "MiB": 1024**2, "GiB": 1024**3}
LONG = "/very/long/folder/" + "on-and-on/" * 12 + "runs/[v2]/[/some]"


def large_language_model() -> RunRecord:
    tensors = {
        "exp_avg": StateAmount(elements=M, bytes=4 * M),
        "exp_avg_sq": StateAmount(elements=M, bytes=4 * M),
        "step": StateAmount(elements=291, bytes=1164),
    }
    state = {
        "state_bytes": 8 * M + 1164,
        "state_elements": 2 * M + 291,
        "total_before_activations_bytes": 16 * M + 1164,
    }
    basis = {"weights": "exact", "gradients": "exact", "optimizer_state": "exact", "activations": "traced"}
    plan = records.planned(
        model=records.model(
            "someone/A-7B-model-with-a-name-of-eighty-characters-or-more-that-goes-on-and-on-v0.1",
            architecture="MistralForCausalLM",
            task="causal-lm",
            num_parameters=M,
            num_trainable_parameters=M,
            weights_bytes=4 * M,
            gradients_bytes=4 * M,
        ),
        optimizer=records.optimizer(
            "adamw", tensors, plan=MemoryPlan(phases={}, basis=basis, peak_allocated_bytes=130_000_000_000), **state
        ),
        environment={"device": "cuda:0", "device_name": "NVIDIA H200", "out": LONG},
    )
    nvml = NvmlFacts(device=Amount(peak_bytes=140 * 2**30), process=Amount(peak_bytes=139 * 2**30))
    return records.completed(
        plan,
        measured=records.measured(plan, peak_allocated_bytes=131_073_741_824, nvml=nvml),
        eval=(EvalFacts(epoch=3.0, update=1377, eval_loss=2.3, eval_perplexity=9.9742),),
        baselines=None,
    )


def shown(capsys: pytest.CaptureFixture[str], record: RunRecord, *, quiet: bool = False) -> str:
    emit(record, json=False, quiet=quiet)
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def row(text: str, label: str) -> list[str]:
    """Return the cells of the first row with that label."""
    line = next(line for line in text.splitlines() if line.strip().startswith(f"{label}  "))
    return re.split(r"\s{2,}", line.strip())


def in_bytes(cell: str) -> float:
    number, unit = cell.split()
    return float(number.replace(",", "")) * UNITS[unit]


def one_line(text: str) -> str:
    return " ".join(text.split())


ALL = {
    "completed": records.completed,
    "planned": records.planned,
    "large": large_language_model,
    "failed": lambda: records.completed(status="failed", failure="out of memory " * 20),
    "long label": lambda: records.planned(model=records.model("m" * 200, architecture="A" * 100)),
}


@pytest.mark.parametrize("kind", ALL)
def test_nothing_is_wider_than_80_columns_and_nothing_is_cut_off(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, ALL[kind]())
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text
    assert all(line == line.rstrip() for line in text.splitlines())


@pytest.mark.parametrize("columns", ["40", "60", "200"])
def test_every_digit_survives_any_width(
    columns: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = shown(capsys, large_language_model())
    monkeypatch.setenv("COLUMNS", columns)
    text = shown(capsys, large_language_model())
    assert max(map(len, text.splitlines())) <= int(columns)
    assert "…" not in text
    assert sum(map(str.isdigit, text)) == sum(map(str.isdigit, usual))


@pytest.mark.parametrize("columns", ["0", "00"])
def test_no_columns_at_all_mean_that_nobody_knows_how_many(
    columns: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = shown(capsys, records.completed())
    monkeypatch.setenv("COLUMNS", columns)
    assert shown(capsys, records.completed()) == usual


def test_numbers_in_the_table_are_those_of_the_json_in_binary_units(capsys: pytest.CaptureFixture[str]) -> None:
    record = records.completed()
    text = shown(capsys, record)
    emit(record, json=True, quiet=False)
    document = json.loads(capsys.readouterr().out)
    assert "501.89 MiB" in text
    for label, number in (
        ("weights", document["model"]["weights_bytes"]),
        ("gradients", document["measured"]["gradients_bytes"]),
        ("optimizer state", document["measured"]["optimizer_state_bytes"]),
        ("total before activations", document["optimizer"]["total_before_activations_bytes"]),
    ):
        _, estimated, measured, difference, _ = row(text, label)
        assert in_bytes(estimated) == pytest.approx(number, abs=0.005 * 1024**2)
        assert measured == estimated
        assert difference == "0 B"
    assert not re.search(r"\d [KMG]B\b", text)


def test_whole_bytes_are_printed_and_add_up(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, records.completed()).partition("To the byte")[2]
    assert row(text, "exp_avg") == ["exp_avg", "65,783,042", "65,783,042", "263,132,168", "263,132,168"]
    assert row(text, "step") == ["step", "104", "104", "416", "416"]
    assert row(text, "state") == ["state", "131,566,188", "131,566,188", "526,264,752", "526,264,752"]
    parts = [int(row(text, label)[-1].replace(",", "")) for label in ("weights", "gradients", "state")]
    assert sum(parts) == 1_052_529_088
    assert row(text, "total")[-1] == "1,052,529,088"


def test_the_measured_total_is_the_sum_of_what_was_measured(capsys: pytest.CaptureFixture[str]) -> None:
    plan = records.planned()
    more = records.measured(plan, optimizer_state_bytes=526_264_752 + 2048, weights_bytes=263_132_168 - 100)
    text = shown(capsys, records.completed(plan, measured=more))
    assert row(text, "optimizer state")[3] == "+2.00 KiB"
    assert row(text, "weights")[3] == "-100 B"
    assert row(text.partition("To the byte")[2], "total") == ["total", "1,052,529,088", "1,052,531,036"]


def test_a_state_key_that_only_one_side_has_is_shown_as_missing_on_the_other(
    capsys: pytest.CaptureFixture[str],
) -> None:
    plan = records.planned()
    surprise = {**records.F2_ADAMW, "max_exp_avg_sq": StateAmount(elements=5, bytes=20)}
    text = shown(capsys, records.completed(plan, measured=records.measured(plan, tensors=surprise)))
    assert row(text, "max_exp_avg_sq") == ["max_exp_avg_sq", "-", "5", "-", "20"]


def test_a_plan_shows_estimates_alone_and_calls_the_total_a_lower_bound(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, records.planned())
    assert "planned, 1,377 updates" in text
    assert row(text, "optimizer state") == ["optimizer state", "501.89 MiB", "exact"]
    assert row(text, "peak allocated") == ["peak allocated", "n/a"]
    assert "lower bound" in text
    assert "measured" not in text
    assert "record.json" not in text


def test_the_rule_of_thumb_stands_beside_the_exact_state_and_is_named_so(capsys: pytest.CaptureFixture[str]) -> None:
    tensors = {"state1": StateAmount(elements=131_566_188, bytes=134_004_336)}
    eight = records.optimizer(
        "adam8bit",
        tensors,
        state_bytes=134_004_336,
        state_elements=131_566_188,
        rule_of_thumb_bytes=2 * 65_783_042,
    )
    text = shown(capsys, records.completed(records.planned(optimizer=eight)))
    assert row(text, "optimizer state")[1] == "127.80 MiB"
    assert row(text, "rule of thumb") == ["rule of thumb", "125.47 MiB", "rule"]


def test_the_headline_says_what_was_run(capsys: pytest.CaptureFixture[str]) -> None:
    frozen = records.model("distilbert-base-cased", num_trainable_parameters=1538, num_parameter_tensors=104)
    text = shown(capsys, records.completed(records.planned(model=frozen)))
    assert text.startswith("effcli train: completed, 1,377 updates\n")
    assert "DistilBertForSequenceClassification, classification" in text
    assert "1,538 trainable + 65,781,504 frozen = 65,783,042, in 104 tensors" in text
    assert "adamw, engine accelerate, bf16, on cpu (x86_64)" in text
    assert "4 x 2 = 8 rows per update" in text
    assert "0.01 on 40 tensors, 65,700,000 elements" in text
    assert "0 on 64 tensors, 83,042 elements" in text
    assert "3,668 training rows, 408 evaluation rows, 3 cut, 2 left out" in text


def test_on_a_cpu_the_peak_is_called_the_resident_set_of_the_process(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, records.completed())
    assert row(text, "peak resident set") == ["peak resident set", "n/a", "1.50 GiB"]
    assert "the whole process, Python and libraries included" in text
    assert "n/a: not on an NVIDIA GPU" in text


@pytest.mark.parametrize(
    ("estimated", "cells"), [(2**29, ["512.00 MiB", "768.00 MiB", "+256.00 MiB"]), (None, ["n/a", "768.00 MiB"])]
)
def test_a_profiled_peak_stands_beside_the_plan_of_its_own_batches(
    estimated: int | None, cells: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    peak = 3 * 2**28
    update = ProfiledUpdate(
        update=1007, rows=16, tokens=1, peak_allocated_bytes=peak, planned_peak_allocated_bytes=estimated
    )
    planned = records.planned()
    plan = plans.plan(device="cpu")
    planned = planned.model_copy(update={"optimizer": planned.optimizer.model_copy(update={"plan": plan})})
    measured = records.measured(planned, peak_allocated_bytes=peak, profiled=update)
    text = shown(capsys, records.completed(planned, measured=measured))
    assert row(text, "peak allocated") == ["peak allocated", *cells, "traced"]
    assert "allocated: all tensors of update 1,007, profiled; 16 rows x 1 token" in text
    assert row(text, "peak resident set")[:2] == ["peak resident set", "n/a"]


def test_on_cuda_the_peak_is_the_allocators_and_the_driver_is_shown_apart(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, large_language_model())
    cells = row(text, "peak allocated")
    assert cells == ["peak allocated", "123,977.66 MiB", "125,001.66 MiB", "+1,024.00 MiB", "traced"]
    assert "resident set" not in text
    assert row(text, "this process") == ["this process", "n/a", "142,336.00 MiB"]
    assert row(text, "device in use") == ["device in use", "n/a", "143,360.00 MiB"]
    assert "lower bound" not in text


def test_scores_stand_beside_the_baselines(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, records.completed())
    assert row(text, "epoch 3.00, update 1,377")[1:] == ["0.2500", "0.8775", "0.8912"]
    assert row(text, "baseline: majority class")[1:] == ["0.6838", "0.8122"]
    assert row(text, "baseline: bag of words")[1:] == ["0.7034", "0.8032"]
    assert "1.25 updates/s, 10.0 samples/s, 1,234 tokens/s" in text
    assert "perplexity" not in text


def test_a_language_model_shows_perplexity_and_no_accuracy(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, large_language_model())
    assert row(text, "epoch 3.00, update 1,377")[1:] == ["2.3000", "9.97"]
    assert "accuracy" not in text


def test_a_failed_run_says_so_and_names_no_model_folder(capsys: pytest.CaptureFixture[str]) -> None:
    failed = records.completed(status="failed", failure="CUDA out of memory.\nTried [PAD] 20 MiB", measured=None)
    text = shown(capsys, failed)
    assert "failed after update 1,377 of 1,377: CUDA out of memory. Tried [PAD] 20 MiB" in one_line(text)
    assert "runs/one/record.json" in text
    assert "runs/one/model" not in text


def test_an_optimizer_without_state_is_zero_bytes_and_no_empty_section(capsys: pytest.CaptureFixture[str]) -> None:
    sgd = records.optimizer("sgd", {}, state_bytes=0, state_elements=0, total_before_activations_bytes=526_264_336)
    text = shown(capsys, records.completed(records.planned(optimizer=sgd)))
    assert row(text, "optimizer state")[1:4] == ["0 B", "0 B", "0 B"]


def test_brackets_of_the_user_are_printed_and_control_characters_are_not(capsys: pytest.CaptureFixture[str]) -> None:
    record = records.completed(
        records.planned(
            model=records.model("org/[unused1][/some]"),
            environment={"device": "cpu", "out": "runs/[v2]/[/some]"},
            notes=("label [unused1] :smile: \x1b[31mred\rback", "path [/some/x]"),
        ),
        status="failed",
        failure="[bold]no[/] [PAD]",
    )
    text = shown(capsys, record)
    for expected in ("org/[unused1][/some]", "runs/[v2]/[/some]/record.json", "[unused1] :smile:", "[bold]no[/] [PAD]"):
        assert expected in text
    assert "\x1b" not in text
    assert "\r" not in text


def test_output_that_is_no_terminal_has_no_control_characters_even_with_force_color(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.delenv("NO_COLOR", raising=False)
    text = shown(capsys, records.completed())
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]", text)


def test_long_paths_are_printed_whole(capsys: pytest.CaptureFixture[str]) -> None:
    assert f"{LONG}/record.json" in re.sub(r"\n\s*", "", shown(capsys, large_language_model()))


def test_quiet_leaves_out_the_notes_and_keeps_the_tables(capsys: pytest.CaptureFixture[str]) -> None:
    record = records.completed(records.planned(notes=("said before",)))
    assert "said before" in shown(capsys, record)
    text = shown(capsys, record, quiet=True)
    assert "said before" not in text
    assert "optimizer state" in text


def test_json_is_one_document_that_reads_back_as_the_record(capsys: pytest.CaptureFixture[str]) -> None:
    record = records.completed()
    emit(record, json=True, quiet=False)
    text = capsys.readouterr().out
    assert RunRecord.model_validate_json(text) == record


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_numbers_that_json_lacks_become_null(number: float, capsys: pytest.CaptureFixture[str]) -> None:
    record = records.completed(eval=(EvalFacts(epoch=1.0, update=1, eval_loss=number),))

    def refuse(name: str) -> None:
        raise AssertionError(name)

    emit(record, json=True, quiet=False)
    document = json.loads(capsys.readouterr().out, parse_constant=refuse)
    assert document["eval"][0]["eval_loss"] is None


def run_report(*arguments: str) -> str:
    app = typer.Typer()
    app.command()(report)
    result = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert result.exit_code == 0
    assert result.stderr == ""
    return result.stdout


def test_saved_records_and_run_folders_are_reported_in_the_order_given(tmp_path: Path) -> None:
    (tmp_path / "record.json").write_text(records.completed().model_dump_json())
    other = tmp_path / "other.json"
    other.write_text(large_language_model().model_dump_json())
    text = run_report(str(other), str(tmp_path))
    assert text.index("MistralForCausalLM") < text.index("DistilBertForSequenceClassification")
    document = json.loads(run_report(str(other), str(tmp_path), "--json"))
    assert document["command"] == "report"
    assert [run["model"]["task"] for run in document["runs"]] == ["causal-lm", "classification"]


def test_an_encoding_without_the_characters_of_a_name_is_no_error_and_torch_is_not_needed(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    path.write_text(records.completed(records.planned(model=records.model("модель"))).model_dump_json())
    program = (
        "import sys; from pathlib import Path; from effcli.cli.report import report\n"
        "report([Path(sys.argv[1])]); sys.exit('torch' in sys.modules)"
    )
    result = subprocess.run(
        [sys.executable, "-c", program, str(path)],
        capture_output=True,
        env={"PYTHONIOENCODING": "ascii", "PYTHONPATH": os.pathsep.join(sys.path)},
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert rb"\u043c\u043e" in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 80
