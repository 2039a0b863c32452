"""Data prepared as a run prepares it: read, its columns chosen, tokenised one token a word."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from effcli.data.columns import Problem, choose
from effcli.data.source import RawTables, load_tables
from effcli.data.tokenise import PreparedData, tokenise
from effcli.spec import build_spec

PAD, UNKNOWN, START, END = 0, 1, 2, 3
VOCABULARY = {"[PAD]": PAD, "[UNK]": UNKNOWN, "[CLS]": START, "[SEP]": END, "a": 4, "b": 5, "c": 6}


def word_tokenizer(*, special: bool = True, types: bool = False) -> PreTrainedTokenizerFast:
    """Return a tokenizer of one token a word, with a start and an end token where `special`."""
    backend = Tokenizer(models.WordLevel(VOCABULARY, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    if special:
        backend.post_processor = processors.BertProcessing(("[SEP]", END), ("[CLS]", START))
    names = ["input_ids", "token_type_ids", "attention_mask"] if types else ["input_ids", "attention_mask"]
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="[PAD]", unk_token="[UNK]", model_input_names=names, model_max_length=16
    )


def chosen(
    train: Path,
    evaluation: Path | None = None,
    *,
    task: str | None = None,
    is_decoder: bool = False,
    is_encoder_decoder: bool = False,
    architectures: tuple[str, ...] = (),
    **data: Any,
) -> tuple[RawTables, Problem]:
    """Return the tables that files hold, and the problem they pose to a kind of model; `data` are other settings."""
    files = {"train": str(train), "eval": None if evaluation is None else str(evaluation)}
    spec = build_spec({"data": {**files, **data}, "model": {"task": task}})
    raw = load_tables(spec.data, seed=spec.loop.seed)
    kind = {"is_decoder": is_decoder, "is_encoder_decoder": is_encoder_decoder, "architectures": architectures}
    return raw, choose(raw, spec, **kind)


def tokenised(
    train: Path,
    evaluation: Path | None = None,
    *,
    tokenizer: PreTrainedTokenizerFast | None = None,
    max_length: int = 64,
    **options: Any,
) -> PreparedData:
    """Return the rows of files as token ids; `options` are those of `chosen`."""
    raw, problem = chosen(train, evaluation, **options)
    return tokenise(raw, problem, tokenizer or word_tokenizer(), max_length=max_length)
