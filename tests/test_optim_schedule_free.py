"""Schedule-free optimizers: the average is what is evaluated and saved, in every engine, and training never notices."""

from __future__ import annotations

from pathlib import Path

import pytest
import schedulefree
import torch
from accelerate import Accelerator
from safetensors.torch import load_model
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from effcli import pipeline
from effcli.measure.record import RunRecord
from effcli.optim.groups import decay_groups
from effcli.optim.hyper import resolve_hyper
from effcli.optim.modes import evaluation_weights, set_to_train
from effcli.optim.registry import find
from effcli.report.progress import QuietProgress
from effcli.spec import OptimSpec
from tests.commands import csv_file, effcli, same_weights, saved_weights, untimed
from tests.jobs import ONE_FAST_ENGINE
from tests.stopped_runs import check_that_a_stop_changes_nothing, settings

pytestmark = pytest.mark.usefixtures("without_plan")

ADAMW = {"name": "schedule_free_adamw", "args": {"warmup_steps": 4}}


def averaged_by_upstream(folder: Path, out: str) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return the weights of a run's last checkpoint, and what upstream's `eval()` makes of them."""
    checkpoint = max((folder / out / "checkpoints").iterdir())
    model = AutoModelForSequenceClassification.from_pretrained(folder / out / "model")
    load_model(model, str(checkpoint / "model.safetensors"))
    training = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = schedulefree.AdamWScheduleFree(decay_groups(model, 0.01))
    optimizer.load_state_dict(torch.load(checkpoint / "training.pt", weights_only=True)["optimizer"])
    optimizer.eval()
    return training, model.state_dict()


def evaluation_loss(folder: Path, out: str) -> float:
    """Return the loss of the saved model on the run's data."""
    model = AutoModelForSequenceClassification.from_pretrained(folder / out / "model").eval()
    tokenizer = AutoTokenizer.from_pretrained(folder / out / "model")
    lines = csv_file(folder / "d.csv", 20).read_text().splitlines()[1:]
    texts, labels = zip(*(line.split(",") for line in lines), strict=True)
    with torch.no_grad():
        logits = model(**tokenizer(list(texts), padding=True, return_tensors="pt")).logits
    return torch.nn.functional.cross_entropy(logits, torch.tensor([int(label) for label in labels])).item()


def trained(folder: Path, out: str, *, evaluated: bool = True, **loop: object) -> RunRecord:
    made = settings(folder, out, ADAMW, **loop)
    made["data"] |= {} if evaluated else {"eval": None}
    return pipeline.train(pipeline.resolve_spec(made), progress=QuietProgress())


@pytest.mark.parametrize("engine", ONE_FAST_ENGINE)
def test_the_average_is_evaluated_and_saved_and_a_resumed_run_is_the_uninterrupted_one(
    engine: str, tmp_path: Path
) -> None:
    record = check_that_a_stop_changes_nothing(tmp_path, ADAMW, engine=engine)
    training, averaged = averaged_by_upstream(tmp_path, "whole")
    saved = saved_weights(tmp_path / "whole")
    assert all(torch.equal(saved[name], averaged[name]) for name in saved)
    assert not any(torch.equal(saved[name], training[name]) for name in saved if name.endswith("lin.weight"))
    assert record.eval[-1].eval_loss == pytest.approx(evaluation_loss(tmp_path, "whole"), abs=1e-6)
    assert [line.lr for line in record.history] == [2.5e-4, 5e-4, 7.5e-4, *[1e-3] * 7]


@pytest.mark.parametrize("precision", ["fp32", "bf16-pure"])
def test_evaluating_changes_nothing(precision: str, tmp_path: Path) -> None:
    with_evaluation = trained(tmp_path, "a", precision=precision)
    without = trained(tmp_path, "b", precision=precision, evaluated=False)
    assert (len(with_evaluation.eval), len(without.eval)) == (2, 0)
    assert untimed(with_evaluation.history) == untimed(without.history)
    assert same_weights(*(saved_weights(tmp_path / out) for out in "ab"))


def stepped_sgd(dtype: torch.dtype = torch.bfloat16) -> tuple[torch.nn.Parameter, torch.optim.Optimizer]:
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(999).to(dtype))
    hyper = resolve_hyper(find("schedulefree-sgd"), OptimSpec())
    optimizer = find("schedulefree-sgd").build([{"params": [weight]}], hyper)
    for _ in range(3):
        weight.grad = torch.randn_like(weight)
        optimizer.step()
    return weight, optimizer


def test_weights_come_back_bit_for_bit_where_upstream_rounds_even_after_an_error() -> None:
    weight, optimizer = stepped_sgd()
    before = weight.detach().clone()
    inside = []

    def fail() -> None:
        with evaluation_weights(optimizer):
            inside.append(weight.detach().clone())
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert not torch.equal(inside[0], before)
    assert torch.equal(weight, before)
    optimizer.eval()
    optimizer.train()
    assert not torch.equal(weight, before)


def test_the_average_is_found_behind_the_wrapper_of_accelerate() -> None:
    weight, optimizer = stepped_sgd(torch.float32)
    before = weight.detach().clone()
    with evaluation_weights(Accelerator(cpu=True).prepare(optimizer)):
        assert not torch.equal(weight, before)


def test_an_optimizer_without_modes_is_left_alone() -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    set_to_train(Accelerator(cpu=True).prepare(optimizer))
    with evaluation_weights(optimizer):
        weight.data.add_(1.0)
    assert weight.tolist() == [2.0, 2.0, 2.0]


def test_a_schedule_is_refused_and_a_warm_up_is_not(tmp_path: Path) -> None:
    data = csv_file(tmp_path / "d.csv")
    common = ("train", "--data", data, "--optim", "schedulefree-adamw", "--dry-run", "--json")
    refused = effcli(*common, "--scheduler", "cosine")
    assert refused.code == 2
    assert "--scheduler cosine: 'schedulefree-adamw' needs a constant learning rate" in refused.error
    assert effcli(*common, "--warmup-ratio", 0.1).record["spec"]["loop"]["scheduler"] == "constant"
