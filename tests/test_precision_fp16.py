"""fp16: losses are scaled, overflows skipped, and nobody sees the scale in what is reported."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from effcli.data.batches import Collator
from tests.commands import effcli
from tests.fp16 import scale_on_cpu
from tests.heads import rows, tiny_model
from tests.jobs import ENGINES, ONE_FAST_ENGINE, run_job
from tests.stopped_runs import check_that_a_stop_changes_nothing

TOO_LARGE, GROWTH_INTERVAL = 2.0**19, 3
"""A scale that makes the first updates of the models here overflow, and good updates until it is doubled again."""
UPDATES, RATE, MAX_NORM = 9, 1e-3, 0.5

pytestmark = pytest.mark.usefixtures("without_plan")


@dataclass
class ByHand:
    """What a loop written here gives; `rates` has the updates that were made alone."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)


def train_by_hand(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> ByHand:
    """Train on one batch with AdamW, on a linear schedule over updates that were made."""
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.0)
    labels = batch.pop("labels")
    scale, num_good, out = TOO_LARGE, 0, ByHand()
    for _ in range(UPDATES):
        with torch.autocast("cpu", torch.float16):
            logits = model(**batch).logits
        loss = torch.nn.functional.cross_entropy(logits.float(), labels)
        (loss * scale).backward()
        for weight in model.parameters():
            weight.grad /= scale
        norm = torch.nn.utils.get_total_norm([weight.grad for weight in model.parameters()]).item()
        out.losses.append(loss.item())
        out.norms.append(norm)
        out.scales.append(scale)
        if math.isfinite(norm):
            out.rates.append(RATE * (UPDATES - len(out.rates)) / UPDATES)
            optimizer.param_groups[0]["lr"] = out.rates[-1]
            for weight in model.parameters():
                weight.grad *= min(1.0, MAX_NORM / (norm + 1e-6))
            optimizer.step()
            num_good += 1
            scale *= 2 if num_good % GROWTH_INTERVAL == 0 else 1
        else:
            scale, num_good = scale / 2, 0
        optimizer.zero_grad()
    return out


@pytest.mark.parametrize("engine", ENGINES)
def test_overflows_are_skipped_and_everything_reported_is_unscaled(
    engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    scale_on_cpu(monkeypatch, init_scale=TOO_LARGE, growth_interval=GROWTH_INTERVAL)
    row = rows(3, "classification")[2:]
    model = tiny_model("classification")
    start = copy.deepcopy(model)
    batch = Collator(0, "right", "classification")(row)
    expected = train_by_hand(start.train(), batch)
    num_skipped = UPDATES - len(expected.rates)
    assert 2 <= num_skipped <= 5  # so that there are overflows, and a scale that grew
    assert expected.scales[-1] > min(expected.scales)

    outcome = run_job(
        engine, "classification", num_rows=1, batch_size=1, accum=1, max_steps=UPDATES, model=model, made_rows=row,
        precision="fp16", max_grad_norm=MAX_NORM,
        make_optimizer=lambda groups: torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0),
    )  # fmt: skip
    assert outcome.losses == pytest.approx(expected.losses, rel=1e-6)
    finite = [math.isfinite(norm) for norm in outcome.grad_norms]
    assert finite == [math.isfinite(norm) for norm in expected.norms]
    assert outcome.skipped == [not good for good in finite]
    made = [norm for norm in outcome.grad_norms if math.isfinite(norm)]
    assert made == pytest.approx([norm for norm in expected.norms if math.isfinite(norm)], rel=1e-6)
    assert outcome.rates == pytest.approx(expected.rates, rel=1e-12)  # the schedule waits for updates that are made
    assert outcome.scales[:-1] == expected.scales[1:]
    for name, value in start.state_dict().items():
        torch.testing.assert_close(outcome.weights[name], value, rtol=0, atol=0.01 * RATE * UPDATES)


def test_a_skipped_update_leaves_weights_alone_and_is_counted_and_said(
    distilbert: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scale_on_cpu(monkeypatch, init_scale=2.0**40)
    common = ("train", distilbert, "--data", data, "--precision", "fp16", "--batch-size", 12)
    done = effcli(*common, "--epochs", 25, "--optim", "sgd", "--out", tmp_path / "o", "--json")
    history, measured = done.record["history"], done.record["measured"]
    num_skipped = measured["skipped_updates"]
    assert 10 < num_skipped < 25
    skipped, made = history[:num_skipped], history[num_skipped:]
    assert all(line["skipped"] and line["grad_norm"] is None and line["clip_norm"] is None for line in skipped)
    assert not any(line["skipped"] or line["grad_norm"] is None for line in made)
    # Each update is the whole data without dropout: equal weights give an equal loss, but for the order of the rows.
    assert [line["loss"] for line in skipped] == pytest.approx([skipped[0]["loss"]] * num_skipped, rel=1e-3)
    assert f"The fp16 scaler skipped {num_skipped} updates." in done.stderr
    assert f"The fp16 scaler skipped {num_skipped} updates." in done.record["notes"]


@pytest.mark.parametrize("engine", ONE_FAST_ENGINE)
def test_a_resumed_run_goes_on_with_the_scale_and_its_age(
    engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scale_on_cpu(monkeypatch, init_scale=TOO_LARGE, growth_interval=GROWTH_INTERVAL)
    rest = check_that_a_stop_changes_nothing(tmp_path, {"name": "adamw"}, precision="fp16", engine=engine)
    # A fresh scaler would overflow again after the stop, and an older one would grow at another update.
    assert [line.update for line in rest.history if line.skipped][:1] == [1]
