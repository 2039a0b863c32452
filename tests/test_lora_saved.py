"""Adapters that were saved: what the folder holds, and that peft makes the trained model of it."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer, BertConfig, BertForMaskedLM

from tests.commands import data_flags, effcli

pytestmark = pytest.mark.usefixtures("without_plan")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import peft


def loaded(kind: str, folder: Path, **settings: Any) -> torch.nn.Module:
    """Return what `peft.AutoPeftModelFor...` makes of a saved folder."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft 0.21 asks transformers for a name that is deprecated
        return getattr(peft, f"AutoPeftModelFor{kind}").from_pretrained(folder, **settings)


def logits_of(model: torch.nn.Module, tokenizer: Any, texts: list[str]) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(**tokenizer(texts, padding=True, return_tensors="pt")).logits


def evaluation_loss(model: torch.nn.Module, folder: Path, data: Path) -> float:
    """Return the mean loss of a classifier over the rows of a file."""
    texts, labels = zip(*(line.split(",") for line in data.read_text().splitlines()[1:]), strict=True)
    logits = logits_of(model, AutoTokenizer.from_pretrained(folder), list(texts))
    index = {label: number for number, label in enumerate(sorted(set(labels)))}
    return torch.nn.functional.cross_entropy(logits, torch.tensor([index[label] for label in labels])).item()


def test_adapters_on_random_weights_are_saved_with_those(distilbert: Path, data: Path, tmp_path: Path) -> None:
    out = tmp_path / "o"
    lora = ("--lora-r", 8, "--lora-targets", "q_lin,v_lin")
    arguments = ("--data", data, "--eval-data", data, *lora, "--lr", 1e-2, "--out", out)
    record = effcli("train", distilbert, *arguments, "--json").record
    model = loaded("SequenceClassification", out / "model")
    assert evaluation_loss(model, out / "model", data) == pytest.approx(record["eval"][-1]["eval_loss"], abs=1e-6)
    below = AutoModelForSequenceClassification.from_pretrained(out / "model" / "base")
    trained = model.get_base_model().distilbert.transformer.layer[0].attention.q_lin
    assert torch.equal(below.distilbert.transformer.layer[0].attention.q_lin.weight, trained.base_layer.weight)
    assert trained.lora_B["default"].weight.abs().max() > 0


def test_adapters_load_onto_the_model_they_were_made_for(gpt2: Path, data: Path, tmp_path: Path) -> None:
    text = data_flags("causal-lm", data)
    assert effcli("train", gpt2, *text, "--max-steps", 1, "--out", tmp_path / "base").code == 0
    below = tmp_path / "base" / "model"
    three = tmp_path / "three.csv"
    three.write_text("text,label\none two three,a\nfour five,b\nsix seven eight nine,c\none three,a\n")
    out = tmp_path / "o"
    arguments = ("--data", three, "--eval-data", three, "--lora-r", 4, "--lora-targets", "all-linear", "--lr", 1e-2)
    done = effcli("train", below, *arguments, "--out", out, "--json")
    call = f"peft.AutoPeftModelForSequenceClassification.from_pretrained('{out / 'model'}', num_labels=3)"
    assert any(call in note and str(below) in note for note in done.record["notes"])
    assert {path.name for path in (out / "model" / "base").iterdir()} == {"config.json"}
    labels = json.loads((out / "model" / "base" / "config.json").read_text())["id2label"]
    assert labels == {"0": "a", "1": "b", "2": "c"}
    model = loaded("SequenceClassification", out / "model", num_labels=3)
    measured = evaluation_loss(model, out / "model", three)
    assert measured == pytest.approx(done.record["eval"][-1]["eval_loss"], abs=1e-6)

    error = effcli("train", out / "model", "--data", three).error
    assert "holds adapters of peft" in error
    assert str(below) in error


def test_adapters_of_embedding_and_tied_head_load_again(gpt2: Path, data: Path, tmp_path: Path) -> None:
    out = tmp_path / "o"
    done = effcli(
        "train", gpt2, *data_flags("causal-lm", data), "--eval-data", data,
        "--lora-r", 2, "--lora-targets", "wte,lm_head", "--lr", 1e-2, "--batch-size", 12, "--out", out, "--json",
    )  # fmt: skip
    model, tokenizer = loaded("CausalLM", out / "model"), AutoTokenizer.from_pretrained(out / "model")
    texts = [line.split(",")[0] for line in data.read_text().splitlines()[1:]]
    total, tokens = 0.0, 0
    for text in texts:
        ids = tokenizer(text, return_tensors="pt")["input_ids"]
        logits = model.eval()(ids).logits[0, :-1]
        total += torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum").item()
        tokens += ids.shape[1] - 1
    assert total / tokens == pytest.approx(done.record["eval"][-1]["eval_loss"], abs=1e-5)


def test_a_body_with_new_weights_is_saved_below_the_adapters(data: Path, tmp_path: Path) -> None:
    settings = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    BertForMaskedLM(BertConfig(vocab_size=100, max_position_embeddings=64, **settings)).save_pretrained(tmp_path / "b")
    out = tmp_path / "o"
    arguments = ("--data", data, "--eval-data", data, "--lora-r", 2, "--lr", 1e-2, "--max-steps", 3, "--out", out)
    done = effcli("train", tmp_path / "b", *arguments, "--json")
    assert any("bert.pooler.dense.weight" in note and "leaves" in note for note in done.record["notes"])
    model = loaded("SequenceClassification", out / "model")
    assert evaluation_loss(model, out / "model", data) == pytest.approx(done.record["eval"][-1]["eval_loss"], abs=1e-6)
