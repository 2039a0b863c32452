"""Models of 2 to 3 million parameters of the usual architectures: an update takes a second."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from transformers import (
    BertConfig,
    DistilBertConfig,
    GPT2Config,
    LlamaConfig,
    PretrainedConfig,
    T5Config,
    ViTConfig,
)

ROWS, TOKENS = 4, 32
"""Of one micro-batch; images have as many patches as follow from their size."""

_VOCABULARY = 2000
_HIDDEN = 128
_HEADS = 4
_FEED_FORWARD = 4 * _HIDDEN


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """What is trained: its task, and the configuration with a share of dropout."""

    task: str
    config: Callable[[float], PretrainedConfig]


def _bert(dropout: float) -> PretrainedConfig:
    rates = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    return BertConfig(**_body(10), **rates, vocab_size=_VOCABULARY, max_position_embeddings=64, num_labels=2)


def _distilbert(dropout: float) -> PretrainedConfig:
    sizes = {"dim": _HIDDEN, "n_layers": 10, "n_heads": _HEADS, "hidden_dim": _FEED_FORWARD}
    rates = {"dropout": dropout, "attention_dropout": dropout, "seq_classif_dropout": dropout}
    return DistilBertConfig(**sizes, **rates, vocab_size=_VOCABULARY, max_position_embeddings=64, num_labels=2)


def _gpt2(dropout: float) -> PretrainedConfig:
    sizes = {"n_embd": _HIDDEN, "n_layer": 10, "n_head": _HEADS, "n_positions": 64}
    rates = {"resid_pdrop": dropout, "embd_pdrop": dropout, "attn_pdrop": dropout}
    return GPT2Config(**sizes, **rates, **_no_cache(), vocab_size=_VOCABULARY)


def _llama(dropout: float) -> PretrainedConfig:
    sizes = {**_body(10), "num_key_value_heads": 2, "max_position_embeddings": 64}
    return LlamaConfig(**sizes, **_no_cache(), attention_dropout=dropout, vocab_size=_VOCABULARY)


def _t5(dropout: float) -> PretrainedConfig:
    sizes = {"d_model": _HIDDEN, "d_kv": 32, "d_ff": _FEED_FORWARD, "num_layers": 6, "num_heads": _HEADS}
    tokens = {"decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1}
    return T5Config(**sizes, **tokens, dropout_rate=dropout, vocab_size=_VOCABULARY, use_cache=False)


def _vit(dropout: float) -> PretrainedConfig:
    rates = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    return ViTConfig(**_body(12), **rates, image_size=48, patch_size=8, num_labels=10)


def _body(num_layers: int) -> dict[str, Any]:
    return {
        "hidden_size": _HIDDEN,
        "num_hidden_layers": num_layers,
        "num_attention_heads": _HEADS,
        "intermediate_size": _FEED_FORWARD,
    }


def _no_cache() -> dict[str, Any]:
    return {"use_cache": False, "bos_token_id": 1, "eos_token_id": 2}


ARCHITECTURES = {
    "DistilBERT": Architecture(task="classification", config=_distilbert),
    "BERT": Architecture(task="classification", config=_bert),
    "GPT-2": Architecture(task="causal-lm", config=_gpt2),
    "Llama": Architecture(task="causal-lm", config=_llama),
    "T5": Architecture(task="seq2seq", config=_t5),
    "ViT": Architecture(task="image-classification", config=_vit),
}
