"""Small models with known numbers, and one real optimizer step on them."""

from __future__ import annotations

import torch
from transformers import (
    DistilBertConfig,
    DistilBertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
)

from effcli.measure.optimizer_size import OptimizerSize, inspect_optimizer
from effcli.optim.entry import OptimizerEntry
from effcli.optim.groups import decay_groups
from effcli.optim.hyper import resolve_hyper
from effcli.spec import OptimSpec


def tiny_distilbert() -> PreTrainedModel:
    """Return a classifier of 139,458 parameters in 40 tensors."""
    return DistilBertForSequenceClassification(
        DistilBertConfig(vocab_size=1000, dim=64, n_layers=2, n_heads=2, hidden_dim=128, max_position_embeddings=64)
    )


def tiny_gpt2() -> PreTrainedModel:
    """Return a language model of 168,192 parameters in 28 tensors; its head is tied."""
    return GPT2LMHeadModel(GPT2Config(vocab_size=1000, n_embd=64, n_layer=2, n_head=2, n_positions=64))


def tiny_t5() -> PreTrainedModel:
    """Return a sequence-to-sequence model whose embedding serves encoder, decoder and head."""
    sizes = {"d_model": 64, "d_kv": 32, "d_ff": 128, "num_layers": 2, "num_heads": 2}
    return T5ForConditionalGeneration(T5Config(vocab_size=500, **sizes))


def tiny_vit() -> PreTrainedModel:
    """Return an image classifier with a convolution and position embeddings outside any embedding module."""
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128}
    return ViTForImageClassification(ViTConfig(image_size=32, patch_size=8, num_labels=3, **sizes))


def tiny_mixtral() -> PreTrainedModel:
    """Return a mixture of experts, which transformers 5 keeps in tensors of three dimensions."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2}
    return MixtralForCausalLM(MixtralConfig(vocab_size=500, num_key_value_heads=1, num_local_experts=4, **sizes))


def set_gradients(model: torch.nn.Module) -> None:
    """Give every trainable parameter a random gradient."""
    for param in model.parameters():
        param.grad = torch.randn_like(param) if param.requires_grad else None


def stepped(entry: OptimizerEntry, model: torch.nn.Module, spec: OptimSpec) -> torch.optim.Optimizer:
    """Return the optimizer of `spec` on the decay groups of `model` after one update."""
    set_gradients(model)
    optimizer = entry.build(decay_groups(model, spec.weight_decay), resolve_hyper(entry, spec))
    optimizer.step()
    return optimizer


def measured(entry: OptimizerEntry, model: torch.nn.Module, spec: OptimSpec) -> OptimizerSize:
    """Return the state of the optimizer of `spec` after one update."""
    return inspect_optimizer(stepped(entry, model, spec))
