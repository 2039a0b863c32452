"""Padding changes nothing that is learnt, whatever model and tokenizer say about the token that pads."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForSequenceClassification, AutoTokenizer, PreTrainedTokenizerFast

from tests.commands import TINY_DISTILBERT, TINY_GPT2, csv_file, effcli, model_folder

WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
SPECIALS = {"<unk>": 0, "<eos>": 1, "<pad>": 2}
ROBERTA = {
    "model_type": "roberta", "vocab_size": 20, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 64, "max_position_embeddings": 66, "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}  # fmt: skip


def folder_with_tokenizer(
    path: Path, config: dict[str, object], *, named: int | None, tokenizer_pads_with: str | None
) -> Path:
    """Return a model folder whose tokenizer may know no padding token, and whose configuration may name another."""
    folder = model_folder(path, config, pad_token_id=named)
    vocabulary = {**SPECIALS, **{word: index for index, word in enumerate(WORDS, start=len(SPECIALS))}}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    pads = {} if tokenizer_pads_with is None else {"pad_token": tokenizer_pads_with}
    PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", eos_token="<eos>",
        model_input_names=["input_ids", "attention_mask"], **pads,
    ).save_pretrained(folder)  # fmt: skip
    return folder


@pytest.mark.parametrize(
    ("config", "named", "tokenizer_pads_with", "pads_with"),
    [
        (TINY_GPT2, None, None, "<eos>"),
        (TINY_GPT2, 0, None, "<eos>"),
        (TINY_GPT2, 500, None, "<eos>"),
        (TINY_GPT2, 0, "<pad>", "<pad>"),
        (ROBERTA, 1, None, "<eos>"),
        (ROBERTA, 1, "<pad>", "<eos>"),
        (TINY_DISTILBERT, 2, None, "<pad>"),
    ],
)
def test_padding_on_the_right_does_not_change_the_logits(
    config: dict[str, object], named: int | None, tokenizer_pads_with: str | None, pads_with: str, tmp_path: Path
) -> None:
    made = folder_with_tokenizer(tmp_path / "m", config, named=named, tokenizer_pads_with=tokenizer_pads_with)
    record = effcli(
        "train", made, "--data", csv_file(tmp_path / "d.csv"), "--max-steps", 1, "--out", tmp_path / "o", "--json"
    ).record
    if config is TINY_GPT2:
        assert record["model"]["num_parameters"] == 168_320  # no row for padding
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "o" / "model")
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "o" / "model").eval()
    assert tokenizer.pad_token == pads_with
    assert tokenizer.pad_token_id == model.config.pad_token_id
    alone = tokenizer("one two three", return_tensors="pt")
    padded = tokenizer(["one two three", "one two three four five six"], padding=True, return_tensors="pt")
    with torch.no_grad():
        torch.testing.assert_close(model(**padded).logits[:1], model(**alone).logits)
