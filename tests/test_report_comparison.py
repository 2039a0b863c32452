"""Several runs side by side in the terminal: what stands in the tables, and what must never."""

from __future__ import annotations

import io
import json
import re
import statistics
import sys

import pytest

from effcli.measure.comparison_record import Attempt, ComparisonRecord, compared
from effcli.measure.record import RunRecord
from effcli.memory.plan import exact_plan
from effcli.report.charts.memory import measured_live
from effcli.report.output import emit_comparison
from effcli.report.rows import memory_rows
from tests import comparisons

MIB = 2**20
EVERY = {
    "three": comparisons.three,
    "two seeds": comparisons.two_seeds,
    "planned": comparisons.planned_only,
    "failed": comparisons.one_failed,
    "language models": comparisons.of_language_models,
    "hostile": comparisons.hostile,
    "nothing": lambda: compared([], [], status="planned"),
    "nothing started": lambda: compared([Attempt(name="adamw", seed=1)], [], status="interrupted"),
}


def shown(capsys: pytest.CaptureFixture[str], record: ComparisonRecord, *, quiet: bool = False) -> str:
    emit_comparison(record, json=False, quiet=quiet, folder="runs/the comparison")
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def part(text: str, title: str) -> str:
    """Return the lines from a title to the blank line after its table."""
    return re.split(r"\n\n", text[text.index(f"\n{title}\n") + 1 :])[0]


def row(text: str, label: str) -> list[str]:
    """Return the cells of the first row with that label."""
    line = next(line for line in text.splitlines() if line.startswith(f"{label} "))
    return re.split(r"\s{2,}", line.strip())


def line_below(text: str, label: str) -> list[str]:
    lines = text.splitlines()
    return lines[next(number for number, line in enumerate(lines) if line.startswith(f"{label} ")) + 1].split()


def one_line(text: str) -> str:
    return " ".join(text.split())


def number(cell: str) -> float:
    return float(cell.replace(",", ""))


@pytest.mark.parametrize("kind", EVERY)
def test_nothing_is_wider_than_80_columns_and_nothing_is_cut_off(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, EVERY[kind]())
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text
    assert all(line == line.rstrip() for line in text.splitlines())


