"""`compare.html`: what the page of a comparison holds, read from its text."""

from __future__ import annotations

import base64
import hashlib
import html
import itertools
import math
import re
import statistics
from pathlib import Path
from typing import Any

import pytest

from effcli.errors import WriteError
from effcli.measure.comparison_record import Attempt, ComparisonRecord, compared
from effcli.measure.record import RunRecord, UpdateFacts
from effcli.report.charts.labels import Spot, placed
from effcli.report.page import write_page
from effcli.units import StateAmount
from tests import comparisons, plans, records
from tests.comparisons import MIB, UPDATES, WEIGHTS
from tests.pages import charts_of, layers, rows_of, texts_in


def page_of(record: ComparisonRecord, folder: Path) -> str:
    """Return the text of a record's page."""
    write_page(record, folder / "compare.html")
    return (folder / "compare.html").read_text(encoding="utf-8")


def headline_of(page: str) -> str:
    """Return the sentence at the top."""
    found = re.search(r"<h1>(.*?)</h1>", page)
    assert found
    return html.unescape(found[1])


def summary_of(page: str) -> dict[str, list[str]]:
    """Return the texts of the first table: its head under "", then each row by its name."""
    table = page[page.index("<table") : page.index("</table>")]
    rows = [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row) for row in re.findall(r"<tr>(.*?)</tr>", table)]
    cells = [[html.unescape(re.sub(r"<[^>]*>", " ", cell)).strip() for cell in row] for row in rows]
    return {"": cells[0], **{row[0]: row for row in cells[1:]}}


def sgd(**changes: Any) -> RunRecord:
    """Return a run without any state."""
    adamw = comparisons.run("adamw", **changes)
    facts = records.optimizer("sgd", {}, state_bytes=0, state_elements=0, plan=adamw.optimizer.plan)
    measured = records.measured(adamw, optimizer_state_bytes=0, optimizer_state_elements=0, tensors={})
    return adamw.model_copy(update={"optimizer": facts, "measured": measured})


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> str:
    return page_of(comparisons.three(), tmp_path_factory.mktemp("three"))


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> str:
    return page_of(comparisons.hostile(), tmp_path_factory.mktemp("hostile"))


# Safety -------------------------------------------------------------------------------------------------------------


def test_the_page_asks_nobody_for_anything(three: str) -> None:
    before = three.partition('<script type="application/json"')[0]
    assert not re.search(r"<(script|link|iframe)[^>]*(src|href)=", three)
    assert not re.search(r"@import|url\(|src=|href=", before)
    assert "default-src 'none'" in before
    assert not re.search(r"unsafe-eval|script-src[^;\"]*unsafe-inline", before)


def test_only_the_scripts_of_the_page_may_run(three: str) -> None:
    policy = re.search(r'script-src ([^"]*)"', three)
    assert policy
    scripts = re.findall(r"<script>(.*?)</script>", three, re.DOTALL)
    digests = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    assert policy[1].split() == [f"'sha256-{digest}'" for digest in digests]


def test_no_text_of_a_record_becomes_markup(hostile: str) -> None:
    assert "<img" not in hostile.partition("<script>")[0]  # the library after it can draw pictures
    assert hostile.count("</script>") == hostile.count("<script") == 3
    data = re.search(r'id="charts">(.*?)</script>', hostile, re.DOTALL)
    assert data
    assert not re.search("[<>&\u2028\u2029]", data[1])


def test_no_text_of_a_record_names_a_field_of_a_chart(hostile: str) -> None:
    fields = {key for chart in charts_of(hostile).values() for key in texts_in({**chart, "datasets": None})}
    rows = {
        key for chart in charts_of(hostile).values() for data in chart["datasets"].values() for key in texts_in(data)
    }
    assert len(rows) > 20
    for text in comparisons.HOSTILE_TEXTS:
        assert not any(text in key for key in fields | rows)


# What is said first ---------------------------------------------------------------------------------------------------


def test_the_headline_holds_measured_bytes_against_those_of_the_first(three: str) -> None:
    assert headline_of(three) == (
        "Of adamw's 501.89 MiB of optimizer state, adafactor held 0.00136 of it (697.69 KiB); "
        "adam8bit 0.255 (127.80 MiB)."
    )
    assert "distilbert-base-cased, 65,783,042 trained parameters" in three


