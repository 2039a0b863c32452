"""What people see of a plan: phases, peak, verdict, parts, changes and the chart, in 80 columns."""

from __future__ import annotations

import io
import json
import re
import sys
from typing import Any

import pytest

from effcli.measure.record import RunRecord
from effcli.memory.plan import Change, MemoryPlan
from effcli.report.output import emit, emit_estimate
from effcli.report.skyline import skyline, total_bytes
from tests import plans, records
from tests.plans import GIB, MIB, STATE

NAMES = {
    "optimizer state",
    "attention",
    "dropout masks",
    "autocast copies of weights",
    "cuBLAS workspaces",
    "logits and loss",
}


def shown(capsys: pytest.CaptureFixture[str], *made: MemoryPlan, **changes: Any) -> str:
    emit_estimate(plans.estimate(*made, **changes), json=False, quiet=False)
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def section(text: str, title: str) -> list[list[str]]:
    """Return the rows of the table below a title, each split into its cells."""
    lines = text.split(f"{title}", 1)[1].split("\n\n", 1)[0].splitlines()
    return [re.split(r"\s{2,}", line.strip()) for line in lines[1:] if line.strip() and "──" not in line]


def fact(text: str, label: str) -> str:
    """Return the value beside a label, on one line."""
    found = re.search(rf"^{label} +(.*(?:\n {{8,}}.*)*)", text.split("Peak of an update with", 1)[-1], re.MULTILINE)
    assert found, text
    return " ".join(found[1].split())


VARIANTS = {
    "usual": (plans.plan(),),
    "three": (plans.plan(), plans.plan(fits="tight"), plans.plan(fits="no")),
    "no budget": (plans.plan(budget_bytes=None, fits=None, largest_batch_size=None),),
    "cpu": (plans.plan(device="cpu", context_bytes=0, fits=None, budget_bytes=None, largest_batch_size=None),),
    "long names": (
        plans.plan(
            modules=[{"name": "a.very.long." * 12, "category": "activations", "num_bytes": MIB, "basis": "traced"}],
            changes=[
                Change(
                    name="a change " * 8,
                    flags="--flag " * 9,
                    peak_allocated_bytes=GIB,
                    saved_bytes=GIB,
                    peak_phase="backward",
                )
            ],
        ),
    ),
    "huge": (plans.plan(**plans.scaled(400)),),
    "bare": (plans.plan(parts=(), modules=(), changes=(), timeline=(), notes=()),),
}  # fmt: skip


@pytest.mark.parametrize("kind", VARIANTS)
def test_nothing_is_wider_than_80_columns_and_nothing_is_cut_off(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, *VARIANTS[kind])
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text
    assert all(line == line.rstrip() for line in text.splitlines())


def test_phases_of_both_updates_stand_in_one_unit_with_the_peak_marked_and_the_basis_below(
    capsys: pytest.CaptureFixture[str],
) -> None:
    rows = section(shown(capsys, plans.plan()), "The highest moment of each phase, in MiB; > is the peak")
    assert [row[0] for row in rows[1:]] == [
        "first update", "forward", "backward", "step", "later updates", "forward", "> backward", "step", "basis",
    ]  # fmt: skip
    assert rows[0] == ["weights", "gradients", "state", "activations", "temporaries", "total"]
    peak = next(row for row in rows if row[0] == "> backward")
    amounts = [float(cell.replace(",", "")) for cell in peak[1:]]
    assert amounts[-1] == pytest.approx(sum(amounts[:-1]), abs=0.03)
    assert amounts[2] == pytest.approx(STATE / MIB, abs=0.005)
    assert rows[-1][1:] == ["exact", "exact", "exact", "traced", "traced"]


