"""Which models see the tokens behind a position, by what they compute, and what follows for --task causal-lm."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PretrainedConfig, set_seed

from effcli.models.tasks import default_task, sees_following_tokens
from tests.commands import csv_file, effcli, model_folder

SIZES = {
    "vocab_size": 30, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64,
    "max_position_embeddings": 32,
}  # fmt: skip
GEMMA = {**SIZES, "num_key_value_heads": 2, "head_dim": 16}
CPMANT = {
    "vocab_size": 30, "hidden_size": 32, "num_attention_heads": 2, "dim_head": 16, "dim_ff": 64, "num_hidden_layers": 2,
    "position_bias_num_buckets": 32, "position_bias_max_distance": 64, "prompt_length": 2,
}  # fmt: skip
XLNET = {"vocab_size": 30, "d_model": 32, "n_layer": 2, "n_head": 2, "d_inner": 64}
MODELS: list[tuple[str, dict[str, Any]]] = [
    ("bert", SIZES),
    ("bert", {**SIZES, "is_decoder": True}),
    ("bert-generation", SIZES),
    ("bert-generation", {**SIZES, "is_decoder": True}),
    ("electra", {**SIZES, "embedding_size": 32}),
    ("xlnet", XLNET),
    ("cpmant", CPMANT),
    ("gemma", GEMMA),
    ("gemma", {**GEMMA, "use_bidirectional_attention": True}),
    ("gemma3_text", GEMMA),
    ("gemma3_text", {**GEMMA, "use_bidirectional_attention": True}),
    ("gpt2", {"vocab_size": 30, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 32}),
    ("llama", SIZES),
    ("mamba", {"vocab_size": 30, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4}),
]


def last_token_reaches_back(config: PretrainedConfig) -> bool:
    """Return whether another last token changes the logits of the positions before it."""
    set_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    ids = torch.arange(5, 13)[None]
    with torch.no_grad():
        before, after = (model(input_ids=row).logits[0, :-1] for row in (ids, torch.cat([ids[:, :-1], ids[:, :1]], 1)))
    return not torch.allclose(before, after, rtol=0, atol=1e-6)


@pytest.mark.parametrize(("kind", "values"), MODELS)
def test_models_that_see_following_tokens_are_known(kind: str, values: dict[str, Any]) -> None:
    assert sees_following_tokens(CONFIG_MAPPING[kind](**values)) == last_token_reaches_back(
        CONFIG_MAPPING[kind](**values)
    )


def test_a_model_that_sees_following_tokens_is_not_trained_to_predict_them(tmp_path: Path) -> None:
    made = model_folder(tmp_path / "m", {"model_type": "xlnet", **XLNET})
    done = effcli(
        "train", made, "--data", csv_file(tmp_path / "d.csv"), "--task", "causal-lm", "--text-column", "sentence",
        "--out", tmp_path / "o",
    )  # fmt: skip
    assert done.code == 2
    assert "(xlnet) sees the tokens that follow each position, as an encoder does, so --task causal-lm" in done.error
    assert default_task(CONFIG_MAPPING["xlnet"](**XLNET)) == "classification"
