"""A resumed run with other batches, replayed by hand with the model's own loss."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification, DistilBertConfig

from effcli import pipeline
from effcli.data.order import epoch_order
from effcli.errors import UsageError
from effcli.measure.record import RunRecord
from effcli.pipeline.prepare import prepare
from effcli.report.progress import QuietProgress
from tests.commands import TINY_DISTILBERT, csv_file, saved_weights
from tests.jobs import ENGINES
from tests.stopped_runs import train_and_stop

pytestmark = pytest.mark.usefixtures("without_plan")

ROWS, RATE = 20, 0.2


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Return the folder of a small classifier with its weights, so that a replay starts from the same ones."""
    torch.manual_seed(5)
    config = {name: value for name, value in TINY_DISTILBERT.items() if name != "model_type"}
    AutoModelForSequenceClassification.from_config(DistilBertConfig(**config)).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def flags(model: Path, out: Path, engine: str, batch: int, accum: int, **loop: Any) -> dict[str, Any]:
    data = csv_file(model.parent / "d.csv", ROWS)
    return {
        "model": {"name": str(model)},
        "data": {"train": str(data)},
        "optim": {"name": "sgd", "lr": RATE, "weight_decay": 0.0},
        "loop": {"engine": engine, "batch_size": batch, "accum": accum, "epochs": 2, "max_grad_norm": 0} | loop,
        "output": {"out": str(out)},
    }


def resumed(out: Path, **loop: Any) -> RunRecord:
    spec = pipeline.resolve_spec({"loop": loop}, resume_from=str(out))
    return pipeline.train(spec, progress=QuietProgress(), resume=True)


def replay(
    settings: dict[str, Any], parts: list[tuple[int, list[list[int]]]], *, longest: int = 0
) -> tuple[list[float], dict[str, Any]]:
    """Return losses and weights of updates by hand: each part is the total that its rates fall to 0 at, and windows.

    A window is a list of positions in the two epochs' orders, the second epoch's counted on. The first epoch begins
    with the `longest` rows of most tokens.
    """
    rows = prepare(pipeline.resolve_spec(settings), QuietProgress()).data.train
    first, second = (epoch_order(ROWS, 42, epoch).tolist() for epoch in range(2))
    ahead = sorted(range(ROWS), key=lambda row: -len(rows[row]["input_ids"]))[:longest]
    order = [*ahead, *(row for row in first if row not in ahead), *second]
    model = AutoModelForSequenceClassification.from_pretrained(settings["model"]["name"])
    model.train()
    losses: list[float] = []
    for total, windows in parts:
        for window in windows:
            chosen = [rows[order[place]] for place in window]
            width = max(len(row["input_ids"]) for row in chosen)
            ids = torch.tensor([row["input_ids"] + [0] * (width - len(row["input_ids"])) for row in chosen])
            mask = torch.tensor([[1] * len(row["input_ids"]) + [0] * (width - len(row["input_ids"])) for row in chosen])
            labels = torch.tensor([row["labels"] for row in chosen])
            model.zero_grad()
            loss = model(input_ids=ids, attention_mask=mask, labels=labels).loss
            loss.backward()
            rate = RATE * (1 - len(losses) / total)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= rate * parameter.grad
            losses.append(loss.item())
    return losses, model.state_dict()


def cut(first: int, size: int) -> list[list[int]]:
    """Return the windows from a place on to the end of the second epoch; none reaches over the end of the first."""
    ends = (ROWS, 2 * ROWS)
    windows, place = [], first
    while place < ends[1]:
        end = min(place + size, ends[0] if place < ends[0] else ends[1])
        windows.append(list(range(place, end)))
        place = end
    return windows


def check(record: RunRecord, out: Path, expected: tuple[list[float], dict[str, Any]]) -> None:
    losses, weights = expected
    assert [line.loss for line in record.history] == pytest.approx(losses, rel=1e-6)
    assert record.total_updates == len(losses) == record.history[-1].update
    saved = saved_weights(out)
    assert saved.keys() == weights.keys()
    assert all(torch.allclose(saved[name], weights[name], rtol=1e-6, atol=1e-6) for name in saved)