def test_a_plan_alone_is_told_as_one_and_has_no_losses(tmp_path: Path) -> None:
    page = page_of(comparisons.planned_only(), tmp_path)
    assert "adafactor would hold 0.00136" in headline_of(page)
    assert "Nothing was trained" in page
    assert sorted(charts_of(page)) == ["live-n0", "live-n1", "live-n2", "memory", "tradeoff"]
    assert "state, measured" not in summary_of(page)[""]


@pytest.mark.parametrize(
    ("runs", "sentence"),
    [
        ([comparisons.run("adamw")], "adamw held 501.89 MiB of optimizer state and peaked at"),
        ([sgd(), comparisons.run("adamw")], "sgd held no optimizer state; adamw 501.89 MiB."),
        ([comparisons.run("adamw"), sgd()], "Of adamw's 501.89 MiB of optimizer state, sgd held none."),
    ],
    ids=["one run", "no state first", "no state later"],
)
def test_the_headline_fits_what_there_is(runs: list[RunRecord], sentence: str, tmp_path: Path) -> None:
    assert headline_of(page_of(comparisons.comparison(runs), tmp_path)).startswith(sentence)


def test_what_differs_between_runs_is_not_told_as_if_all_shared_it(tmp_path: Path) -> None:
    other = comparisons.run("adafactor", model=records.model("gpt2"), total_updates=7)
    page = page_of(comparisons.comparison([comparisons.run("adamw"), other]), tmp_path)
    told = re.search(r'<p class="lead">(.*?)</p>', page)
    assert told
    assert told[1].endswith("fp32, engine pytorch, on cpu; runs differ in model and updates")
    assert "<title>adamw, adafactor on 2 models</title>" in page


def test_a_result_that_is_no_number_is_shown_and_not_sorted_by(tmp_path: Path) -> None:
    run = comparisons.run("adamw")
    lines = (*run.history[:-1], run.history[-1].model_copy(update={"loss": math.nan}))
    page = page_of(comparisons.comparison([run.model_copy(update={"history": lines})]), tmp_path)
    table = summary_of(page)
    assert table["adamw"][table[""].index("final loss")] == "nan"
    assert 'data-value="nan"' not in page


def test_the_headline_holds_no_model_against_another(tmp_path: Path) -> None:
    other = comparisons.run("adafactor", model=records.model("gpt2"))
    told = headline_of(page_of(comparisons.comparison([comparisons.run("adamw"), other]), tmp_path))
    assert told == "Optimizer state held: adamw 501.89 MiB; adafactor 697.69 KiB."


def test_of_many_optimizers_the_headline_names_the_ends(tmp_path: Path) -> None:
    runs = [comparisons.run("adamw")]
    for place, state_bytes in enumerate((300, 100, 400, 200)):
        other = records.optimizer(f"other{place}", {}, state_bytes=state_bytes * MIB, state_elements=1)
        run = runs[0].model_copy(update={"optimizer": other})
        runs.append(run.model_copy(update={"measured": records.measured(run)}))
    told = headline_of(page_of(comparisons.comparison(runs), tmp_path))
    assert "other1 held 0.199 of it (100.00 MiB); other2 0.797 (400.00 MiB)" in told
    assert "other0" not in told


def test_runs_that_did_not_end_say_why_and_the_others_keep_their_rows(tmp_path: Path) -> None:
    page = page_of(comparisons.one_failed(), tmp_path)
    assert "<li>adafactor failed: the loss is not finite at update 1: give a lower --lr</li>" in page
    assert "<li>adam8bit interrupted: stopped by SIGINT</li>" in page
    assert "<li>lion8bit was not run</li>" in page
    table = summary_of(page)
    measured = table[""].index("state, measured")
    assert table["adamw"][measured] == "501.89 MiB"
    assert table["adafactor"][measured] == table["lion8bit"][measured] == "n/a"


# The table ------------------------------------------------------------------------------------------------------------


def test_the_table_holds_amounts_and_their_ratio_to_the_first(three: str) -> None:
    table = summary_of(three)
    assert table[""][:4] == ["optimizer", "status", "state, predicted", "state, measured"]
    assert "perplexity" not in table[""]
    assert table["adamw"][3] == "501.89 MiB"
    assert table["adam8bit"][3].split() == ["127.80", "MiB", "\N{MULTIPLICATION SIGN}", "0.255"]
    loss = comparisons.three().summary[0].final_loss
    assert table["adamw"][table[""].index("final loss")] == f"{loss:.4f}"
    assert three.count('data-value="134004336" title="134,004,336 bytes"') == 2


