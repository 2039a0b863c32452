"""Models with StableEmbeddings, saved and loaded again: exact, by the marker in their configuration."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from huggingface_hub.constants import HF_HUB_CACHE
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification

from effcli import pipeline
from effcli.models.stable_embedding import MARKER, embeddings_of, replace_embeddings
from effcli.pipeline.build import build
from effcli.pipeline.prepare import prepare
from effcli.report.progress import QuietProgress
from tests.commands import TINY_DISTILBERT, TINY_GPT2, data_flags, effcli, model_folder, saved_weights
from tests.tiny_models import tiny_distilbert, tiny_gpt2

pytestmark = pytest.mark.usefixtures("without_plan")

PRECISIONS = ("fp32", "bf16-pure")
CONFIGS = {"classification": TINY_DISTILBERT, "causal-lm": TINY_GPT2}
# Saving and loading are the same code in every engine: one meets both precisions with both tasks.
RUNS = [
    *((task, precision, "pytorch") for task in CONFIGS for precision in PRECISIONS),
    ("classification", "bf16-pure", "accelerate"),
    ("causal-lm", "bf16-pure", "trainer"),
]


def language_model(name: Path, data: Path) -> torch.nn.Module:
    """Return the model that the pipeline builds from a name."""
    spec = pipeline.resolve_spec(
        {
            "model": {"name": str(name), "task": "causal-lm"},
            "data": {"train": str(data), "text_columns": ["sentence"]},
        }
    )
    return build(prepare(spec, QuietProgress()), meta=False).model.eval()


@pytest.mark.parametrize(("task", "precision", "engine"), RUNS)
def test_a_saved_model_is_the_same_when_it_is_loaded_again(
    task: str, precision: str, engine: str, data: Path, tmp_path: Path
) -> None:
    folder = model_folder(tmp_path / "m", CONFIGS[task])
    common = (*data_flags(task, data), "--eval-data", data, "--engine", engine, "--precision", precision, "--json")
    first = effcli(
        "train", folder, *common, "--stable-embedding", "--optim", "adam8bit", "--lr", 1e-2, "--max-steps", 2,
        "--out", tmp_path / "first",
    ).record  # fmt: skip
    again = tmp_path / "first" / "model"
    ends = [
        effcli(
            "train", again, *common, *flags, "--lr", 0, "--optim", "adam8bit", "--max-steps", 1, "--out", tmp_path / out
        )
        for out, flags in (("plain", ()), ("flag", ("--stable-embedding",)))
    ]
    saved = saved_weights(tmp_path / "first")
    for done, out in zip(ends, ("plain", "flag"), strict=True):
        assert done.record["eval"][-1]["eval_loss"] == first["eval"][-1]["eval_loss"]
        assert (
            done.record["measured"]["tensors"] == done.record["optimizer"]["tensors"] == first["optimizer"]["tensors"]
        )
        assert done.record["model"]["weights_bytes"] == first["measured"]["weights_bytes"]
        assert "as the model's config.json says" in done.stderr
        now = saved_weights(tmp_path / out)
        assert now.keys() == saved.keys()
        assert all(now[name].dtype == value.dtype and torch.equal(now[name], value) for name, value in saved.items())
    estimate = ("estimate", again, "--task", task, "--precision", precision, "--optim", "adam8bit", "--json")
    estimated = effcli(*estimate).record
    assert estimated["model"] == {**first["model"], "name": str(again)}
    assert estimated["optimizers"][0]["tensors"] == first["measured"]["tensors"]
    norms = {value.dtype for name, value in saved.items() if ".norm." in name}
    assert norms == {torch.float32}


def test_the_logits_are_those_of_the_trained_model_whatever_the_shards(gpt2: Path, data: Path, tmp_path: Path) -> None:
    common = (*data_flags("causal-lm", data), "--lr", 1e-2, "--max-steps", 3)
    assert effcli("train", gpt2, *common, "--stable-embedding", "--out", tmp_path / "o").code == 0
    by_hand = tiny_gpt2()
    replace_embeddings(by_hand, ("transformer.wte", "transformer.wpe"))
    by_hand.load_state_dict(saved_weights(tmp_path / "o"), strict=False)
    model = language_model(tmp_path / "o" / "model", data)
    ids = torch.arange(30)[None]
    expected = by_hand.eval()(ids).logits
    assert torch.equal(model(ids).logits, expected)
    assert model.lm_head.weight is model.transformer.wte.weight
    model.save_pretrained(tmp_path / "shards", max_shard_size="100KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 2
    assert torch.equal(language_model(tmp_path / "shards", data)(ids).logits, expected)


def test_a_plain_loader_does_not_know_the_norms(distilbert: Path, data: Path, tmp_path: Path) -> None:
    common = ("--data", data, "--stable-embedding", "--max-steps", 1)
    assert effcli("train", distilbert, *common, "--out", tmp_path / "o").code == 0
    model, loading = AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "o" / "model", output_loading_info=True
    )
    assert {name.rpartition(".norm.")[0] for name in loading["unexpected_keys"]} == set(getattr(model.config, MARKER))


def test_a_model_of_the_hub_loads_by_its_marker_too(distilbert: Path, data: Path, tmp_path: Path) -> None:
    common = ("--data", data, "--eval-data", data, "--lr", 1e-2, "--max-steps", 2, "--json")
    first = effcli("train", distilbert, *common, "--stable-embedding", "--out", tmp_path / "o").record
    cached = Path(HF_HUB_CACHE) / "models--someone--stable"
    shutil.copytree(tmp_path / "o" / "model", cached / "snapshots" / "0123")
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("0123")
    again = effcli("train", "someone/stable", *common, "--lr", 0, "--out", tmp_path / "again").record
    assert again["eval"][-1]["eval_loss"] == first["eval"][-1]["eval_loss"]
    assert again["model"]["num_parameters"] == 139_458 + 256


DAMAGE = {
    "unknown": ({MARKER: ["distilbert.no_such"]}, (), ["config.json", "distilbert.no_such"]),
    "no embedding": (
        {MARKER: ["distilbert.embeddings.LayerNorm"]}, (), ["config.json", "distilbert.embeddings.LayerNorm"],
    ),
    "no list": ({MARKER: "embeddings"}, (), ["config.json", "list of module names"]),
    "no norm": (
        {}, ("distilbert.embeddings.word_embeddings.norm.weight",), ["weights", "LayerNorm", "word_embeddings"],
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("damage", "dry"),
    # A dry run reads no weights, so it cannot miss a norm.
    [*((damage, False) for damage in DAMAGE), *((damage, True) for damage in DAMAGE if damage != "no norm")],
)
def test_a_damaged_marker_or_missing_norm_is_named(damage: str, dry: bool, data: Path, tmp_path: Path) -> None:
    changes, lost, words = DAMAGE[damage]
    folder = tmp_path / "m"
    model = tiny_distilbert()
    replace_embeddings(model, embeddings_of(model)[0])
    model.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    weights = load_file(folder / "model.safetensors")
    kept = {name: value for name, value in weights.items() if name not in lost}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    done = effcli("train", folder, "--data", data, "--out", tmp_path / "o", *(("--dry-run",) if dry else ()))
    assert done.code == 2, done.stderr
    assert all(word in done.error for word in words), done.error
