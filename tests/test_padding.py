"""Padding changes nothing that is learnt, whatever model and tokenizer say about the token that pads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    FNetConfig,
    FNetForSequenceClassification,
    PreTrainedTokenizerFast,
)

from effcli.models.notes import model_notes
from tests.commands import TINY_DISTILBERT, TINY_GPT2, csv_file, effcli, model_folder
from tests.heads import tiny_model

pytestmark = pytest.mark.usefixtures("without_plan")

WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
SPECIALS = {"<unk>": 0, "<eos>": 1, "<pad>": 2}
ROBERTA = {
    "model_type": "roberta", "vocab_size": 20, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 64, "max_position_embeddings": 66, "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}  # fmt: skip

XLNET = {
    "model_type": "xlnet", "vocab_size": 200, "d_model": 32, "n_layer": 2, "n_head": 2, "d_inner": 64, "dropout": 0.0,
    "summary_last_dropout": 0.0,
}  # fmt: skip
LLAMA = {
    "model_type": "llama", "vocab_size": 20, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
FNET = {
    "vocab_size": 20, "hidden_size": 32, "num_hidden_layers": 1, "intermediate_size": 64, "max_position_embeddings": 32,
}  # fmt: skip
UNCHANGED = ("--optim", "sgd", "--lr", 0, "--weight-decay", 0)


def folder_with_tokenizer(
    path: Path,
    config: dict[str, object],
    *,
    named: int | None,
    tokenizer_pads_with: str | None,
    padding_side: str = "right",
) -> Path:
    """Return a model folder whose tokenizer may know no padding token, and whose configuration may name another."""
    folder = model_folder(path, config, pad_token_id=named)
    vocabulary = {**SPECIALS, **{word: index for index, word in enumerate(WORDS, start=len(SPECIALS))}}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    pads = {} if tokenizer_pads_with is None else {"pad_token": tokenizer_pads_with}
    PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", eos_token="<eos>", padding_side=padding_side,
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


def unpadded_loss_and_norm(model: Any, rows: list[Any], labels: list[int] | None) -> tuple[float, float]:
    """Return the mean loss of rows that are given alone, one by one, and the norm of its gradient.

    `labels` are the rows' classes; none means that the tokens themselves are predicted.
    """
    losses = []
    for index, row in enumerate(rows):
        logits = model(input_ids=row).logits
        wanted = row[0, 1:] if labels is None else torch.tensor([labels[index]])
        losses.append(torch.nn.functional.cross_entropy(logits[0, :-1] if labels is None else logits, wanted))
    counts = [row.shape[1] - 1 if labels is None else 1 for row in rows]
    loss = sum(loss * count for loss, count in zip(losses, counts, strict=True)) / sum(counts)
    loss.backward()
    gradients = [parameter.grad.norm() for parameter in model.parameters() if parameter.grad is not None]
    return loss.item(), torch.stack(gradients).norm().item()


@pytest.mark.usefixtures("without_plan")
@pytest.mark.parametrize(("batch_size", "accum"), [(12, 1), (4, 3)])
@pytest.mark.parametrize(
    ("config", "task", "side"),
    [(TINY_GPT2, "causal-lm", "left"), (TINY_GPT2, "classification", "left"), (XLNET, "classification", "right")],
)
def test_what_is_learnt_is_what_rows_alone_teach_on_whatever_side_the_tokenizer_pads(
    config: dict[str, object], task: str, side: str, batch_size: int, accum: int, tmp_path: Path
) -> None:
    made = folder_with_tokenizer(tmp_path / "m", config, named=None, tokenizer_pads_with="<pad>", padding_side=side)
    data, out = csv_file(tmp_path / "d.csv"), tmp_path / "o"
    record = effcli(
        "train", made, "--data", data, "--eval-data", data, "--task", task, "--text-column", "sentence", *UNCHANGED,
        "--batch-size", batch_size, "--accum", accum, "--epochs", 1, "--out", out, "--json",
    ).record  # fmt: skip
    auto = AutoModelForCausalLM if task == "causal-lm" else AutoModelForSequenceClassification
    tokenizer = AutoTokenizer.from_pretrained(out / "model")
    assert tokenizer.padding_side == side
    lines = [line.split(",") for line in data.read_text().splitlines()[1:]]
    rows = [tokenizer(text, return_tensors="pt")["input_ids"] for text, _ in lines]
    labels = [int(label) for _, label in lines] if task == "classification" else None
    wanted = unpadded_loss_and_norm(auto.from_pretrained(out / "model"), rows, labels)
    (update,), (evaluated,) = record["history"], record["eval"]
    assert (update["loss"], update["grad_norm"]) == pytest.approx(wanted, rel=2e-6)
    assert evaluated["eval_loss"] == pytest.approx(wanted[0], rel=2e-6)


@pytest.mark.usefixtures("without_plan")
def test_a_tokenizer_built_for_xlnet_pads_where_its_head_does_not_read(tmp_path: Path) -> None:
    made = model_folder(tmp_path / "m", XLNET)
    done = effcli("train", made, "--data", csv_file(tmp_path / "d.csv"), "--max-steps", 1, "--out", tmp_path / "o")
    assert done.code == 0, done.stderr
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "o" / "model")
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "o" / "model").eval()
    alone = tokenizer("one two three", return_tensors="pt")
    padded = tokenizer(["one two three", "one two three four five six"], padding=True, return_tensors="pt")
    with torch.no_grad():
        torch.testing.assert_close(model(**padded).logits[:1], model(**alone).logits)


@pytest.mark.usefixtures("without_plan")
def test_the_end_of_a_text_is_learnt_also_where_its_token_pads(tmp_path: Path) -> None:
    made = folder_with_tokenizer(tmp_path / "m", LLAMA, named=None, tokenizer_pads_with=None)
    texts = ["one two <eos> three four", "five <eos> six", "seven eight nine <eos> ten"]
    data, out = tmp_path / "d.jsonl", tmp_path / "o"
    data.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    record = effcli(
        "train", made, "--data", data, "--task", "causal-lm", *UNCHANGED, "--batch-size", 3, "--epochs", 1,
        "--out", out, "--json",
    ).record  # fmt: skip
    saved = AutoConfig.from_pretrained(out / "model")
    tokenizer = AutoTokenizer.from_pretrained(out / "model")
    assert saved.pad_token_id == tokenizer.pad_token_id == tokenizer.eos_token_id == SPECIALS["<eos>"]
    assert json.loads((out / "model" / "generation_config.json").read_text())["pad_token_id"] == SPECIALS["<eos>"]
    saved.pad_token_id = None  # as the folder has it
    plain = AutoModelForCausalLM.from_pretrained(out / "model", config=saved)
    loss, norm = unpadded_loss_and_norm(
        plain, [tokenizer(text, return_tensors="pt")["input_ids"] for text in texts], None
    )
    embeddings = plain.get_input_embeddings().weight
    assert embeddings.grad[SPECIALS["<eos>"]].norm() > 1e-3
    assert embeddings[SPECIALS["<eos>"]].norm() > 1e-3, "new weights are drawn for it as for any other token"
    assert record["history"][0]["loss"] == pytest.approx(loss, rel=2e-6)
    assert record["history"][0]["grad_norm"] == pytest.approx(norm, rel=2e-6)


def test_a_model_that_reads_padding_is_told_of() -> None:
    (note,) = model_notes(FNetForSequenceClassification(FNetConfig(**FNET)))
    assert note.startswith("FNetForSequenceClassification takes no attention mask: it reads padding too")
    assert model_notes(tiny_model("classification")) == ()