def test_seeds_show_their_mean_and_deviation(tmp_path: Path) -> None:
    page = page_of(comparisons.two_seeds(), tmp_path)
    table, line = summary_of(page), comparisons.two_seeds().summary[0]
    assert table["adamw"][1].split() == ["completed", "2", "seeds"]
    speed = table["adamw"][table[""].index("seconds per update")].split()
    assert line.seconds_per_update is not None
    assert float(speed[0]) == pytest.approx(line.seconds_per_update, abs=1e-3)
    assert float(speed[2]) == pytest.approx(line.spread["seconds_per_update"].deviation, rel=0.05)
    assert "standard deviation over the seeds" in page
    assert len({row["run"] for row in rows_of(charts_of(page)["loss-updates"], "line")[1]}) == 6


# Charts ---------------------------------------------------------------------------------------------------------------


def bars_of(page: str) -> dict[str, dict[str, float]]:
    """Return the parts of each bar in MiB, by the bar's place such as `n0p`."""
    bars: dict[str, dict[str, float]] = {}
    for row in rows_of(charts_of(page)["memory"], "bar")[0]:
        bars.setdefault(row["row"], {})[row["part"]] = row["end"] - row["start"]
    return bars


def test_bars_add_up_to_the_predicted_and_the_measured_peak(three: str) -> None:
    bars = bars_of(three)
    assert list(bars) == ["n0p", "n0m", "n1p", "n1m", "n2p", "n2m"]
    for place, line in enumerate(comparisons.three().summary):
        predicted, measured = bars[f"n{place}p"], bars[f"n{place}m"]
        assert sum(predicted.values()) * MIB == pytest.approx(line.predicted_peak_allocated_bytes)
        assert sum(measured.values()) * MIB == pytest.approx(line.peak_allocated_bytes)
        assert measured["optimizer state"] * MIB == pytest.approx(line.measured_state_bytes)
        assert measured["weights"] * MIB == pytest.approx(WEIGHTS)


def test_gradients_are_told_apart_in_a_measured_peak_only_where_all_of_them_exist(three: str, tmp_path: Path) -> None:
    assert bars_of(three)["n0m"]["gradients"] * MIB == pytest.approx(WEIGHTS)  # its peak is in the step
    run = comparisons.run("adamw")
    facts = run.optimizer.model_copy(update={"plan": plans.plan()})
    backward = bars_of(page_of(comparisons.comparison([run.model_copy(update={"optimizer": facts})]), tmp_path))
    assert sorted(backward["n0m"]) == ["optimizer state", "rest of the measured peak", "weights"]


def test_without_a_traced_plan_a_bar_says_that_the_peak_is_higher(tmp_path: Path) -> None:
    exact = records.optimizer("adamw", records.F2_ADAMW, state_bytes=526_264_752, state_elements=131_566_188)
    page = page_of(comparisons.comparison([comparisons.planned("adamw", optimizer=exact)], status="planned"), tmp_path)
    assert sum(bars_of(page)["n0p"].values()) * MIB == pytest.approx(2 * WEIGHTS + 526_264_752)
    assert [row["text"] for row in rows_of(charts_of(page)["memory"], "text")[1]] == ["≥ 1,003.77 MiB"]
    assert "No plan of these runs holds a timeline" in page


def test_a_mark_shows_what_was_planned_for_the_batch_that_was_profiled(three: str, tmp_path: Path) -> None:
    assert layers(charts_of(three)["memory"], "tick") == []
    run = comparisons.run("adamw")
    assert run.measured
    assert run.measured.profiled
    profiled = run.measured.profiled.model_copy(update={"planned_peak_allocated_bytes": 1000 * MIB})
    smaller = run.model_copy(update={"measured": run.measured.model_copy(update={"profiled": profiled})})
    page = page_of(comparisons.comparison([smaller]), tmp_path)
    assert [row["start"] for row in rows_of(charts_of(page)["memory"], "tick")[0]] == [1000]
    assert "the mark on a measured bar" in page


def test_losses_are_drawn_raw_and_as_a_mean_with_evaluations_where_they_were(three: str) -> None:
    against, time = charts_of(three)["loss-updates"], charts_of(three)["loss-time"]
    raw, means = rows_of(against, "line")
    own = [row for row in raw if row["key"] == "n0"]
    assert [row["x"] for row in own] == list(range(1, UPDATES + 1))
    history = [line.loss or 0 for line in comparisons.run("adamw").history]
    last = [row["loss"] for row in means if row["key"] == "n0"]
    assert last == pytest.approx([statistics.mean(history[max(0, end - 4) : end]) for end in range(1, UPDATES + 1)])
    assert [row["x"] for row in rows_of(against, "point")[0] if row["key"] == "n0"] == [20, 40, 60]
    assert [row["x"] for row in rows_of(time, "point")[0] if row["key"] == "n0"] == pytest.approx(
        [20 * 1.31, 40 * 1.31, 60 * 1.31]
    )
    assert "mean of the last 4 updates" in three
    assert all(line["mark"]["strokeJoin"] == "round" for line in layers(against, "line"))  # a spike is no loss


