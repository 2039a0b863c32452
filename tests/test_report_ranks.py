"""Tables of a run of several processes: the least, the most and all, predicted beside measured."""

from __future__ import annotations

import html
import re
from pathlib import Path
from typing import Any

import pytest

from effcli.errors import PredictionError
from effcli.measure.rank_record import DistributionFacts, RankAmounts, RankMeasured
from effcli.measure.record import BatchFacts, RunRecord
from effcli.pipeline.tolerance import check_prediction
from effcli.report.output import emit
from effcli.report.page import write_page
from tests import comparisons, records

MIB = 2**20
STATES = (300 * MIB, 200 * MIB, 26 * MIB)
EXCHANGE = 40 * MIB


def of_three(record: RunRecord | None = None, *, off: int | None = None, weights: int | None = 90 * MIB) -> RunRecord:
    """Return a run sharded over three processes; the state of rank `off` is not what was predicted."""
    record = record or records.completed()
    predicted = tuple(
        RankAmounts(
            rank=rank,
            weights_bytes=90 * MIB,
            gradients_bytes=80 * MIB,
            optimizer_state_bytes=state,
            optimizer_state_elements=state // 4,
            communication_bytes=EXCHANGE,
            total_before_activations_bytes=210 * MIB + state,
        )
        for rank, state in enumerate(STATES)
    )
    measured = tuple(
        RankMeasured(
            rank=rank,
            device="cpu",
            weights_bytes=90 * MIB if rank else weights,
            gradients_bytes=80 * MIB,
            optimizer_state_bytes=state + (rank == off),
            optimizer_state_elements=state // 4,
            peak_allocated_bytes=None,
            peak_rss_bytes=(1000 + rank) * MIB,
        )
        for rank, state in enumerate(STATES)
    )
    changes: dict[str, Any] = {
        "distribution": DistributionFacts(world_size=3, shard="fsdp"),
        "batch": BatchFacts(micro=4, accum=2, world_size=3, effective=24),
        "optimizer": record.optimizer.model_copy(update={"per_rank": predicted}),
    }
    if record.measured is not None:
        changes["measured"] = record.measured.model_copy(update={"per_rank": measured})
    return record.model_copy(update=changes)


def shown(record: RunRecord, capsys: pytest.CaptureFixture[str]) -> str:
    emit(record, json=False, quiet=False)
    return capsys.readouterr().out


def text_of(cell: str) -> str:
    """Return the text of a cell of a page."""
    return html.unescape(re.sub(r"<[^>]*>", "", cell))


def rows_by_process(text: str) -> list[list[str]]:
    """Return the cells of the table by process, without its head."""
    lines = text[text.index("By process") :].splitlines()
    lines = lines[: lines.index("")]
    return [re.split(r"\s{2,}", line.strip()) for line in lines[3:] if "──" not in line]


def test_each_amount_stands_with_its_least_its_most_and_its_sum(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(of_three(), capsys)
    state = ["26.00 MiB", "300.00 MiB", "526.00 MiB"]
    assert rows_by_process(text) == [
        ["optimizer state", "predicted", *state],
        ["optimizer state", "measured", *state],
        ["weights", "predicted", "90.00 MiB", "90.00 MiB", "270.00 MiB"],
        ["weights", "measured", "90.00 MiB", "90.00 MiB", "270.00 MiB"],
        ["gradients", "predicted", "80.00 MiB", "80.00 MiB", "240.00 MiB"],
        ["gradients", "measured", "80.00 MiB", "80.00 MiB", "240.00 MiB"],
        ["exchange", "predicted", "40.00 MiB", "40.00 MiB", "120.00 MiB"],
        ["peak resident set", "measured", "1,000.00 MiB", "1,002.00 MiB", "2.93 GiB"],
    ]
    assert "3 (fsdp): weights, gradients and optimizer state are sharded" in " ".join(text.split())
    assert "optimizer state of all 3 as predicted, to the byte" in text
    assert max(map(len, text.splitlines())) <= 80


def test_a_rank_whose_state_is_not_as_predicted_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(of_three(off=1), capsys)
    assert "optimizer state is off its prediction on 1 rank: 1" in text
    assert "to the byte\n" not in text


def test_a_run_is_off_its_prediction_where_one_rank_is() -> None:
    assert "optimizer state, weights and gradients of every rank" in check_prediction(of_three(), 0)
    with pytest.raises(PredictionError, match="optimizer state of other ranks: predicted"):
        check_prediction(of_three(off=2), 0)


def test_an_amount_that_a_rank_does_not_know_has_no_sum(capsys: pytest.CaptureFixture[str]) -> None:
    rows = rows_by_process(shown(of_three(weights=None), capsys))
    assert [side for label, side, *_ in rows if label == "weights"] == ["predicted"]


def test_a_plan_of_several_processes_has_predictions_alone(capsys: pytest.CaptureFixture[str]) -> None:
    rows = rows_by_process(shown(of_three(records.planned()), capsys))
    assert {side for _, side, *_ in rows} == {"predicted"}
    assert [label for label, *_ in rows] == ["optimizer state", "weights", "gradients", "exchange"]


def test_what_is_exchanged_is_part_of_the_total_and_has_no_measured_twin(capsys: pytest.CaptureFixture[str]) -> None:
    lines = [re.split(r"\s{2,}", line.strip()) for line in shown(of_three(), capsys).splitlines()]
    assert ["exchange", "40.00 MiB", "n/a", "assumed"] in lines
    total = next(line for line in lines if line[0] == "total before activations")
    assert total[2:] == ["n/a", "assumed"]


def test_a_run_of_one_process_has_no_such_table(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(records.completed(), capsys)
    assert "By process" not in text
    assert "processes" not in text


def test_a_record_of_several_processes_is_read_back_as_it_was_written() -> None:
    record = of_three()
    assert RunRecord.model_validate_json(record.model_dump_json()) == record


def test_the_page_of_a_comparison_has_the_processes_of_each_run(tmp_path: Path) -> None:
    record = comparisons.comparison([of_three(comparisons.run("adamw")), comparisons.run("adafactor")])
    write_page(record, tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    table = page[page.index('aria-label="By process"') :]
    rows = re.findall(r"<tr>(.*?)</tr>", table[: table.index("</table>")])
    cells = [[text_of(cell) for cell in re.findall(r"<t[hd].*?</t[hd]>", row)] for row in rows]
    assert cells[0] == ["optimizer", "amount", "least", "most", "all together"]
    assert cells[2] == ["adamw", "optimizer state, measured", "26.00 MiB", "300.00 MiB", "526.00 MiB"]
    assert {row[0] for row in cells[1:]} == {"adamw"}


def test_the_page_says_how_many_processes_share_an_update(tmp_path: Path) -> None:
    record = comparisons.comparison([of_three(comparisons.run(name)) for name in ("adamw", "adafactor")])
    write_page(record, tmp_path / "page.html")
    assert "4 x 2 x 3 rows an update" in (tmp_path / "page.html").read_text(encoding="utf-8")


def test_the_page_of_runs_of_one_process_has_no_such_table(tmp_path: Path) -> None:
    write_page(comparisons.three(), tmp_path / "page.html")
    assert "By process" not in (tmp_path / "page.html").read_text(encoding="utf-8")
