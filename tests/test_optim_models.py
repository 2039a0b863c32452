"""Whole models: the state predicted from shapes is the state of the real class, by key and by parameter."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import pytest
import torch
from transformers import DistilBertConfig, DistilBertForSequenceClassification, PreTrainedModel

from effcli.measure.optimizer_size import inspect_optimizer
from effcli.memory.state import predict_state
from effcli.models.build import parameter_infos
from effcli.optim.entry import OptimizerEntry
from effcli.optim.groups import decay_groups
from effcli.optim.registry import entries, find, resolve_hyper
from effcli.spec import OptimSpec
from tests.tiny_models import stepped, tiny_distilbert, tiny_gpt2, tiny_mixtral, tiny_t5, tiny_vit

TINY = (tiny_distilbert, tiny_gpt2, tiny_t5, tiny_vit, tiny_mixtral)
LARGE = {
    "adamw": (131_566_188, 526_264_752),
    "adam8bit": (131_566_188, 134_004_336),
    "adafactor": (178_712, 714_432),
}
"""State of a classifier of the size of distilbert-base, in elements and bytes."""

each_entry = pytest.mark.parametrize("entry", entries(), ids=lambda entry: entry.name)


def check(entry: OptimizerEntry, model: PreTrainedModel) -> tuple[int, int]:
    """Compare prediction and measurement; return elements and bytes."""
    if entry.package is not None and importlib.util.find_spec(entry.package) is None:
        pytest.skip(f"{entry.package} is not installed: pip install {entry.pip}")
    torch.manual_seed(0)
    spec = OptimSpec(name=entry.name)
    predicted = predict_state(entry, parameter_infos(model), resolve_hyper(entry, spec))
    measured = inspect_optimizer(stepped(entry, model, spec))
    assert predicted.tensors == measured.tensors
    assert {name: b for name, b in predicted.by_parameter.items() if b} == {
        name: b for name, b in measured.by_parameter.items() if b
    }
    assert (predicted.state_bytes, predicted.shared_bytes) == (measured.state_bytes, measured.shared_bytes)
    assert predicted.state_elements == measured.state_elements
    return measured.state_elements, measured.state_bytes


def base_distilbert() -> PreTrainedModel:
    """Return a classifier of the shape of distilbert-base-cased: 65,783,042 parameters in 104 tensors."""
    with torch.device("meta"):
        model = DistilBertForSequenceClassification(DistilBertConfig(vocab_size=28_996))
    return model.to_empty(device="cpu").apply(_fill)


def _fill(module: torch.nn.Module) -> None:
    for param in module.parameters(recurse=False):
        torch.nn.init.constant_(param, 0.02)


@pytest.mark.parametrize("build", TINY)
@each_entry
def test_a_whole_model_takes_what_was_predicted(entry: OptimizerEntry, build: Callable[[], PreTrainedModel]) -> None:
    check(entry, build())


@pytest.mark.slow  # fast for the same optimizers, by key: `test_optimizer_size.py`
@pytest.mark.parametrize("name", LARGE)
def test_a_model_of_the_size_of_distilbert_base_takes_the_published_bytes(name: str) -> None:
    model = base_distilbert()
    assert (len(list(model.parameters())), sum(p.numel() for p in model.parameters())) == (104, 65_783_042)
    assert check(find(name), model) == LARGE[name]


def test_norms_that_the_usual_list_of_names_misses_are_not_decayed_either() -> None:
    rest = decay_groups(base_distilbert(), 0.01)[-1]
    usual = ("bias", "LayerNorm.weight")
    missed = [p for n, p in zip(rest["names"], rest["params"], strict=True) if not any(word in n for word in usual)]
    assert (len(missed), sum(param.numel() for param in missed)) == (12, 9_216)


@pytest.mark.slow
@each_entry
def test_a_model_of_the_size_of_distilbert_base_takes_what_was_predicted(
    entry: OptimizerEntry, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Muon's products in bf16 would take 20 minutes on a CPU without bf16 instructions, and no state depends on them.
    monkeypatch.setattr("torch.optim._muon._zeropower_via_newtonschulz", lambda gradient, *settings: gradient)
    check(entry, base_distilbert())
