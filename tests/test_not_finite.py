"""A loss or a gradient that is not finite stops the run before its step, in every engine; what was saved stays good."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import DistilBertForSequenceClassification

from effcli.engines.base import UpdateResult
from effcli.engines.session import SKIPPED_IN_A_ROW, TrainingSession
from effcli.engines.window_schedule import WindowSchedule
from effcli.errors import TrainingFailedError
from effcli.pipeline.running import run as run_module
from effcli.report.progress import QuietProgress
from tests.commands import effcli, same_weights, saved_weights, untimed
from tests.jobs import ENGINES

pytestmark = pytest.mark.usefixtures("without_plan")

FORWARD = DistilBertForSequenceClassification.forward


@pytest.fixture
def run(distilbert: Path, data: Path, tmp_path: Path) -> tuple[object, ...]:
    """Return a run of six updates of two micro-batches of one row each, with a checkpoint after each."""
    return (
        "train", distilbert, "--data", data, "--limit-rows", 6, "--batch-size", 1, "--accum", 2, "--epochs", 2,
        "--save-every", 1, "--json", "--out", tmp_path / "run",
    )  # fmt: skip


class Broken:
    """Breaks what the seventh micro-batch computes, the first of update 4, and keeps the model that it was given."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, spoil: Callable[[Any, Any], None], *, training: bool = True):
        self.model: Any = None
        self._calls = 0
        spoiled = self

        def forward(model: Any, input_ids: torch.Tensor, **kwargs: Any) -> Any:
            output = FORWARD(model, input_ids, **kwargs)
            if type(input_ids) is torch.Tensor and model.training == training:
                spoiled.model = model
                spoiled._calls += 1
                if spoiled._calls == 7:
                    spoil(model, output)
            return output

        monkeypatch.setattr(DistilBertForSequenceClassification, "forward", forward)


def nan_loss(model: Any, output: Any) -> None:
    output.logits = output.logits * float("nan")


def infinite_gradient(model: Any, output: Any) -> None:
    """Let one element of one parameter's gradient overflow, under a finite loss."""
    done: list[bool] = []

    def overflow(gradient: torch.Tensor) -> torch.Tensor:
        if done:
            return gradient
        done.append(True)
        changed = gradient.clone()
        changed.view(-1)[3] = math.inf
        return changed

    model.distilbert.transformer.layer[0].attention.q_lin.weight.register_hook(overflow)


NAN, OVERFLOW = "the loss is nan", "the gradient norm is inf"
FIRST = " (the first gradient that is not finite is that of distilbert.transformer.layer.0.attention.q_lin.weight)"
CASES = [
    *((engine, nan_loss, NAN, 1) for engine in ENGINES),
    *((engine, infinite_gradient, OVERFLOW + FIRST, 1) for engine in ENGINES),
    ("pytorch", infinite_gradient, OVERFLOW + FIRST, 0),
    *((engine, infinite_gradient, OVERFLOW, 0) for engine in ENGINES[1:]),  # their clipping has spread it by then
]


