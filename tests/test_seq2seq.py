"""Encoder-decoders from the command line: what is learnt, what is saved, what is counted."""

from __future__ import annotations

import json
import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from effcli.data.columns import Problem
from effcli.data.encode import Lengths, encode_batch
from effcli.data.tokenizer import build_tokenizer
from tests.commands import Result, effcli, model_folder, saved_weights
from tests.jobs import ENGINES

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import peft

T5 = {
    "model_type": "t5", "vocab_size": 100, "d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2,
    "dropout_rate": 0.0,
}  # fmt: skip
BART = {
    "model_type": "bart", "vocab_size": 100, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2,
    "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64,
    "max_position_embeddings": 32, "dropout": 0.0,
}  # fmt: skip
WORDS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")


def pairs(count: int = 11) -> list[dict[str, str]]:
    """Return rows of 2 to 8 source words and 1 to 5 target words, of uneven lengths."""

    def text(start: int, length: int) -> str:
        return " ".join(WORDS[(start + step) % 10] for step in range(length))

    return [
        {"document": text(index, 2 + index * 3 % 7), "summary": text(2 * index, 1 + index * 2 % 5)}
        for index in range(count)
    ]


def lines(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


@pytest.fixture
def t5(tmp_path: Path) -> Path:
    return model_folder(tmp_path / "t5", T5)


@pytest.fixture
def summaries(tmp_path: Path) -> Path:
    return lines(tmp_path / "d.jsonl", pairs())


def train(model: Path, data: Path, out: Path, *more: object) -> Result:
    return effcli("train", model, "--data", data, "--epochs", 1, "--batch-size", 4, "--out", out, "--json", *more)


@pytest.mark.usefixtures("without_plan")
@pytest.mark.parametrize("config", [T5, BART], ids=["t5", "bart"])
def test_what_was_trained_is_loaded_again_and_scores_the_same(
    config: dict[str, Any], summaries: Path, tmp_path: Path
) -> None:
    out = tmp_path / "o"
    done = train(model_folder(tmp_path / "m", config), summaries, out, "--eval-data", summaries)
    record = done.record
    assert record["model"]["task"] == "seq2seq"
    assert "The task is seq2seq, because the model is an encoder-decoder." in done.stderr
    assert "Source text is read from column 'document', target text from column 'summary'." in done.stderr
    assert (record["total_updates"], record["spec"]["data"]["label_column"]) == (3, "summary")

    model, tokenizer = (
        AutoModelForSeq2SeqLM.from_pretrained(out / "model"),
        AutoTokenizer.from_pretrained(out / "model"),
    )
    total, num_tokens = 0.0, 0
    for row in pairs():
        batch = tokenizer(row["document"], text_target=row["summary"], return_tensors="pt")
        assert tokenizer.unk_token_id not in batch["labels"], "the tokenizer learns the words of both columns"
        assert batch["labels"][0, -1] == tokenizer.eos_token_id == model.config.eos_token_id
        with torch.no_grad():
            total += model.eval()(**batch).loss.item() * batch["labels"].numel()
        num_tokens += batch["labels"].numel()
    evaluation = record["eval"][-1]
    assert evaluation["eval_loss"] == pytest.approx(total / num_tokens, rel=1e-5)
    assert evaluation["eval_perplexity"] == pytest.approx(math.exp(evaluation["eval_loss"]))
    assert (evaluation["eval_accuracy"], evaluation["eval_f1"]) == (None, None)
    assert model.config.use_cache is True


@pytest.mark.usefixtures("without_plan")
def test_a_recipe_says_everything_that_was_guessed(t5: Path, summaries: Path, tmp_path: Path) -> None:
    record = train(t5, summaries, tmp_path / "o", "--max-target-length", 4).record
    data = record["spec"]["data"]
    assert (data["text_columns"], data["label_column"]) == (["document"], "summary")
    assert (data["max_length"], data["max_target_length"]) == (512, 4)
    again = effcli("train", "--recipe", tmp_path / "o" / "recipe.yaml", "--dry-run", "--json")
    assert {**again.record["spec"], "output": None} == {**record["spec"], "output": None}
    assert "Source text" not in again.stderr


@pytest.mark.usefixtures("without_plan")
def test_accumulation_equals_the_big_batch_from_file_to_record(t5: Path, summaries: Path, tmp_path: Path) -> None:
    runs = []
    for number, engine in enumerate(ENGINES):
        sizes = ("--batch-size", 2, "--accum", 2) if number else ("--batch-size", 4)
        common = ("--optim", "sgd", "--lr", 0.1, "--engine", engine, *sizes)
        runs.append(train(t5, summaries, tmp_path / engine, *common).record["history"])
    for run in runs[1:]:
        for key in ("loss", "grad_norm", "lr", "epoch"):
            assert [line[key] for line in run] == pytest.approx([line[key] for line in runs[0]], rel=1e-6)
    first, *others = (saved_weights(tmp_path / engine) for engine in ENGINES)
    assert max((first[name] - other[name]).abs().max().item() for other in others for name in first) < 1e-6


@pytest.mark.usefixtures("without_plan")
def test_sources_and_targets_that_are_cut_or_empty_are_counted(t5: Path, tmp_path: Path) -> None:
    rows = [
        {"source": "one two three four five", "target": "one"},
        {"source": "one", "target": "one two three four five"},
        {"source": "one two", "target": " "},
        {"source": None, "target": "one"},
        {"source": "six seven eight nine", "target": "six seven eight nine"},
    ]
    data = lines(tmp_path / "d.jsonl", rows)
    done = train(t5, data, tmp_path / "o", "--max-length", 4, "--max-target-length", 3, "--dry-run")
    found = done.record["data"]
    assert (found["train_rows"], found["skipped_rows"]) == (3, 2)
    assert (found["truncated_rows"], found["truncated_targets"]) == (2, 2)
    assert "2 rows truncated to 4 tokens." in done.stderr
    assert "2 targets truncated to 3 tokens." in done.stderr


def test_a_cut_target_keeps_its_end_token(t5: Path, tmp_path: Path) -> None:
    tokenizer = build_tokenizer(
        ["a b c d"], vocab_size=20, model_type="t5", max_length=20, pad_token_id=0, eos_token_id=1
    )
    made = encode_batch(
        {"s": ["a b c d"], "t": ["d c b a"]},
        problem=Problem(task="seq2seq", text_columns=("s",), label_column="t", notes=()),
        tokenizer=tokenizer,
        lengths=Lengths(text=5, target=3),
    )
    assert tokenizer.convert_ids_to_tokens(made["input_ids"][0]) == ["a", "b", "c", "d", "</s>"]
    assert tokenizer.convert_ids_to_tokens(made["labels"][0]) == ["d", "c", "</s>"]
    assert (made["truncated"], made["truncated_target"]) == ([False], [True])


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (("--max-length", 200), "--max-length 200: "),
        (("--max-target-length", 200), "writes at most 32 tokens"),
        (("--max-target-length", 2, "--max-length", 1), "--max-length"),
        (("--task", "classification", "--label-column", "summary", "--max-target-length", 8), "writes no text"),
    ],
)
def test_what_an_encoder_decoder_cannot_do_is_refused(
    more: tuple[object, ...], words: str, summaries: Path, tmp_path: Path
) -> None:
    done = train(model_folder(tmp_path / "bart", BART), summaries, tmp_path / "o", *more)
    assert done.code == 2
    assert words in done.error
    assert not (tmp_path / "o").exists()