SLOW = [("accelerate", 3, 2, 3)]
SLOW += [(engine, *sizes) for engine in ENGINES for sizes in ((1, 1, 7), (8, 2, 4), (5, 4, 5))]


@pytest.mark.parametrize(
    ("engine", "batch", "accum", "after"),
    [("pytorch", 3, 2, 3), ("trainer", 3, 2, 3), *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)],
)
def test_no_row_is_used_twice_or_left_out(
    engine: str, batch: int, accum: int, after: int, model: Path, tmp_path: Path
) -> None:
    out = tmp_path / "o"
    settings = flags(model, out, engine, 2, 2)
    train_and_stop(settings, after=after)
    record = resumed(out, batch_size=batch, accum=accum)
    rest = cut(4 * after, batch * accum)
    check(record, out, replay(settings, [(10, cut(0, 4)[:after]), (after + len(rest), rest)]))
    assert record.history[-1].epoch == 2.0
    assert record.batch.effective == batch * accum
    left = ROWS - 4 * after % ROWS
    note = (
        f"Batch 2 x 2 becomes {batch} x {accum}: the {left} rows left of epoch {1 + 4 * after // ROWS} make "
        f"{-(-left // (batch * accum))} updates, a whole epoch {-(-ROWS // (batch * accum))}."
    )
    assert note in record.notes


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_windows_may_change_twice_and_a_stop_between_changes_nothing(engine: str, model: Path, tmp_path: Path) -> None:
    out = tmp_path / "o"
    settings = flags(model, out, engine, 2, 2)
    train_and_stop(settings, after=2)
    changed = {**settings, "loop": settings["loop"] | {"batch_size": 3, "accum": 1}}
    for after, batch in ((3, 3), (5, 3), (6, 5)):  # three updates of 3 rows, then of 5: rows 8, 11, 17, 20, 25
        changed["loop"] = changed["loop"] | {"batch_size": batch}
        with pytest.raises(Exception, match="stopped after update"):
            pipeline.train(
                pipeline.resolve_spec(changed), progress=QuietProgress(), resume=True, stop_after_updates=after
            )
    record = resumed(out)
    threes, fives = cut(8, 3), cut(17, 5)
    parts = [(10, cut(0, 4)[:2]), (2 + len(threes), threes[:3]), (5 + len(fives), fives)]
    check(record, out, replay(settings, parts))


def test_the_same_rows_per_update_in_smaller_batches_are_the_same_run(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "o"
    settings = flags(model, out, "pytorch", 4, 1)
    train_and_stop(settings, after=3)
    record = resumed(out, batch_size=1, accum=4)
    check(record, out, replay(settings, [(10, cut(0, 4))]))
    assert [line.epoch for line in record.history] == [update / 5 for update in range(1, 11)]
    assert "Batch 4 x 1 becomes 1 x 4: the same 4 rows per update." in record.notes


def test_the_longest_rows_stay_first_when_the_window_changes(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "o"
    settings = flags(model, out, "pytorch", 2, 2, longest_first=True)
    train_and_stop(settings, after=1)
    rest = cut(4, 3)
    check(
        resumed(out, batch_size=3, accum=1),
        out,
        replay(settings, [(10, cut(0, 4)[:1]), (1 + len(rest), rest)], longest=4),
    )


def test_whatever_else_changes_what_is_learnt_is_refused_by_name(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "o"
    train_and_stop(flags(model, out, "pytorch", 2, 2), after=1)
    spec = pipeline.resolve_spec(
        {"loop": {"batch_size": 1, "seed": 7, "max_grad_norm": 2.0}, "optim": {"lr": 0.5}}, resume_from=str(out)
    )
    with pytest.raises(UsageError) as raised:
        pipeline.train(spec, progress=QuietProgress(), resume=True)
    assert all(flag in str(raised.value) for flag in ("--seed", "--max-grad-norm", "--lr"))
    assert "--batch-size" not in str(raised.value)