def test_records_without_times_say_so_in_place_of_the_chart(tmp_path: Path) -> None:
    run = comparisons.run("adamw")
    untimed = tuple(line.model_copy(update={"training_s": None}) for line in run.history)
    page = page_of(comparisons.comparison([run.model_copy(update={"history": untimed})]), tmp_path)
    assert "loss-time" not in charts_of(page)
    assert "Not in the records: when updates ended, for adamw." in page


def test_long_histories_are_thinned_to_their_extremes(tmp_path: Path) -> None:
    num_updates, low, high = 100_000, 54_321, 77_777

    def loss(update: int) -> float | None:
        if update % 1000 == 999:
            return None if update % 2000 == 999 else math.inf
        return {low: 0.0125, high: 97.0}.get(update, 2 + math.sin(update / 500) + update % 7 / 10)

    history = tuple(
        UpdateFacts(update=update, epoch=1.0, loss=loss(update), lr=1e-4, grad_norm=1.0, training_s=update / 8)
        for update in range(1, num_updates + 1)
    )
    runs = [comparisons.run("adamw"), comparisons.run("adafactor").model_copy(update={"history": history})]
    page = page_of(comparisons.comparison(runs), tmp_path)
    assert len(page) < 5_000_000
    raw, means = rows_of(charts_of(page)["loss-updates"], "line")
    assert {low: 0.0125, high: 97.0}.items() <= {row["x"]: row["loss"] for row in raw if row["key"] == "n1"}.items()
    long = [row["x"] for row in raw if row["key"] == "n1"]
    assert (long[0], long[-1]) == (1, num_updates)
    assert len(long) <= 3000
    assert len(means) < 250
    assert "3,000 a run" in page


def test_the_tradeoff_shows_every_optimizer_and_what_it_counts(tmp_path: Path) -> None:
    runs = [*(comparisons.run(name) for name in comparisons.KINDS), sgd(), comparisons.planned("adam8bit")]
    planned = records.optimizer("only-planned", {}, state_bytes=65_783_042, state_elements=131_566_084)
    runs[-1] = runs[-1].model_copy(update={"optimizer": planned})
    page = page_of(comparisons.comparison(runs), tmp_path)
    open_, filled = rows_of(charts_of(page)["tradeoff"], "point")
    places = {row["optimizer"]: (row["x"], row["y"]) for row in (*open_, *filled)}
    assert places["adamw"] == pytest.approx((2.0, 32.0), abs=1e-5)
    assert places["adafactor"] == pytest.approx((178_608 / 65_783_042, 32.0), rel=1e-12)  # 104 steps are none
    assert places["adam8bit"] == pytest.approx((2.0, 8.148), abs=1e-3)
    assert places["sgd"] == (0, 0)
    assert places["only-planned"] == pytest.approx((2.0, 4.0), abs=1e-4)
    assert [row["optimizer"] for row in open_] == ["only-planned"]
    labels = {row["text"] for rows in rows_of(charts_of(page)["tradeoff"], "text")[1:] for row in rows}
    assert labels == {"adamw", "adafactor", "adam8bit", "sgd", "only-planned"}


@pytest.mark.parametrize(
    ("others", "label"), [(["adam"], "adamw, adam"), (["adam", "radam", "nadam"], "adamw and 3 more")]
)
def test_optimizers_that_keep_the_same_share_a_label(others: list[str], label: str, tmp_path: Path) -> None:
    adamw = comparisons.run("adamw")
    twins = [
        adamw.model_copy(update={"optimizer": adamw.optimizer.model_copy(update={"name": name})}) for name in others
    ]
    page = page_of(comparisons.comparison([adamw, *twins]), tmp_path)
    _, *labels = rows_of(charts_of(page)["tradeoff"], "text")
    assert [row["text"] for rows in labels for row in rows] == [label]


def test_labels_of_points_close_by_do_not_cover_each_other() -> None:
    spots = [Spot(text="adamw_8bit", across=0.6 + place / 50, down=100 + place, radius=8) for place in range(6)]
    tops = sorted(spot.down + at.dy for spot, at in zip(spots, placed(spots), strict=True))
    assert all(lower - upper >= 16 for upper, lower in itertools.pairwise(tops))


