"""Tiny models of every head that trains, and rows of uneven length for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    BartConfig,
    BertConfig,
    DistilBertConfig,
    GPT2Config,
    LlamaConfig,
    PretrainedConfig,
    PreTrainedModel,
    T5Config,
    set_seed,
)

VOCABULARY = 200
PAD = 0
LONGEST = 12
"""Tokens of the longest row."""
HEADS = (
    ("classification", "distilbert"),
    ("classification", "bert"),
    ("classification", "gpt2"),
    ("classification", "llama"),
    ("regression", "distilbert"),
    ("causal-lm", "gpt2"),
    ("causal-lm", "llama"),
    ("seq2seq", "t5"),
    ("seq2seq", "bart"),
)
"""Task and model type. The first model type of a task stands for it where one is enough."""
_AUTO = {"causal-lm": AutoModelForCausalLM, "seq2seq": AutoModelForSeq2SeqLM}


def tiny_model(task: str, *, dropout: float = 0.0, family: str | None = None) -> PreTrainedModel:
    """Return a seeded model of some ten thousand parameters; without a family the first that has the task."""
    set_seed(7)
    family = family or next(first for name, first in HEADS if name == task)
    config = _CONFIGS[family](dropout)
    if task in _AUTO:
        return _AUTO[task].from_config(config)
    config.num_labels = 1 if task == "regression" else 2
    return AutoModelForSequenceClassification.from_config(config)


def rows(count: int, task: str) -> list[dict[str, Any]]:
    """Return rows of 2 to 12 tokens, no two neighbours alike in length; targets have 1 to 7."""
    generator = torch.Generator().manual_seed(3)

    def ids(length: int) -> list[int]:
        return torch.randint(4, VOCABULARY, (length,), generator=generator).tolist()

    made = []
    for index in range(count):
        length = 2 + (index * 5) % 11
        row: dict[str, Any] = {"input_ids": ids(length), "attention_mask": [1] * length}
        if task == "seq2seq":
            row["labels"] = ids(1 + (index * 3) % 7)
        elif task != "causal-lm":
            row["labels"] = index % 2 if task == "classification" else index / 3
        made.append(row)
    return made


def _distilbert(dropout: float) -> PretrainedConfig:
    drops = {"dropout": dropout, "attention_dropout": dropout, "seq_classif_dropout": dropout}
    sizes = {"dim": 32, "n_layers": 2, "n_heads": 2, "hidden_dim": 64, "max_position_embeddings": 32}
    return DistilBertConfig(vocab_size=VOCABULARY, **sizes, **drops)


def _bert(dropout: float) -> PretrainedConfig:
    drops = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    return BertConfig(vocab_size=VOCABULARY, max_position_embeddings=32, **_SIZES, **drops)


def _gpt2(dropout: float) -> PretrainedConfig:
    drops = {"resid_pdrop": dropout, "embd_pdrop": dropout, "attn_pdrop": dropout}
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 32}
    return GPT2Config(vocab_size=VOCABULARY, use_cache=False, pad_token_id=PAD, **sizes, **drops)


def _llama(dropout: float) -> PretrainedConfig:
    more = {"attention_dropout": dropout, "use_cache": False, "pad_token_id": PAD}
    return LlamaConfig(vocab_size=VOCABULARY, max_position_embeddings=32, **_SIZES, **more)


def _t5(dropout: float) -> PretrainedConfig:
    sizes = {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2}
    more = {"decoder_start_token_id": PAD, "use_cache": False}
    return T5Config(vocab_size=VOCABULARY, dropout_rate=dropout, **sizes, **more)


def _bart(dropout: float) -> PretrainedConfig:
    sides = {
        f"{side}_{name}": size
        for side in ("encoder", "decoder")
        for name, size in (("layers", 2), ("attention_heads", 2), ("ffn_dim", 64))
    }
    more = {"pad_token_id": PAD, "use_cache": False, "max_position_embeddings": 32}
    return BartConfig(vocab_size=VOCABULARY, d_model=32, dropout=dropout, **sides, **more)


_SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
_CONFIGS: dict[str, Callable[[float], PretrainedConfig]] = {
    "distilbert": _distilbert,
    "bert": _bert,
    "gpt2": _gpt2,
    "llama": _llama,
    "t5": _t5,
    "bart": _bart,
}
