"""Parameters that a model's code fixes: the same ones in an estimate, in a plan and in training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import CONFIG_MAPPING, AutoModelForSeq2SeqLM, AutoModelForSequenceClassification

from tests.commands import csv_file, effcli

SIDES = {
    f"{side}_{name}": size
    for side in ("encoder", "decoder")
    for name, size in (("layers", 1), ("attention_heads", 2), ("ffn_dim", 64))
}
PEGASUS = {"vocab_size": 100, "d_model": 32, "max_position_embeddings": 64, **SIDES}
ROFORMER = {
    "vocab_size": 100, "embedding_size": 32, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
    "intermediate_size": 64, "max_position_embeddings": 64,
}  # fmt: skip


def source_and_target(path: Path) -> Path:
    """Return a file of texts with their targets."""
    rows = [{"source": "one two three"[: 3 + index % 7], "target": "four five"} for index in range(8)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize(
    ("kind", "sizes", "task", "table", "elements"),
    [
        ("pegasus", PEGASUS, "seq2seq", "model.encoder.embed_positions.weight", 2 * 64 * 32),
        ("roformer", ROFORMER, "classification", "roformer.encoder.embed_positions.weight", 64 * 16),
    ],
)
def test_tables_of_sines_are_fixed_also_when_they_are_read_from_a_file(
    kind: str, sizes: dict[str, Any], task: str, table: str, elements: int, tmp_path: Path
) -> None:
    auto = AutoModelForSeq2SeqLM if task == "seq2seq" else AutoModelForSequenceClassification
    model = auto.from_config(CONFIG_MAPPING[kind](**sizes))
    model.save_pretrained(tmp_path / "m")
    data = source_and_target(tmp_path / "d.jsonl") if task == "seq2seq" else csv_file(tmp_path / "d.csv")
    by_code = sum(parameter.numel() for parameter in model.parameters()) - elements
    train = ("train", tmp_path / "m", "--data", data, "--optim", "adamw", "--json")
    planned = effcli(*train, "--dry-run").record
    done = effcli(*train, "--max-steps", 1, "--out", tmp_path / "o")
    estimated = effcli("estimate", tmp_path / "m", "--optim", "adamw", "--json").record
    for record in (planned, done.record, estimated):
        assert record["model"]["num_trainable_parameters"] == by_code
    measured = done.record["measured"]["optimizer_state_bytes"]
    assert measured == planned["optimizer"]["state_bytes"] == estimated["optimizers"][0]["state_bytes"]
    assert f"Fixed by the model's code, so not trained: {table}" in done.stderr