@pytest.mark.parametrize(("engine", "spoil", "said", "clipping"), CASES)
def test_the_run_stops_at_that_update_with_the_weights_before_it(
    engine: str, spoil: Any, said: str, clipping: int, run: tuple[object, ...], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    broken = Broken(monkeypatch, spoil)
    failed = effcli(*run, "--engine", engine, "--max-grad-norm", clipping)
    assert failed.code == 7
    assert failed.error.startswith(f"update 4: {said}; training stopped before any checkpoint of it")
    out = tmp_path / "run"
    record = json.loads((out / "record.json").read_text())
    assert (record["status"], record["failure"]) == ("failed", failed.error)
    assert [line["update"] for line in record["history"]] == [1, 2, 3]
    assert not (out / "model").exists()
    saved = sorted((out / "checkpoints").iterdir())
    assert [path.name for path in saved] == ["update-00000002", "update-00000003"]
    good = load_file(saved[-1] / "model.safetensors")
    assert same_weights(good, broken.model.state_dict())


def test_the_run_goes_on_from_the_last_good_update_when_asked(
    run: tuple[object, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = effcli(*run[:-1], tmp_path / "whole").record
    with monkeypatch.context() as patched:
        Broken(patched, nan_loss)
        assert effcli(*run).code == 7
    resumed = effcli("train", "--out", tmp_path / "run", "--resume", "--json")
    assert "Resumed after update 3 of 6." in resumed.stderr
    assert untimed(resumed.record["history"]) == untimed(whole["history"])
    assert same_weights(saved_weights(tmp_path / "run"), saved_weights(tmp_path / "whole"))


def test_an_evaluation_loss_that_is_not_finite_stops_the_run_before_its_checkpoint(
    run: tuple[object, ...], data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Broken(monkeypatch, nan_loss, training=False)
    failed = effcli(*run, "--eval-data", data)
    assert failed.code == 7
    assert failed.error.startswith("update 3: the evaluation loss is nan; ")
    assert [path.name for path in sorted((tmp_path / "run" / "checkpoints").iterdir())] == [
        "update-00000001",
        "update-00000002",
    ]


@pytest.mark.parametrize(("value", "flags"), [(math.nan, ()), (-math.inf, ("--lora-r", 2))])
def test_a_model_whose_file_holds_values_that_are_not_finite_is_refused_before_training(
    value: float, flags: tuple[object, ...], run: tuple[object, ...], tmp_path: Path
) -> None:
    assert effcli(*run).code == 0
    name = "distilbert.transformer.layer.1.ffn.lin1.weight"
    file = tmp_path / "run" / "model" / "model.safetensors"
    weights = load_file(file)
    weights[name][3, 5] = value
    save_file(weights, file, metadata={"format": "pt"})
    failed = effcli("train", file.parent, *run[2:-1], tmp_path / "again", *flags)
    assert failed.code == 2
    assert f"its files hold values that are not finite in {name}, before any training" in failed.error
    assert not (tmp_path / "again").exists()


@pytest.mark.parametrize("engine", ENGINES)
def test_weights_that_a_step_broke_are_not_saved(
    engine: str, run: tuple[object, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaks_the_third(optimizer: torch.optim.Optimizer, *args: Any) -> None:
        weight = optimizer.param_groups[0]["params"][0]
        if optimizer.state[weight]["step"] == 3:
            with torch.no_grad():
                weight.view(-1)[0] = math.inf

    execute = run_module.Run.execute

    def with_hook(self: run_module.Run, *args: Any) -> Any:
        self._optimizer.register_step_post_hook(breaks_the_third)
        return execute(self, *args)

    monkeypatch.setattr(run_module.Run, "execute", with_hook)
    failed = effcli(*run, "--engine", engine)
    assert failed.code == 7
    assert "weights of distilbert.embeddings.word_embeddings.weight that are not finite" in failed.error
    assert sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir()) == [
        "update-00000001",
        "update-00000002",
    ]


def session(scaler: Any) -> TrainingSession:
    return TrainingSession(
        window_schedule=WindowSchedule(num_rows=100, batch_size=1, accum=1),
        total_updates=100,
        save_every=1000,
        progress=QuietProgress(),
        prepare=lambda scaler: None,
        read_lr=lambda: 0.1,
        read_clip_norm=lambda: None,
        read_samples=lambda: 1,
        evaluate=None,
        save=lambda session: None,
        scaler=scaler,
    )


def test_steps_that_the_scaler_skips_are_no_failure_until_no_scale_is_small_enough() -> None:
    scaler = torch.amp.GradScaler("cpu")
    skipped = UpdateResult(loss=math.nan, grad_norm=math.inf, skipped=True)
    made = UpdateResult(loss=0.5, grad_norm=1.0)
    running = session(scaler)
    for _ in range(2):
        for _ in range(SKIPPED_IN_A_ROW - 1):
            running.before_step(loss=math.nan, grad_norm=math.inf)
            running.after_update(skipped)
        running.before_step(loss=0.5, grad_norm=1.0)
        running.after_update(made)
    for _ in range(SKIPPED_IN_A_ROW - 1):
        running.after_update(skipped)
    with pytest.raises(TrainingFailedError, match="skipped 30 updates in a row"):
        running.after_update(skipped)


def test_a_loss_that_is_not_finite_under_a_step_that_the_scaler_let_pass_is_a_failure() -> None:
    running = session(torch.amp.GradScaler("cpu"))
    with pytest.raises(TrainingFailedError, match="update 1: the loss is inf"):
        running.after_update(UpdateResult(loss=math.inf, grad_norm=1.0))


def test_an_infinite_loss_with_finite_gradients_is_refused_before_the_step() -> None:
    with pytest.raises(TrainingFailedError, match="update 1: the loss is inf"):
        session(None).before_step(loss=math.inf, grad_norm=1.0)