def test_a_measured_update_is_drawn_over_the_planned_one_where_both_had_the_same_batch(three: str) -> None:
    run = comparisons.three().runs[0]
    assert run.measured
    assert run.measured.profiled
    assert run.optimizer.plan
    held = run.measured.profiled.timeline_bytes
    (line,) = rows_of(charts_of(three)["live-n0"], "line")
    assert [row["bytes"] * MIB for row in line] == pytest.approx(held)
    first = sum(not point.update for point in run.optimizer.plan.timeline)
    assert (line[0]["moment"], line[-1]["moment"]) == (first, len(run.optimizer.plan.timeline) - 1)
    assert "The line is what one update held" in three


def test_timelines_share_a_scale_and_show_the_measured_peak(three: str) -> None:
    charts = charts_of(three)
    tops = set()
    for place, line in enumerate(comparisons.three().summary):
        chart = charts[f"live-n{place}"]
        ((rule,),) = rows_of(chart, "rule")
        assert rule["total"] * MIB == pytest.approx(line.peak_allocated_bytes)
        ((peak,),) = rows_of(chart, "point")
        assert peak["total"] * MIB == pytest.approx(line.predicted_peak_allocated_bytes)
        tops.add(tuple(layers(chart, "area")[0]["encoding"]["y"]["scale"]["domain"]))
    assert len(tops) == 1


# Settings -------------------------------------------------------------------------------------------------------------


def test_shared_settings_stand_once_and_the_others_run_by_run(three: str) -> None:
    assert three.count(">optim.weight_decay<") == 1
    assert ">0.01<" in three
    differing = three[three.index("Settings that differ</h3>") :]
    row = re.search(r">optim.name</th>(.*?)</tr>", differing)
    assert row
    assert re.findall(r">([^<]+)</td>", row[1]) == ["adamw", "adafactor", "adam8bit"]
    assert ">packages.torch<" in three
    assert three.count(">adamw-42<") == 1


def test_settings_read_as_in_the_terminal(tmp_path: Path) -> None:
    runs = [comparisons.run(name) for name in ("adamw", "adafactor")]
    loop = {**runs[0].spec["loop"], "compile": True, "max_steps": None}
    optim = {**runs[0].spec["optim"], "keep_32bit": ["embed", "head"], "args": {"amsgrad": False}}
    runs[0] = runs[0].model_copy(update={"spec": {**runs[0].spec, "loop": loop, "optim": optim}})
    page = page_of(comparisons.comparison(runs), tmp_path)
    for name, value in (("loop.compile", "on"), ("optim.keep_32bit", "embed, head"), ("optim.args.amsgrad", "off")):
        found = re.search(f">{re.escape(name)}</th>(.*?)</tr>", page)
        assert found
        assert re.findall(r">([^<]+)</td>", found[1]) == [value, "default"]
    assert ">loop.max_steps<" not in page


def test_a_note_of_some_runs_says_whose_it_is(tmp_path: Path) -> None:
    runs = [comparisons.run("adamw"), comparisons.run("adafactor", notes=("Its step is slow.",))]
    page = page_of(comparisons.comparison(runs), tmp_path)
    assert "<li>adafactor: Its step is slow.</li>" in page
    assert page.count("All weights are random") == 1


def test_nothing_but_missing_runs_still_makes_a_page(tmp_path: Path) -> None:
    record = compared([Attempt(name="adamw", seed=1, status="missing")], [], status="interrupted")
    page = page_of(record, tmp_path)
    assert headline_of(page) == "No optimizer of this comparison left a number."
    assert charts_of(page) == {}


def test_a_page_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(WriteError, match=r"could not write '.*file/compare\.html'"):
        write_page(comparisons.planned_only(), tmp_path / "file" / "compare.html")


def test_an_optimizer_whose_state_holds_no_statistic_has_a_place(tmp_path: Path) -> None:
    run = comparisons.run("adamw")
    state = {"step": StateAmount(elements=0, bytes=416)}
    measured = records.measured(run, optimizer_state_bytes=416, optimizer_state_elements=0, tensors=state)
    page = page_of(comparisons.comparison([run.model_copy(update={"measured": measured})]), tmp_path)
    ((point,),) = rows_of(charts_of(page)["tradeoff"], "point")
    assert (point["x"], point["y"]) == (0, 0)
