"""Predicted state of whole models, from shapes alone, against published and measured numbers."""

from __future__ import annotations

import pytest
import torch

from effcli.errors import UsageError
from effcli.memory.state import predict_state
from effcli.models.build import parameter_infos
from effcli.optim.registry import entries, find, resolve_hyper
from effcli.spec import OptimSpec
from effcli.units import ParamInfo, Placement
from tests.tiny_models import measured, tiny_distilbert, tiny_gpt2


@pytest.mark.parametrize(
    ("name", "spec", "dtype", "num_bytes"),
    [
        ("adamw", OptimSpec(), torch.float32, 1_115_824),
        ("adamw", OptimSpec(), torch.bfloat16, 557_992),
        ("adamw", OptimSpec(args={"amsgrad": True}), torch.float32, 1_673_656),
        ("sgd", OptimSpec(), torch.float32, 0),
        ("sgd-momentum", OptimSpec(), torch.float32, 557_832),
        ("adam", OptimSpec(), torch.float32, 1_115_824),
        ("adam-amsgrad", OptimSpec(), torch.float32, 1_673_656),
        ("nadam", OptimSpec(), torch.float32, 1_115_984),
        ("radam", OptimSpec(), torch.bfloat16, 557_992),
        ("adamax", OptimSpec(), torch.float32, 1_115_824),
        ("adagrad", OptimSpec(), torch.float32, 557_992),
        ("adagrad", OptimSpec(), torch.bfloat16, 279_076),
        ("rmsprop", OptimSpec(), torch.float32, 557_992),
        ("rmsprop", OptimSpec(args={"momentum": 0.9, "centered": True}), torch.float32, 1_673_656),
        ("adadelta", OptimSpec(), torch.float32, 1_115_824),
        ("asgd", OptimSpec(), torch.float32, 558_312),
        ("asgd", OptimSpec(), torch.bfloat16, 279_396),
        ("rprop", OptimSpec(), torch.float32, 1_115_824),
        ("muon", OptimSpec(), torch.float32, 853_632),
        ("muon", OptimSpec(), torch.bfloat16, 426_872),
        ("adamw32bit", OptimSpec(), torch.float32, 1_115_664),
        ("adamw32bit", OptimSpec(), torch.bfloat16, 1_115_664),
        ("adam8bit", OptimSpec(), torch.float32, 295_648),
        ("adam8bit", OptimSpec(), torch.bfloat16, 295_648),
        ("adam8bit", OptimSpec(keep_32bit=("embed",)), torch.float32, 702_096),
        ("adafactor", OptimSpec(), torch.float32, 19_280),
        ("adafactor", OptimSpec(), torch.bfloat16, 19_280),
        ("adafactor-torch", OptimSpec(), torch.float32, 19_280),
        ("adafactor-torch", OptimSpec(), torch.bfloat16, 9_720),
    ],
)
def test_a_tiny_distilbert_takes_the_published_bytes(
    name: str, spec: OptimSpec, dtype: torch.dtype, num_bytes: int
) -> None:
    model = tiny_distilbert().to(dtype)
    entry = find(name)
    assert predict_state(entry, parameter_infos(model), resolve_hyper(entry, spec)).state_bytes == num_bytes
    assert measured(entry, model, spec).state_bytes == num_bytes


@pytest.mark.parametrize(("name", "num_bytes"), [("adamw", 1_115_824), ("adam8bit", 295_648)])
def test_autocast_changes_no_state(name: str, num_bytes: int) -> None:
    model, entry = tiny_distilbert(), find(name)
    with torch.autocast("cpu", torch.bfloat16):
        assert measured(entry, model, OptimSpec(name=name)).state_bytes == num_bytes


def test_a_tied_head_counts_once() -> None:
    model, entry = tiny_gpt2(), find("adamw")
    predicted = predict_state(entry, parameter_infos(model), entry.defaults)
    assert (predicted.num_parameters, predicted.state_bytes) == (28, 1_345_648)
    assert measured(entry, model, OptimSpec()).state_bytes == 1_345_648


def test_a_frozen_embedding_has_no_state() -> None:
    model, entry = tiny_gpt2(), find("adamw")
    model.transformer.wte.weight.requires_grad_(False)
    predicted = predict_state(entry, parameter_infos(model), entry.defaults)
    assert "transformer.wte.weight" not in predicted.by_parameter
    assert predicted.state_bytes == 1_345_648 - (8 * 64_000 + 4)
    assert measured(entry, model, OptimSpec()).by_parameter == predicted.by_parameter


def test_torchs_step_lives_on_the_host_and_the_moments_on_the_device() -> None:
    predicted = predict_state(find("adamw"), [ParamInfo(name="w", shape=(10,))], find("adamw").defaults)
    assert predicted.placements == {Placement.HOST: 4, Placement.DEVICE: 80}
    predicted = predict_state(find("asgd"), [ParamInfo(name="w", shape=(10,))], find("asgd").defaults)
    assert predicted.placements == {Placement.DEVICE: 52}


def test_code_tables_count_once_and_only_beside_8_bit_state() -> None:
    entry = find("adam8bit")
    hyper = resolve_hyper(entry, OptimSpec(name="adam8bit"))
    small, large = ParamInfo(name="s", shape=(4095,)), [ParamInfo(name=f"l{i}", shape=(4096,)) for i in range(3)]
    assert predict_state(entry, [small], hyper).shared_bytes == 0
    assert predict_state(entry, [small, *large], hyper).shared_bytes == 2_048


def test_nothing_trainable_takes_nothing() -> None:
    frozen = ParamInfo(name="w", shape=(64, 64), trainable=False)
    for entry in entries():
        assert predict_state(entry, [frozen], resolve_hyper(entry, OptimSpec())).state_bytes == 0


def test_one_name_for_two_parameters_is_refused() -> None:
    twice = [ParamInfo(name="w", shape=(2,)), ParamInfo(name="w", shape=(3,))]
    with pytest.raises(UsageError, match="'w' is listed more than once"):
        predict_state(find("sgd"), twice, find("sgd").defaults)
