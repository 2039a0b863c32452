"""Small models of many families, traced without any device's own ways."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import transformers

from effcli.memory.tape import MicroTape
from effcli.trace.batches import BatchShape, fake_batch, own_loss
from effcli.trace.tracer import Tracer

SMALL: dict[str, Any] = {"vocab_size": 200, "hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 48}
MODELS: dict[str, tuple[Any, str, str]] = {
    "llama": (transformers.LlamaConfig(num_hidden_layers=9, **SMALL), "AutoModelForCausalLM", "causal-lm"),
    "gpt2": (
        transformers.GPT2Config(n_layer=7, n_embd=32, n_head=2, vocab_size=200, bos_token_id=0, eos_token_id=0),
        "AutoModelForCausalLM",
        "causal-lm",
    ),
    "bert": (transformers.BertConfig(num_hidden_layers=8, **SMALL), "AutoModelForMaskedLM", "masked-lm"),
    "t5": (
        transformers.T5Config(
            vocab_size=200,
            d_model=32,
            d_kv=16,
            d_ff=48,
            num_heads=2,
            num_layers=8,
            num_decoder_layers=7,
            decoder_start_token_id=0,
        ),
        "AutoModelForSeq2SeqLM",
        "seq2seq",
    ),
    "gemma2, sliding and global by turns": (
        transformers.Gemma2Config(num_hidden_layers=13, num_key_value_heads=1, head_dim=16, **SMALL),
        "AutoModelForCausalLM",
        "causal-lm",
    ),
    "deberta, with sums through all layers": (
        transformers.DebertaV2Config(
            num_hidden_layers=7,
            relative_attention=True,
            pos_att_type=["c2p", "p2c"],
            norm_rel_ebd="layer_norm",
            share_att_key=True,
            position_buckets=16,
            **SMALL,
        ),
        "AutoModelForMaskedLM",
        "masked-lm",
    ),
    "modernbert, in threes with one left over": (
        transformers.ModernBertConfig(num_hidden_layers=19, pad_token_id=0, cls_token_id=1, sep_token_id=2, **SMALL),
        "AutoModelForMaskedLM",
        "masked-lm",
    ),
}


class PlainKernels:
    """Kernels that take nothing beside what they return."""

    def chosen(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def workspace_bytes(self, operator: Any, args: Any) -> tuple[int, ...]:
        return ()

    def lasting_bytes(self) -> Mapping[str, tuple[int, ...]]:
        return {}


def traced(name: str, *, whole: bool, recompute: bool = False, batch_size: int = 2) -> tuple[Tracer, MicroTape]:
    config, auto, task = MODELS[name]

    def build() -> torch.nn.Module:
        with torch.device("meta"):
            model = getattr(transformers, auto).from_config(config)
        if recompute:
            model.activation_checkpointing_enable()
        return model

    tracer = Tracer(build, PlainKernels(), whole=whole)
    shape = BatchShape(batch_size=batch_size, max_length=24)
    tape = tracer.micro(lambda: fake_batch(config, task, shape), forward=own_loss, loss=lambda loss, batch: loss)
    return tracer, tape
