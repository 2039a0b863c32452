"""bitsandbytes' StableEmbedding in place of embeddings: what it takes, what is saved, and how it loads again."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import bitsandbytes
import pytest
import torch
from bitsandbytes.nn import StableEmbedding
from bitsandbytes.optim import GlobalOptimManager
from safetensors.torch import load_file
from transformers import Adafactor

from effcli.errors import UsageError
from effcli.models.stable_embedding import MARKER, embeddings_of, replace_embeddings, use_stable_embeddings
from tests.commands import TINY_DISTILBERT, TINY_GPT2, data_flags, effcli, model_folder, saved_weights
from tests.jobs import ENGINES, ONE_FAST_ENGINE
from tests.stopped_runs import check_that_a_stop_changes_nothing
from tests.tiny_models import tiny_distilbert, tiny_gpt2

TASKS = {
    "classification": (
        TINY_DISTILBERT,
        tiny_distilbert,
        ("embeddings.word_embeddings", "embeddings.position_embeddings"),
        "distilbert",
    ),
    "causal-lm": (TINY_GPT2, tiny_gpt2, ("wte", "wpe"), "transformer"),
}
OPTIMIZERS = {
    "adam8bit": lambda params: bitsandbytes.optim.Adam8bit(params),
    "lion8bit": lambda params: bitsandbytes.optim.Lion8bit(params),
    "adamw": lambda params: torch.optim.AdamW(params),
    "adafactor": lambda params: Adafactor(params, scale_parameter=False, relative_step=False, lr=1e-3),
}

# The engine matters to the optimizers whose bits upstream's manager decides.
RUNS = [
    *((task, optim, "pytorch") for task in TASKS for optim in OPTIMIZERS),
    *((task, "adam8bit", engine) for task in TASKS for engine in ENGINES if engine != "pytorch"),
]


@pytest.fixture(autouse=True)
def nothing_is_left_in_the_manager() -> Iterator[None]:
    manager = GlobalOptimManager.get_instance()
    yield
    assert (manager.module_weight_config_triple, manager.pid2config, manager.index2config) == ([], {}, {})


def upstream_state_bytes(task: str, optim: str) -> int:
    """Return the true bytes of the state that upstream's optimizer makes for a model with upstream's modules."""
    _, make, names, prefix = TASKS[task]
    model = make()
    for name in names:
        parent = model.get_submodule(f"{prefix}.{name}".rpartition(".")[0])
        old = model.get_submodule(f"{prefix}.{name}")
        new = StableEmbedding(old.num_embeddings, old.embedding_dim, old.padding_idx)
        setattr(parent, name.rpartition(".")[2], new)
    model.tie_weights()
    optimizer = OPTIMIZERS[optim](list(model.parameters()))
    ids = torch.arange(8)[None]
    model(input_ids=ids, labels=ids if task == "causal-lm" else torch.tensor([1])).loss.backward()
    optimizer.step()
    GlobalOptimManager.get_instance().initialize()
    found = {
        value.untyped_storage().data_ptr(): value.untyped_storage().nbytes()
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor)
    }
    return sum(found.values())


@pytest.mark.parametrize(("task", "optim", "engine"), RUNS)
def test_the_state_is_that_of_upstream_modules_and_optimizers(
    task: str, optim: str, engine: str, data: Path, tmp_path: Path
) -> None:
    folder = model_folder(tmp_path / "m", TASKS[task][0])
    common = ("train", folder, *data_flags(task, data), "--optim", optim, "--engine", engine, "--max-steps", 1)
    record = effcli(*common, "--stable-embedding", "--out", tmp_path / "o", "--json").record
    expected = upstream_state_bytes(task, optim)
    assert record["optimizer"]["state_bytes"] == record["measured"]["optimizer_state_bytes"] == expected
    assert record["optimizer"]["tensors"] == record["measured"]["tensors"]
    parameters = {"classification": 139_458, "causal-lm": 168_192}[task] + 2 * 2 * 64
    assert record["model"]["num_parameters"] == parameters
    assert record["model"]["weights_bytes"] == record["measured"]["weights_bytes"] == 4 * parameters
    assert record["model"]["gradients_bytes"] == record["measured"]["gradients_bytes"] == 4 * parameters
    estimate = ("estimate", folder, "--task", task, "--optim", optim, "--stable-embedding", "--json")
    estimated = effcli(*estimate).record
    assert estimated["model"] == record["model"]
    assert estimated["optimizers"][0]["tensors"] == record["measured"]["tensors"]
    planned = effcli(*common, "--stable-embedding", "--dry-run", "--json").record
    for key in ("model", "optimizer", "groups"):
        assert planned[key] == record[key]


@pytest.mark.usefixtures("without_plan")
@pytest.mark.parametrize("task", TASKS)
def test_all_other_weights_are_as_without_it_and_norms_begin_as_the_identity(
    task: str, data: Path, tmp_path: Path
) -> None:
    folder = model_folder(tmp_path / "m", TASKS[task][0])
    common = ("train", folder, *data_flags(task, data), "--lr", 0, "--max-steps", 1)
    assert effcli(*common, "--out", tmp_path / "without").code == 0
    done = effcli(*common, "--stable-embedding", "--out", tmp_path / "with")
    without, with_it = saved_weights(tmp_path / "without"), saved_weights(tmp_path / "with")
    assert all(torch.equal(value, with_it[name]) for name, value in without.items())
    norms = {name: value for name, value in with_it.items() if name not in without}
    assert len(norms) == 4
    for name, value in norms.items():
        assert torch.equal(value, (torch.ones if name.endswith(".norm.weight") else torch.zeros)(64)), name
    assert "StableEmbedding replaces 2 embeddings" in done.stderr
    assert "256 parameters" in done.stderr
    assert not any("norm" in line for line in done.stderr.splitlines() if "random" in line)


@pytest.mark.usefixtures("without_plan")
def test_loaded_weights_stay_and_only_the_norms_are_new(data: Path, tmp_path: Path) -> None:
    tiny_distilbert().save_pretrained(tmp_path / "m")
    common = ("--data", data, "--lr", 0, "--max-steps", 1, "--stable-embedding")
    done = effcli("train", tmp_path / "m", *common, "--out", tmp_path / "o")
    before, after = load_file(tmp_path / "m" / "model.safetensors"), saved_weights(tmp_path / "o")
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    assert "random weights" not in done.stderr


@pytest.mark.usefixtures("without_plan")
def test_norms_are_not_decayed(distilbert: Path, data: Path) -> None:
    record = effcli("train", distilbert, "--data", data, "--stable-embedding", "--dry-run", "--json").record
    assert [(group["num_tensors"], group["num_elements"]) for group in record["groups"]] == [(16, 137_856), (28, 1_858)]


@pytest.mark.usefixtures("without_plan")
@pytest.mark.parametrize("engine", ONE_FAST_ENGINE)
def test_a_resumed_run_ends_as_the_uninterrupted_one(engine: str, tmp_path: Path) -> None:
    rest = check_that_a_stop_changes_nothing(
        tmp_path, {"name": "adam8bit"}, model={"stable_embedding": True}, engine=engine, batch_size=4, accum=1
    )
    assert any("StableEmbedding replaces" in note for note in rest.notes)


@pytest.mark.usefixtures("without_plan")
@pytest.mark.parametrize("first", ["with", "without"])
def test_one_run_leaves_nothing_to_the_next(first: str, distilbert: Path, data: Path, tmp_path: Path) -> None:
    common = ("train", distilbert, "--data", data, "--optim", "adam8bit", "--max-steps", 1, "--json")
    kinds = {"with": ("--stable-embedding",), "without": ()}
    order = [first, *(kind for kind in kinds if kind != first)]
    records = {kind: effcli(*common, *kinds[kind], "--out", tmp_path / kind).record for kind in order}
    assert records["without"]["measured"]["optimizer_state_bytes"] == 295_648
    assert records["with"]["measured"]["optimizer_state_bytes"] == 702_096 + 8 * 256


@pytest.mark.usefixtures("without_plan")
def test_a_frozen_embedding_has_no_state_and_other_overrides_go_along(
    distilbert: Path, data: Path, tmp_path: Path
) -> None:
    common = (
        "train",
        distilbert,
        "--data",
        data,
        "--optim",
        "adam8bit",
        "--stable-embedding",
        "--max-steps",
        1,
        "--json",
    )
    frozen = effcli(*common, "--freeze", "word_embeddings", "--out", tmp_path / "a").record
    assert frozen["measured"]["optimizer_state_bytes"] == 702_096 + 8 * 256 - 8 * (64_000 + 128)
    assert frozen["optimizer"]["state_bytes"] == frozen["measured"]["optimizer_state_bytes"]
    kept = effcli(*common, "--keep-32bit", "embed", "--override", "embed:lr=1e-5", "--out", tmp_path / "b").record
    assert kept["measured"]["optimizer_state_bytes"] == kept["optimizer"]["state_bytes"] == 702_096 + 8 * 256
    error = effcli(*common, "--override", "word_embeddings:optim_bits=8", "--out", tmp_path / "c").error
    assert "--stable-embedding" in error
    assert "--override 'word_embeddings'" in error


@pytest.mark.usefixtures("without_plan")
def test_embeddings_with_a_forward_of_their_own_are_left_alone_and_named(data: Path, tmp_path: Path) -> None:
    settings = {
        "model_type": "opt", "vocab_size": 100, "hidden_size": 16, "ffn_dim": 32, "num_hidden_layers": 1,
        "num_attention_heads": 2, "max_position_embeddings": 64, "word_embed_proj_dim": 16,
    }  # fmt: skip
    folder = model_folder(tmp_path / "m", settings)
    common = (*data_flags("causal-lm", data), "--stable-embedding", "--max-steps", 1)
    done = effcli("train", folder, *common, "--out", tmp_path / "o")
    assert "replaces 1 embedding (model.decoder.embed_tokens)" in done.stderr
    assert "No StableEmbedding there: model.decoder.embed_positions computes" in done.stderr


def test_a_model_without_embeddings_is_refused() -> None:
    with pytest.raises(UsageError, match="'linear' has no embedding that can be replaced; leave the flag out"):
        use_stable_embeddings(torch.nn.Sequential(torch.nn.Linear(2, 2)), "linear")


def test_a_module_in_two_places_stays_one_and_keeps_its_settings() -> None:
    model = torch.nn.Module()
    model.config = type("Config", (), {})()
    model.one = torch.nn.Embedding(10, 4, padding_idx=3, max_norm=2.0, norm_type=1.0, scale_grad_by_freq=True)
    model.two = model.one
    weight, state = model.one.weight, torch.get_rng_state()
    replace_embeddings(model, embeddings_of(model)[0])
    assert torch.equal(torch.get_rng_state(), state)
    assert type(model.one) is StableEmbedding
    assert model.two is model.one
    assert model.one.weight is weight
    settings = ("padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse")
    assert [getattr(model.one, name) for name in settings] == [3, 2.0, 1.0, True, False]


def test_lora_below_stable_embeddings_is_refused(data: Path, tmp_path: Path) -> None:
    model = tiny_distilbert()
    replace_embeddings(model, embeddings_of(model)[0])
    model.save_pretrained(tmp_path / "m")
    lora = ("--lora-r", 2, "--lora-targets", "q_lin", "--dry-run")
    error = effcli("train", tmp_path / "m", "--data", data, *lora).error
    assert "StableEmbeddings" in error
    assert "--lora-r" in error


def test_a_missing_bitsandbytes_is_one_line_with_the_pip_command(
    distilbert: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    marked = model_folder(tmp_path / "n", TINY_DISTILBERT, **{MARKER: ["x"]})
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    for arguments in ((distilbert, "--stable-embedding"), (marked,)):
        done = effcli("train", *arguments, "--data", data, "--dry-run")
        assert done.code == 3, done.stderr
        assert "pip install bitsandbytes" in done.error