@pytest.mark.usefixtures("without_plan")
def test_adapters_of_an_encoder_decoder_are_trained_and_loaded_by_peft(
    t5: Path, summaries: Path, tmp_path: Path
) -> None:
    record = train(t5, summaries, tmp_path / "o", "--lora-r", 2, "--lr", 0.1).record
    assert record["model"]["num_trainable_parameters"] < record["model"]["num_parameters"] / 5
    assert record["history"][-1]["grad_norm"] > 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft 0.21 asks transformers for a name that is deprecated
        model = peft.AutoPeftModelForSeq2SeqLM.from_pretrained(tmp_path / "o" / "model")
    assert any(value.abs().sum() > 0 for name, value in model.named_parameters() if "lora_B" in name)


def test_the_plan_takes_the_longest_target_beside_the_longest_source(t5: Path, tmp_path: Path) -> None:
    def peak(source: int, target: int) -> int:
        data = lines(tmp_path / "d.jsonl", [{"source": "one " * source, "target": "two " * target}] * 4)
        record = effcli("train", t5, "--data", data, "--batch-size", 4, "--dry-run", "--json").record
        return record["optimizer"]["plan"]["peak_allocated_bytes"]

    # Twice the target adds more than twice the source: its positions have logits, and attend to both.
    assert peak(50, 100) > peak(100, 50)


def test_an_estimate_takes_lengths_of_source_and_target(t5: Path) -> None:
    def peak(*lengths: object) -> dict[str, Any]:
        record = effcli(
            "estimate", t5, "--optim", "sgd", "--batch-size", 2, "--device", "cpu", *lengths, "--json"
        ).record
        peaks = record["optimizers"][0]["plan"]["peak_allocated_bytes"]
        return {**record["peak"], "bytes": peaks}

    even, short = peak("--max-length", 64), peak("--max-length", 64, "--max-target-length", 16)
    assert (even["max_length"], even["max_target_length"]) == (64, 64)
    assert (short["max_length"], short["max_target_length"]) == (64, 16)
    # The logits alone, and their gradient, are 2 rows x 48 tokens x 100 words x 4 bytes smaller.
    assert even["bytes"] - short["bytes"] > 2 * 48 * 100 * 4
    table = effcli("estimate", t5, "--batch-size", 2, "--max-length", 64, "--max-target-length", 16)
    assert "64 source tokens and 16 target tokens each" in " ".join(table.stdout.split())
    assert "has no target texts" in effcli("estimate", "gpt2", "--max-target-length", 16).error