@pytest.mark.parametrize("factor", [1, 4, 400])
def test_with_a_column_for_exchange_no_word_of_the_phases_is_cut(
    factor: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a process every part of which takes thousands of MiB as well."""
    grown = plans.plan(**plans.scaled(factor)) if factor > 1 else plans.plan()
    text = shown(capsys, plans.exchanging(grown))
    assert max(map(len, text.splitlines())) <= 80
    unit = "GiB" if factor == 400 else "MiB"
    rows = section(text, f"Highest moments, first and later updates, in {unit}; > is the peak")
    assert rows[0] == ["weights", "gradients", "state", "activ.", "temp.", "exchange", "total"]
    assert [row[0] for row in rows[1:]] == [
        "first", "forward", "backward", "step", "later", "forward", ">backward", "step", "basis",
    ]  # fmt: skip
    assert rows[-1][1:] == ["exact", "exact", "exact", "traced", "traced", "assumed"]


def test_what_the_device_needs_is_summed_up_with_the_basis_of_each_amount(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, plans.plan())
    assert fact(text, "verdict").startswith("fits: 2.59 GiB of 16.00 GiB, 13.41 GiB to spare")
    assert fact(text, "verdict").endswith("the largest batch that fits is 80")
    assert fact(text, "peak").startswith("1.99 GiB (traced)")
    assert fact(text, "peak").endswith("in the backward phase of later updates")
    assert fact(text, "reserved").startswith("2.15 GiB (traced)")
    assert fact(text, "context").startswith("450.00 MiB (assumed)")
    assert fact(text, "device").startswith("2.59 GiB = reserved + context")


@pytest.mark.parametrize(
    ("changes", "wording"),
    [
        ({"fits": "no", "budget_bytes": 2 * GIB, "largest_batch_size": 2},
         "no: 2.59 GiB, 602.00 MiB more than the 2.00 GiB there are; the largest batch that fits is 2"),
        ({"fits": "no", "budget_bytes": GIB, "largest_batch_size": 0}, "not even a batch of 1 fits"),
        ({"fits": "tight", "budget_bytes": 2700 * MIB}, "tight: 2.59 GiB of 2.64 GiB, 50.00 MiB to spare"),
    ],
)  # fmt: skip
def test_a_verdict_says_by_how_much(changes: dict[str, Any], wording: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert wording in fact(shown(capsys, plans.plan(**changes)), "verdict")


def test_without_a_budget_there_is_no_verdict_and_on_a_cpu_no_allocator(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, *VARIANTS["cpu"])
    for label in ("verdict", "reserved", "context"):
        assert not re.search(rf"^{label} ", text, re.MULTILINE)


def test_the_optimizer_s_share_comes_with_what_8_bit_state_would_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert fact(shown(capsys, plans.plan()), "optimizer") == (
        "its state is 24.7 % of the peak, activations are 59.0 %; 8-bit state would save 374.09 MiB (18.4 %)"
    )


def test_where_activations_dominate_8_bit_state_is_said_to_help_barely(capsys: pytest.CaptureFixture[str]) -> None:
    small = STATE // 50
    phases = {"backward": plans.phase(0, 4000 * MIB, 0, state=small)}
    barely = Change(
        name="8-bit state",
        flags="--optim adam8bit",
        peak_allocated_bytes=4240 * MIB,
        saved_bytes=8 * MIB,
        peak_phase="backward",
    )
    text = shown(capsys, plans.plan(phases=phases, changes=[barely], peak_allocated_bytes=4261 * MIB))
    assert "8-bit state would barely help, by 8.00 MiB (0.2 %): activations dominate" in fact(text, "optimizer")
    step = plans.plan(changes=[barely.model_copy(update={"saved_bytes": 0})], peak_phase="step")
    assert fact(shown(capsys, step), "optimizer").endswith(": the peak is in the step phase")


def test_every_part_of_the_peak_is_named_with_share_and_basis(capsys: pytest.CaptureFixture[str]) -> None:
    rows = section(shown(capsys, plans.plan()), "Live at the peak")
    parts = {row[0]: row[1:] for row in rows[1:]}
    assert set(parts) >= NAMES
    assert parts["attention"][:3] == ["420.00 MiB", "20.7 %", "traced"]
    assert parts["cuBLAS workspaces"][2] == "assumed"
    sizes = [float(cells[0].split()[0]) for cells in parts.values()]
    assert sizes == sorted(sizes, reverse=True)
    assert sum(float(cells[1].split()[0]) for cells in parts.values()) == pytest.approx(100, abs=0.6)


def test_changes_are_ranked_and_say_where_the_peak_is_then(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, plans.plan())
    rows = section(text, "What a change would do to the peak")
    assert rows[1] == ["checkpointing: --gradient-checkpointing", "-900.00 MiB", "-44.3 %", "step"]
    assert ["fused instead of foreach: --optim-arg", "the same", "backward"] in rows
    assert rows[-1] == ["one more accumulation step: --accum 2", "+230.03 MiB", "+11.3 %", "backward"]


def test_modules_are_named_with_what_they_hold(capsys: pytest.CaptureFixture[str]) -> None:
    held = [
        {"name": name, "category": category, "num_bytes": num_bytes, "basis": "traced"}
        for name, category, num_bytes in (
            ("", "temporaries", 900 * MIB),
            ("head.weight", "optimizer_state", 40 * MIB),
            ("head.weight", "weights", 20 * MIB),
            ("layer.0", "activations", 30 * MIB),
        )
    ]
    rows = section(shown(capsys, plans.plan(modules=held)), "Who holds most at the peak")
    assert [row[:3] for row in rows[1:]] == [
        ["head.weight", "state", "40.00 MiB"],
        ["layer.0", "activations", "30.00 MiB"],
        ["head.weight", "weights", "20.00 MiB"],
    ]


def test_several_optimizers_get_a_row_each_and_the_first_one_the_details(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, plans.plan(), plans.plan(fits="tight"), plans.plan(fits="no", budget_bytes=2 * GIB))
    rows = section(text, "Peak of an update")
    assert [row[0] for row in rows[1:]] == ["adamw", "adam8bit", "adafactor"]
    assert rows[3][1:] == ["1.99 GiB", "backward", "2.59 GiB", "no", "-602.00 MiB", "80"]
    assert text.count("Live at the peak") == 1
    assert "Peak of an update with adamw" in text


def test_settings_of_the_peak_are_said_and_its_absence_too(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, plans.plan())
    assert re.search(r"^batch +8 x 1 = 8 rows per update, 512 tokens each$", text, re.MULTILINE)
    emit_estimate(plans.estimate(plans.plan(), peak=None), json=False, quiet=False)
    assert "every total is a lower bound; --batch-size 8 asks" in capsys.readouterr().out


def test_notes_of_the_plan_are_shown_unless_quiet(capsys: pytest.CaptureFixture[str]) -> None:
    assert "the mask is all ones" in shown(capsys, plans.plan())
    emit_estimate(plans.estimate(plans.plan()), json=False, quiet=True)
    assert "the mask is all ones" not in capsys.readouterr().out


def test_the_json_of_an_estimate_holds_every_key_that_others_rely_on(capsys: pytest.CaptureFixture[str]) -> None:
    emit_estimate(plans.estimate(plans.plan()), json=True, quiet=False)
    plan = json.loads(capsys.readouterr().out)["optimizers"][0]["plan"]
    assert {
        "phases", "first_phases", "basis", "peak_phase", "peak_allocated_bytes", "peak_reserved_bytes", "context_bytes",
        "device_total_bytes", "fits", "largest_batch_size", "parts", "modules", "changes", "timeline",
    } <= set(plan)  # fmt: skip


@pytest.mark.parametrize("accum", [1, 2, 7])
@pytest.mark.parametrize("width", [40, 79])
def test_the_chart_keeps_to_its_width_and_marks_the_highest_moment(accum: int, width: int) -> None:
    points = plans.timeline(accum)
    marks, *rows, phases, updates = skyline(points, "utf-8", width)
    assert max(map(len, (marks, *rows, phases, updates))) <= width
    peak = marks.index("▼")
    assert rows[0][peak] == "█"
    left = len(rows[0]) - len(rows[0].lstrip("0123456789., GiMB"))
    assert left > 0
    share = (peak - phases.index("|")) / (width - phases.index("|"))
    totals = [total_bytes(point) for point in points]
    assert abs(share - totals.index(max(totals)) / len(points)) < 2 / (width - 12)
    assert "first update" in updates


def test_names_of_phases_that_have_no_room_are_shortened_not_cut(capsys: pytest.CaptureFixture[str]) -> None:
    phases = skyline(plans.timeline(accum=3), "utf-8")[-2]
    assert set(re.split(r"[ |]+", phases.strip(" |"))) <= {"forward", "fwd", "f", "backward", "bwd", "b", "step", "s"}
    assert skyline(plans.timeline(), "utf-8")[-2].split() == [
        "|forward",
        "|backward",
        "|step|forward",
        "|backward",
        "|step",
    ]


def test_a_terminal_without_block_characters_gets_ascii() -> None:
    lines = skyline(plans.timeline(), "ascii")
    assert all(line.isascii() for line in lines)
    assert any("#" in line for line in lines)
    assert skyline(plans.timeline(), "no such encoding") == lines


def test_an_estimate_is_ascii_where_the_terminal_is(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(written, encoding="ascii"))
    emit_estimate(plans.estimate(plans.plan()), json=False, quiet=False)
    sys.stdout.flush()
    text = written.getvalue().decode("ascii")
    assert "\\u" not in text
    assert "Before activations: # weights, = gradients, . state" in text


def run_with_plan(**changes: Any) -> RunRecord:
    facts = {"state_bytes": STATE, "state_elements": 131_566_188, "plan": plans.plan(**changes)}
    return records.planned(optimizer=records.optimizer("adamw", records.F2_ADAMW, **facts))


def test_a_run_shows_its_plan_before_it_starts_and_beside_what_was_measured(capsys: pytest.CaptureFixture[str]) -> None:
    planned = run_with_plan()
    emit(planned, json=False, quiet=False)
    before = capsys.readouterr().out
    assert "The highest moment of each phase" in before
    assert "verdict     fits" in before
    assert "What a change would do to the peak" in before
    done = records.completed(planned, measured=records.measured(planned, peak_allocated_bytes=2100 * MIB))
    emit(done, json=False, quiet=False)
    after = capsys.readouterr().out
    assert re.search(r"^peak allocated +1\.99 GiB +2\.05 GiB +\+66\.26 MiB +traced$", after, re.MULTILINE)
    assert "The highest moment of each phase" in after
    assert "What a change would do to the peak" not in after
    assert max(map(len, (before + after).splitlines())) <= 80


def test_parts_of_one_name_are_told_apart_by_what_they_are_held_for(capsys: pytest.CaptureFixture[str]) -> None:
    twice = [
        {"name": "attention", "category": category, "num_bytes": num_bytes, "basis": "traced"}
        for category, num_bytes in (("activations", 2 * MIB), ("temporaries", MIB))
    ]
    rows = section(shown(capsys, plans.plan(parts=twice)), "Live at the peak")
    assert [row[0] for row in rows[1:]] == ["attention (activations)", "attention (temporaries)"]
