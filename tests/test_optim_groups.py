"""Which parameters are decayed, on real architectures."""

from __future__ import annotations

import pytest
import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
)

from effcli.errors import UsageError
from effcli.optim.groups import decay_groups, unique_groups
from effcli.optim.registry import entries, find, resolve_hyper
from effcli.spec import OptimSpec
from tests.tiny_models import tiny_distilbert, tiny_gpt2

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}


def kinds(names: list[str]) -> set[str]:
    """Return the names without layer numbers and prefixes: the last two parts."""
    return {".".join(name.split(".")[-2:]) for name in names}


def test_distilbert_has_the_published_group_sizes() -> None:
    decayed, rest = decay_groups(tiny_distilbert(), 0.1)
    assert (decayed["weight_decay"], rest["weight_decay"]) == (0.1, 0.0)
    assert (len(decayed["params"]), sum(p.numel() for p in decayed["params"])) == (16, 137_856)
    assert (len(rest["params"]), sum(p.numel() for p in rest["params"])) == (24, 1_602)
    assert sum("sa_layer_norm" in name or "output_layer_norm" in name for name in rest["names"]) == 8


def test_gpt2_holds_its_tied_head_once() -> None:
    model = tiny_gpt2()
    groups = decay_groups(model, 0.1)
    assert sum(len(group["params"]) for group in groups) == 28
    assert sum(p.numel() for group in groups for p in group["params"]) == 168_192
    assert kinds(groups[0]["names"]) == {
        "wte.weight",
        "wpe.weight",
        "c_attn.weight",
        "c_proj.weight",
        "c_fc.weight",
    }
    assert {"ln_1.weight", "ln_2.weight", "ln_f.weight", "c_attn.bias"} <= kinds(groups[1]["names"])


def tiny_llama() -> PreTrainedModel:
    return LlamaForCausalLM(LlamaConfig(vocab_size=100, **SMALL))


def tiny_bert() -> PreTrainedModel:
    return BertForSequenceClassification(BertConfig(vocab_size=100, **SMALL))


def tiny_t5() -> PreTrainedModel:
    return T5ForConditionalGeneration(T5Config(vocab_size=100, d_model=32, d_kv=16, d_ff=64, num_layers=2, num_heads=2))


def tiny_vit() -> PreTrainedModel:
    return ViTForImageClassification(ViTConfig(image_size=32, patch_size=16, num_labels=2, **SMALL))


@pytest.mark.parametrize(
    ("build", "undecayed"),
    [
        (tiny_llama, {"input_layernorm.weight", "post_attention_layernorm.weight", "norm.weight"}),
        (tiny_t5, {"layer_norm.weight", "final_layer_norm.weight"}),
        (tiny_bert, {"LayerNorm.weight"}),
        (tiny_vit, {"layernorm_before.weight", "layernorm_after.weight", "layernorm.weight"}),
    ],
)
def test_only_norms_and_biases_are_spared_whatever_the_architecture_calls_them(build, undecayed: set[str]) -> None:
    model = build()
    decayed, rest = decay_groups(model, 0.1)
    assert {kind for kind in kinds(rest["names"]) if not kind.endswith(".bias")} == undecayed
    assert not [name for name in decayed["names"] if name.endswith("bias")]
    assert {*decayed["names"], *rest["names"]} == {name for name, _ in model.named_parameters()}


def test_an_embedding_called_bias_is_a_weight() -> None:
    decayed, _ = decay_groups(tiny_t5(), 0.1)
    assert any(name.endswith("relative_attention_bias.weight") for name in decayed["names"])


def test_fused_attention_biases_scalars_and_unnamed_norms_are_spared() -> None:
    class MyRMSNORM(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = torch.nn.Parameter(torch.ones(4, 4))
            self.inner = torch.nn.Linear(4, 4, bias=False)

    model = torch.nn.ModuleDict({"attention": torch.nn.MultiheadAttention(4, 2), "last": MyRMSNORM()})
    model.register_parameter("scale", torch.nn.Parameter(torch.ones(())))
    model.register_parameter("position_bias", torch.nn.Parameter(torch.ones(2, 2)))
    decayed, rest = decay_groups(model, 0.1)
    assert decayed["names"] == ["attention.in_proj_weight", "attention.out_proj.weight", "last.inner.weight"]
    assert rest["names"] == [
        "scale",
        "position_bias",
        "attention.in_proj_bias",
        "attention.out_proj.bias",
        "last.table",
    ]


def test_frozen_parameters_are_left_out_and_an_empty_group_is_dropped() -> None:
    model = torch.nn.Linear(3, 3)
    model.weight.requires_grad_(False)
    (only,) = decay_groups(model, 0.1)
    assert (only["names"], only["weight_decay"]) == (["bias"], 0.0)
    model.bias.requires_grad_(False)
    with pytest.raises(UsageError, match="every parameter of the model is frozen"):
        decay_groups(model, 0.1)


def test_unique_groups_leave_the_given_ones_alone() -> None:
    param, other = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(3))
    given = [{"params": [param, param], "weight_decay": 0.1}, {"params": [param, other]}, {"params": [other]}]
    unique = unique_groups(given)
    assert [[id(p) for p in group["params"]] for group in unique] == [[id(param)], [id(other)]]
    assert [group["names"] for group in unique] == [["0"], ["3"]]
    assert [set(group) for group in given] == [{"params", "weight_decay"}, {"params"}, {"params"}]


def test_a_parameter_listed_twice_is_updated_once() -> None:
    entry = find("sgd")
    hyper = resolve_hyper(entry, OptimSpec(name="sgd", lr=0.1, args={"momentum": 0}))
    for groups in ([[0, 0]], [[0], [0]]):
        param = torch.nn.Parameter(torch.ones(1))
        param.grad = torch.ones(1)
        entry.build([{"params": [param] * len(group), "weight_decay": 0.0} for group in groups], hyper).step()
        assert param.item() == pytest.approx(0.9)


@pytest.mark.parametrize("entry", entries(), ids=lambda entry: entry.name)
def test_one_set_of_groups_serves_two_optimizers_and_keeps_its_names(entry) -> None:
    groups = decay_groups(tiny_gpt2(), 0.1)
    before = [set(group) for group in groups]
    first = entry.build(groups, resolve_hyper(entry, OptimSpec(name=entry.name, lr=1e-3)))
    second = entry.build(groups, resolve_hyper(entry, OptimSpec(name=entry.name, lr=1e-4)))
    assert [set(group) for group in groups] == before
    for optimizer, lr in ((first, 1e-3), (second, 1e-4)):
        # An optimizer may split a group, as Muon does, but each parameter keeps its name, rate and decay.
        kept = {
            name: (id(param), group["lr"], group["weight_decay"])
            for group in optimizer.param_groups
            for name, param in zip(group["names"], group["params"], strict=True)
        }
        assert kept == {
            name: (id(param), lr, group["weight_decay"])
            for group in groups
            for name, param in zip(group["names"], group["params"], strict=True)
        }