@pytest.mark.parametrize("columns", ["40", "60", "72", "200"])
@pytest.mark.parametrize("kind", ["two seeds", "failed"])
def test_every_number_survives_any_width(
    columns: str, kind: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    record = EVERY[kind]()
    usual = shown(capsys, record)
    monkeypatch.setenv("COLUMNS", columns)
    text = shown(capsys, record)
    assert max(map(len, text.splitlines())) <= int(columns)
    assert "…" not in text
    for amount in re.findall(r"(?<=\s)±?[\d,]+\.\d+(?=\s)", usual):
        assert amount in text
    assert re.sub(r"[^\w.]", "", usual.partition("\nMemory")[0]) == re.sub(r"[^\w.]", "", text.partition("\nMemory")[0])


def test_memory_is_that_of_the_summary_in_one_unit(capsys: pytest.CaptureFixture[str]) -> None:
    record = comparisons.three()
    memory = part(shown(capsys, record), "Memory")
    assert "state, MiB" in memory
    assert "peak, MiB" in memory
    for line in record.summary:
        _, *cells = row(memory, line.name)
        predicted, measured, _, peak, allocated, _, resident = map(number, cells)
        for told, amount in (
            (predicted, line.predicted_state_bytes),
            (measured, line.measured_state_bytes),
            (peak, line.predicted_peak_allocated_bytes),
            (allocated, line.peak_allocated_bytes),
            (resident, line.peak_rss_bytes),
        ):
            assert amount is not None
            assert told == pytest.approx(amount / MIB, abs=0.005)
    assert not re.search(r"\d [KMG]B\b", memory)


def test_ratios_are_to_the_first(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, comparisons.three())
    memory = part(text, "Memory")
    assert row(memory, "adamw")[3] == "1.00"
    assert row(memory, "adam8bit")[3] == f"{134_004_336 / 526_264_752:.3f}" == "0.255"
    assert row(memory, "adafactor")[3] == "0.00136"
    assert row(memory, "adam8bit")[6] == "0.637"
    assert row(part(text, "Speed and results"), "adafactor")[2] == f"{1.58 / 1.31:.2f}"
    assert "to adamw, the first; measured amounts" in text


def test_ratios_far_below_one_keep_their_digits(capsys: pytest.CaptureFixture[str]) -> None:
    small = comparisons.run("adafactor")
    assert small.measured is not None
    measured = small.measured.model_copy(update={"optimizer_state_bytes": 107_411})
    record = comparisons.comparison([comparisons.run("adamw"), small.model_copy(update={"measured": measured})])
    assert row(part(shown(capsys, record), "Memory"), "adafactor")[3] == "0.000204"


def test_without_measurements_ratios_are_predicted_and_nothing_is_called_measured(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = shown(capsys, comparisons.planned_only())
    assert text.startswith("effcli compare: planned, 3 runs\n")
    assert row(part(text, "Memory"), "adam8bit") == ["adam8bit", "127.80", "0.255", "799.60", "0.637"]
    assert "to adamw, the first; predicted amounts" in text
    assert "measured" not in text
    assert "Speed and results" not in text
    assert "resident" not in text


def test_a_small_amount_is_not_nothing_and_nothing_is_not_an_amount(capsys: pytest.CaptureFixture[str]) -> None:
    large, none = comparisons.run("adamw"), comparisons.run("adam8bit")
    facts = {"state_bytes": 0, "state_elements": 0, "tensors": {}}
    sgd = none.optimizer.model_copy(update={**facts, "name": "sgd"})
    assert none.measured is not None
    nothing = none.measured.model_copy(update={"optimizer_state_bytes": 0, "optimizer_state_elements": 0})
    tiny = large.optimizer.model_copy(update={"name": "tiny", "state_bytes": 100})
    record = comparisons.comparison(
        [
            large,
            none.model_copy(update={"optimizer": sgd, "measured": nothing}),
            comparisons.planned("adamw", optimizer=tiny),
        ]
    )
    memory = part(shown(capsys, record), "Memory")
    assert row(memory, "sgd")[1:4] == ["0", "0", "0"]
    assert row(memory, "tiny")[1:4] == ["<0.01", "n/a", "n/a"]


def test_states_and_peaks_have_the_unit_that_suits_each(capsys: pytest.CaptureFixture[str]) -> None:
    run = comparisons.run("adamw")
    assert run.measured is not None
    large = run.measured.model_copy(update={"peak_allocated_bytes": 80 * 2**30, "peak_rss_bytes": 90 * 2**30})
    memory = part(shown(capsys, comparisons.comparison([run.model_copy(update={"measured": large})])), "Memory")
    assert row(memory, "adamw")[1:] == ["501.89", "501.89", "1.00", "1.23", "80.00", "1.00", "90.00"]
    assert re.findall(r"[MG]iB", memory) == ["MiB", "GiB", "GiB"]


def test_a_state_that_is_not_as_predicted_is_told_to_the_byte(capsys: pytest.CaptureFixture[str]) -> None:
    run = comparisons.run("adam8bit")
    assert run.measured is not None
    more = run.measured.model_copy(update={"optimizer_state_bytes": 134_004_336 + 2048})
    record = comparisons.comparison([comparisons.run("adamw"), run.model_copy(update={"measured": more})])
    text = one_line(shown(capsys, record))
    assert "state measured: adam8bit 2,048 bytes more than predicted" in text
    assert "to the byte as predicted" not in text
    assert "state measured to the byte as predicted" in one_line(shown(capsys, comparisons.three()))


def test_every_prediction_names_its_basis(capsys: pytest.CaptureFixture[str]) -> None:
    run = comparisons.run("adam8bit")
    probed = run.model_copy(update={"optimizer": run.optimizer.model_copy(update={"basis": "probed"})})
    text = one_line(shown(capsys, comparisons.comparison([comparisons.run("adamw"), probed])))
    assert "predicted state exact for adamw, probed for adam8bit; peak traced" in text


def test_a_peak_that_rests_on_an_assumption_is_not_called_traced(capsys: pytest.CaptureFixture[str]) -> None:
    run = comparisons.run("adam8bit")
    assert run.optimizer.plan is not None
    plan = run.optimizer.plan.model_copy(update={"basis": {**run.optimizer.plan.basis, "temporaries": "assumed"}})
    guessed = run.model_copy(update={"optimizer": run.optimizer.model_copy(update={"plan": plan})})
    traced = [comparisons.run(name) for name in ("adamw", "adafactor")]
    text = one_line(shown(capsys, comparisons.comparison([*traced, guessed])))
    assert "peak traced for adamw and adafactor, traced (temporaries assumed) for adam8bit" in text
    (peak,) = (line for line in memory_rows(guessed) if line.label == "peak allocated")
    assert peak.basis == "assumed"


def test_no_plan_of_another_batch_is_told_as_that_of_the_profiled_one(capsys: pytest.CaptureFixture[str]) -> None:
    run = comparisons.run("adamw")
    assert run.measured is not None
    assert run.measured.profiled is not None
    profiled = run.measured.profiled.model_copy(update={"planned_peak_allocated_bytes": None})
    other = run.model_copy(update={"measured": run.measured.model_copy(update={"profiled": profiled})})
    text = shown(capsys, comparisons.comparison([other]))
    assert row(part(text, "Memory"), "adamw")[4:6] == ["n/a", "1,254.73"]
    assert "8 rows x 128 tokens; no peak was predicted for that batch" in one_line(text)
    assert measured_live(run)
    assert not measured_live(other)


def test_what_has_no_ratio_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    none = comparisons.run("adafactor")
    assert none.measured is not None
    facts = none.optimizer.model_copy(update={"state_bytes": 0, "state_elements": 0, "tensors": {}, "name": "sgd"})
    measured = none.measured.model_copy(update={"optimizer_state_bytes": 0, "optimizer_state_elements": 0})
    sgd = none.model_copy(update={"optimizer": facts, "measured": measured})
    text = one_line(shown(capsys, comparisons.comparison([sgd, comparisons.run("adamw")])))
    assert "ratio to sgd, the first; measured amounts; no ratio of states: its own is 0" in text


def test_where_every_run_failed_early_nothing_is_said_of_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    failed = [Attempt(name=name, seed=1, status="failed", failure="no data", exit_code=2) for name in ("sgd", "adamw")]
    text = shown(capsys, compared(failed, [], status="failed"))
    assert not re.search("^(ratio|predicted)", text, re.MULTILINE)


def test_on_a_cpu_the_peak_is_that_of_a_profiled_update_or_has_a_reason(capsys: pytest.CaptureFixture[str]) -> None:
    text = one_line(shown(capsys, comparisons.three()))
    assert "the CPU's allocator during one warm update: update 3, 8 rows x 128 tokens; predicted for that" in text
    run = comparisons.run("adamw")
    assert run.measured is not None
    unprofiled = run.measured.model_copy(update={"profiled": None, "peak_allocated_bytes": None})
    text = shown(capsys, comparisons.comparison([run.model_copy(update={"measured": unprofiled})]))
    assert row(part(text, "Memory"), "adamw")[4:7] == ["1,254.73", "n/a", "1.00"]
    assert "n/a: no update was profiled on this CPU; --profile-memory does that" in text
    loop = {"spec": {**run.spec, "loop": {**run.spec["loop"], "profile_memory": True}}}
    asked = run.model_copy(update={"measured": unprofiled, **loop})
    assert "n/a: no update was profiled on this CPU; the notes say why" in shown(
        capsys, comparisons.comparison([asked])
    )
    assert "measured states, predicted peaks" in text


def test_on_cuda_the_peak_is_the_allocators_counter(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, comparisons.of_language_models())
    assert "CUDA's counter" in text
    assert "resident" not in text
    assert "profiled" not in text
    assert row(part(text, "Speed and results"), "adamw")[-1] == "1.43"
    assert "accuracy" not in text


def test_bars_are_on_one_scale_and_their_parts_are_those_of_the_peak(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, comparisons.three())
    bars = part(text, "At the predicted peak of the largest batch")
    lines = {name: next(line for line in bars.splitlines() if line.startswith(name)) for name in comparisons.KINDS}
    widths = {name: sum(line.count(fill) for fill in "█▓░▒") for name, line in lines.items()}
    for name, line in lines.items():
        plan = comparisons.run(name).optimizer.plan
        assert plan is not None
        assert plan.peak_allocated_bytes is not None
        assert plan.peak_phase == "step"
        assert widths[name] == pytest.approx(widths["adamw"] * plan.peak_allocated_bytes / 1_315_681_736, abs=1)
        assert line.count("░") == pytest.approx(
            widths["adamw"] * comparisons.KINDS[name].state_bytes / 1_315_681_736, abs=1
        )
        assert line.endswith(f"{plan.peak_allocated_bytes / MIB:,.2f}")
    assert "█ weights  ▓ gradients  ░ state  ▒ activations and temporaries" in bars


def test_bars_are_those_of_a_seed_that_completed(capsys: pytest.CaptureFixture[str]) -> None:
    failed, done = (comparisons.run("adamw", seed) for seed in (42, 43))
    assert failed.optimizer.plan is not None
    other = failed.optimizer.model_copy(update={"plan": comparisons.plan(comparisons.KINDS["adafactor"])})
    record = comparisons.comparison(
        [failed.model_copy(update={"optimizer": other, "status": "failed", "failure": "stopped"}), done]
    )
    bars = part(shown(capsys, record), "At the predicted peak of the largest batch")
    assert row(bars, "adamw")[-1] == "1,254.73"
    assert record.run_for("adamw") == done
    assert record.run_for("lion") is None


def test_without_a_traced_peak_bars_end_before_activations(capsys: pytest.CaptureFixture[str]) -> None:
    run = comparisons.planned("adamw")
    exact = exact_plan(
        weights_bytes=comparisons.WEIGHTS,
        gradients_bytes=comparisons.WEIGHTS,
        optimizer_state_bytes=526_264_752,
        accum=1,
    )
    untraced = run.model_copy(update={"optimizer": run.optimizer.model_copy(update={"plan": exact})})
    record = comparisons.comparison([untraced, comparisons.planned("adam8bit")], status="planned")
    text = shown(capsys, record)
    bars = part(text, "Before activations, as predicted")
    assert "▒" not in bars
    assert row(bars, "adamw")[-1] == "1,003.77"
    assert row(part(text, "Memory"), "adamw")[3] == "n/a"
    assert "peak n/a (activations could not be traced) for adamw, traced for adam8bit" in one_line(text)


def test_speed_and_results_stand_beside_the_baselines(capsys: pytest.CaptureFixture[str]) -> None:
    results = part(shown(capsys, comparisons.three()), "Speed and results")
    assert row(results, "adamw")[1:] == ["1.3100", "1.00", "6.1", "0.3049", "0.3549", "0.9000", "0.9200"]
    assert row(results, "majority class") == ["majority class", "0.6838", "0.8122"]
    assert row(results, "bag of words") == ["bag of words", "0.7034", "0.8032"]


def test_several_seeds_show_mean_and_deviation(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, comparisons.two_seeds())
    results = part(text, "Speed and results")
    losses = [comparisons.run("adamw", seed).history[-1].loss or 0 for seed in (42, 43)]
    seconds = [1.31, 1.31 * 1.02]
    assert row(results, "adamw")[4] == f"{statistics.mean(losses):.4f}"
    below = line_below(results, "adamw")
    assert below[0] == f"±{statistics.stdev(seconds):.4f}"
    assert below[2] == f"±{statistics.stdev(losses):.4f}"
    assert "seeds       42, 43; amounts are means over them" in text
    assert "none: every seed took the same bytes" in text
    assert "±" not in part(text, "Memory")


def test_a_name_of_which_one_seed_failed_shows_the_mean_of_the_others_and_says_so(
    capsys: pytest.CaptureFixture[str],
) -> None:
    runs = [comparisons.run("adamw", seed) for seed in (42, 43, 44)]
    failed = comparisons.run("adamw", 45, updates=10, status="failed", failure="out of memory")
    text = shown(capsys, comparisons.comparison([*runs, failed], status="failed"))
    results = part(text, "Speed and results")
    assert line_below(results, "adamw")[:3] == ["1", "of", "4"]
    assert "failed" in results
    assert row(results, "adamw")[4] == f"{statistics.mean(run.history[-1].loss or 0 for run in runs):.4f}"


def test_bytes_that_differ_between_seeds_show_their_deviation(capsys: pytest.CaptureFixture[str]) -> None:
    runs = [comparisons.run("adamw", seed) for seed in (42, 43)]
    assert runs[1].measured is not None
    more = runs[1].measured.model_copy(update={"peak_allocated_bytes": 1_315_683_784 + 4 * MIB})
    record = comparisons.comparison([runs[0], runs[1].model_copy(update={"measured": more})])
    memory = part(shown(capsys, record), "Memory")
    assert row(memory, "adamw")[5] == "1,256.73"
    assert f"±{statistics.stdev([0, 4]):.2f}" in line_below(memory, "adamw")


def test_what_is_not_completed_is_told_with_its_reason_and_what_to_type(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, comparisons.one_failed())
    assert text.startswith("effcli compare: failed, 1 of 4 runs completed\n")
    assert row(part(text, "Memory"), "adamw")[1:3] == ["501.89", "501.89"]
    assert row(part(text, "Memory"), "adafactor")[1:] == ["0.68", "n/a", "n/a", "672.49", "n/a", "n/a", "n/a"]
    assert row(part(text, "Memory"), "lion8bit")[1:] == ["n/a"] * 7
    assert [line_below(part(text, "Memory"), name)[0] for name in ("adafactor", "adam8bit", "lion8bit")] == [
        "failed",
        "interrupted",
        "missing",
    ]
    unfinished = one_line(part(text, "Not completed"))
    assert "adafactor 42 failed 0 of 60 the loss is not finite at update 1: give a lower --lr" in unfinished
    assert "adam8bit 42 interrupted 20 of 60 stopped by SIGINT" in unfinished
    assert "lion8bit 42 missing n/a not started" in unfinished
    assert "adam8bit, seed 42: its results are those after update 20 of 60" in text
    assert "effcli compare --resume --out 'runs/the comparison'" in one_line(text)


def test_a_comparison_says_where_it_lies_also_where_no_run_left_a_record(capsys: pytest.CaptureFixture[str]) -> None:
    text = one_line(shown(capsys, compared([Attempt(name="adamw", seed=1)], [], status="interrupted")))
    assert "effcli compare --resume --out 'runs/the comparison'" in text


def test_a_name_of_many_pages_leaves_room_for_what_it_names(capsys: pytest.CaptureFixture[str]) -> None:
    run = comparisons.run("adamw")
    huge = run.model_copy(update={"optimizer": run.optimizer.model_copy(update={"name": "x" * 10_000})})
    text = shown(capsys, comparisons.comparison([huge, comparisons.run("adafactor")]))
    assert len(text) < 10_000


def test_what_could_not_be_planned_is_told_without_a_command_that_resumes(capsys: pytest.CaptureFixture[str]) -> None:
    done = comparisons.comparison([comparisons.planned("adamw")])
    wrong = Attempt(name="galore", seed=42, status="failed", failure="it needs a matrix", exit_code=2)
    text = shown(capsys, compared([*done.attempts, wrong], done.runs, status="failed"))
    assert text.startswith("effcli compare: failed, 1 of 2 runs planned\n")
    assert row(part(text, "Not planned"), "galore") == ["galore", "42", "failed", "n/a", "it needs a matrix"]
    assert "--resume" not in text


def test_where_the_first_has_no_measurement_there_is_no_ratio(capsys: pytest.CaptureFixture[str]) -> None:
    failed = comparisons.run("adamw", updates=0, status="failed", failure="out of memory")
    memory = part(shown(capsys, comparisons.comparison([failed, comparisons.run("adam8bit")])), "Memory")
    assert row(memory, "adam8bit")[1:7] == ["127.80", "127.80", "n/a", "799.60", "799.61", "n/a"]


def test_what_all_runs_share_is_told_once(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, comparisons.three())
    for told in ("distilbert-base-cased", "pairs.csv, 3,668 training rows", "engine pytorch, fp32, on cpu (x86_64)",
                 "4 x 2 = 8 rows per update", "torch 2.13.0+cpu"):  # fmt: skip
        assert text.count(told) == 1
    assert "Differs" not in text


def test_what_differs_is_told_by_value_and_more_than_the_optimizer_with_a_warning(
    capsys: pytest.CaptureFixture[str],
) -> None:
    runs = [comparisons.run(name) for name in comparisons.KINDS]

    def with_lr(run: RunRecord, lr: float) -> RunRecord:
        return run.model_copy(update={"spec": {**run.spec, "optim": {**run.spec["optim"], "lr": lr}}})

    text = shown(capsys, comparisons.comparison([runs[0], with_lr(runs[1], 1e-3), runs[2]]))
    assert "lr          5e-05: adamw, adam8bit; 0.001: adafactor" in text
    assert "compare more than optimizers" not in text
    environment = {**runs[1].environment, "packages": {**runs[1].environment["packages"], "bitsandbytes": "0.49.0"}}
    other = runs[1].model_copy(update={"environment": environment})
    slow = {**runs[2].spec, "loop": {**runs[2].spec["loop"], "precision": "bf16", "compile": True}}
    text = shown(capsys, comparisons.comparison([runs[0], other, runs[2].model_copy(update={"spec": slow})]))
    differs = one_line(part(text, "Differs between the runs"))
    assert "precision fp32: adamw, adafactor; bf16: adam8bit" in differs
    assert "compile off: adamw, adafactor; on: adam8bit" in differs
    assert "bitsandbytes 0.50.2: adamw, adam8bit; 0.49.0: adafactor" in differs
    assert "they differ in precision, compile, bitsandbytes: the tables" in one_line(text)
    assert "compare more than optimizers" in one_line(text)


def test_records_of_older_versions_lack_settings_that_had_no_other_value(capsys: pytest.CaptureFixture[str]) -> None:
    old, new = comparisons.run("adamw"), comparisons.run("adam8bit")
    loop = {**new.spec["loop"], "profile_memory": False, "auto_batch": False}
    record = comparisons.comparison([old, new.model_copy(update={"spec": {**new.spec, "loop": loop}})])
    assert "Differs" not in shown(capsys, record)


def test_names_of_the_user_are_printed_and_control_characters_are_not(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, comparisons.hostile())
    assert "\x1b" not in text
    assert "\r" not in text
    flat = re.sub(r"\s+", "", text)
    for told in ("</script><imgsrc=xonerror=attacked=1>", "[bold]no[/][PAD]", r"a\x1b[31mredbackline"):
        assert told in flat


def test_an_encoding_without_blocks_gets_ascii(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", stream)
    emit_comparison(comparisons.two_seeds(), json=False, quiet=False)
    stream.flush()
    text = stream.buffer.getvalue().decode("ascii")
    assert "\\x" not in text
    assert "\\u" not in text
    assert "# weights  = gradients  . state  - activations and temporaries" in text
    assert "+-0.0136" in text


def test_quiet_leaves_out_what_runs_said_and_json_is_the_record(capsys: pytest.CaptureFixture[str]) -> None:
    record = comparisons.one_failed().model_copy(update={"notes": ("The first losses differ.",)})
    assert "All weights are random" in shown(capsys, record)
    quiet = shown(capsys, record, quiet=True)
    assert "All weights are random" not in quiet
    assert "The first losses differ." in quiet
    emit_comparison(record, json=True, quiet=False)
    text = capsys.readouterr().out
    assert ComparisonRecord.model_validate_json(text) == record
    assert [line["name"] for line in json.loads(text)["summary"]] == ["adamw", "adafactor", "adam8bit", "lion8bit"]


def test_a_note_that_not_all_runs_have_says_whose_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    runs = [comparisons.run(name) for name in comparisons.KINDS]
    own = runs[2].model_copy(update={"notes": (*runs[2].notes, "15 tensors in 8 bit")})
    text = shown(capsys, comparisons.comparison([*runs[:2], own]))
    assert "note        adam8bit: 15 tensors in 8 bit" in text
    assert text.count("All weights are random") == 1


def test_a_note_of_one_seed_says_of_which_and_one_of_all_seeds_of_a_name_says_the_name_alone(
    capsys: pytest.CaptureFixture[str],
) -> None:
    runs = [comparisons.run(name, seed) for name in ("adamw", "adafactor") for seed in (42, 43)]
    notes = (("slow", "warm"), ("warm",), (), ())
    record = comparisons.comparison(
        [run.model_copy(update={"notes": own}) for run, own in zip(runs, notes, strict=True)], notes=()
    )
    text = shown(capsys, record)
    assert "note        adamw, seed 42: slow\n" in text
    assert "note        adamw: warm\n" in text


def test_what_runs_said_meanwhile_is_not_said_again_on_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = comparisons.run("adamw").model_copy(update={"notes": ("Of a run.",)})
    record = comparisons.comparison([run], notes=("Of the comparison.",))
    for terminal, said in ((False, True), (True, False), (True, True)):
        monkeypatch.setattr("effcli.report.output.is_terminal", lambda stream, answer=terminal: answer)
        emit_comparison(record, json=False, quiet=False, said=said)
        text = capsys.readouterr().out
        assert "Of the comparison." in text
        assert ("Of a run." in text) == (not (terminal and said))
