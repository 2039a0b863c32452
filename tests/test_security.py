"""What comes from others runs no code unless that was asked for by name, and secrets are told to nobody."""

from __future__ import annotations

import ast
import json
import pickle
import shutil
from pathlib import Path

import pytest
import torch

import effcli as effcli_package
from effcli.engines.checkpoint import TRAINING
from tests.checkpoints import Trap, let_manifest_fit
from tests.commands import TINY_DISTILBERT, csv_file, effcli, model_folder, same_weights, saved_weights

pytestmark = pytest.mark.usefixtures("without_plan")

OWN_CODE = """
from pathlib import Path

import torch
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import SequenceClassifierOutput

Path({marker!r}).write_text("ran")


class OwnConfig(PretrainedConfig):
    model_type = "own-kind"

    def __init__(self, hidden=16, vocab_size=200, **others):
        self.hidden = hidden
        self.vocab_size = vocab_size
        super().__init__(**others)


class OwnClassifier(PreTrainedModel):
    config_class = OwnConfig

    def __init__(self, config):
        super().__init__(config)
        hidden = getattr(config, "hidden", 16)
        self.embed = torch.nn.Embedding(config.vocab_size, hidden)
        self.classifier = torch.nn.Linear(hidden, config.num_labels)
        self.post_init()

    def forward(self, input_ids, attention_mask=None):
        return SequenceClassifierOutput(logits=self.classifier(self.embed(input_ids).mean(1)))
"""
OWN_MAP = {"AutoConfig": "own.OwnConfig", "AutoModelForSequenceClassification": "own.OwnClassifier"}


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    """Return a file that foreign code writes as soon as it runs."""
    return tmp_path / "marker"


@pytest.fixture
def own_model(tmp_path: Path, marker: Path) -> Path:
    """Return the folder of a model whose architecture is a Python file beside it."""
    folder = model_folder(tmp_path / "own", {"model_type": "own-kind"}, auto_map=OWN_MAP)
    (folder / "own.py").write_text(OWN_CODE.format(marker=str(marker)))
    return folder


# Code that comes with a model


@pytest.mark.parametrize("command", ["train", "estimate", "plan"])
def test_code_of_a_model_is_never_imported_without_the_flag(
    command: str, own_model: Path, marker: Path, data: Path
) -> None:
    arguments = {"train": ("--data", data), "estimate": (), "plan": ("--gpu", "16GiB")}[command]
    failed = effcli(command, own_model, *arguments)
    assert failed.code == 2
    assert "--trust-remote-code" in failed.error
    assert str(own_model) in failed.error
    assert not marker.exists()


def test_code_of_a_model_runs_with_the_flag_and_is_saved_with_the_weights(
    own_model: Path, marker: Path, data: Path, tmp_path: Path
) -> None:
    run, trust = ("--data", data, "--max-steps", 2, "--lr"), "--trust-remote-code"
    record = effcli("train", own_model, *run, 0.1, "--out", tmp_path / "o", trust, "--json").record
    assert marker.exists()
    assert record["model"]["architecture"] == "OwnClassifier"
    assert record["spec"]["model"]["trust_remote_code"] is True
    assert any(str(own_model) in note and trust in note for note in record["notes"])

    saved = tmp_path / "o" / "model"
    assert effcli("train", saved, *run, 0, "--out", tmp_path / "p").code == 2
    again = effcli("train", saved, *run, 0, "--out", tmp_path / "p", trust)
    assert again.code == 0, again.stderr
    assert same_weights(saved_weights(tmp_path / "o"), saved_weights(tmp_path / "p"))


def test_a_run_with_the_flag_opens_no_door_for_the_next_one(own_model: Path, marker: Path, data: Path) -> None:
    assert effcli("estimate", own_model, "--trust-remote-code").code == 0
    marker.unlink()
    assert effcli("train", own_model, "--data", data, "--dry-run").code == 2
    assert not marker.exists()


OWN_HEAD = {name: OWN_MAP[name] for name in OWN_MAP if name != "AutoConfig"}


@pytest.mark.parametrize("auto_map", [OWN_MAP, OWN_HEAD], ids=["all", "head"])
@pytest.mark.parametrize("trust", [False, True])
def test_code_beside_an_architecture_that_transformers_has_runs_with_the_flag_alone_and_in_every_command(
    trust: bool, auto_map: dict[str, str], tmp_path: Path, marker: Path, data: Path
) -> None:
    folder = model_folder(tmp_path / "m", TINY_DISTILBERT, auto_map=auto_map)
    (folder / "own.py").write_text(OWN_CODE.format(marker=str(marker)))
    flags = ("--trust-remote-code",) if trust else ()
    estimate = effcli("estimate", folder, *flags, "--json").record
    assert marker.exists() == trust
    out = tmp_path / "o"
    trained = effcli("train", folder, "--data", data, "--max-steps", 1, "--out", out, *flags, "--json").record
    assert marker.exists() == trust
    for model in (estimate["model"], trained["model"]):
        assert (model["architecture"], model["num_parameters"]) == (
            ("OwnClassifier", 1000 * 16 + 16 * 2 + 2) if trust else ("DistilBertForSequenceClassification", 139_458)
        )
    assert ("auto_map" in json.loads((out / "model" / "config.json").read_text())) == trust


def test_the_code_of_a_trusted_run_stays_away_from_the_next_run_of_that_architecture(
    tmp_path: Path, marker: Path, data: Path
) -> None:
    folder = model_folder(tmp_path / "m", TINY_DISTILBERT, auto_map=OWN_HEAD)
    (folder / "own.py").write_text(OWN_CODE.format(marker=str(marker)))
    run = ("train", folder, "--data", data, "--max-steps", 1, "--json", "--out")
    assert effcli(*run, tmp_path / "o", "--trust-remote-code").record["model"]["architecture"] == "OwnClassifier"
    again = effcli(*run, tmp_path / "p").record
    assert again["model"]["architecture"] == "DistilBertForSequenceClassification"


def test_code_of_a_tokenizer_is_never_imported_without_the_flag(
    distilbert: Path, tmp_path: Path, marker: Path, data: Path
) -> None:
    (distilbert / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\none\n")
    settings = {"tokenizer_class": "OwnTokenizer", "auto_map": {"AutoTokenizer": ["own.OwnTokenizer", None]}}
    (distilbert / "tokenizer_config.json").write_text(json.dumps(settings))
    (distilbert / "own.py").write_text(OWN_CODE.format(marker=str(marker)))
    effcli("train", distilbert, "--data", data, "--max-steps", 1, "--out", tmp_path / "o")
    assert not marker.exists()


def test_an_estimate_from_the_catalogue_says_that_it_runs_no_code() -> None:
    notes = effcli("estimate", "gpt2", "--trust-remote-code", "--json").record["notes"]
    assert any("'gpt2' as transformers builds it" in note for note in notes), notes


def test_a_model_without_its_flag_needs_no_flag(data: Path) -> None:
    failed = effcli("train", "--data", data, "--trust-remote-code")
    assert failed.code == 2
    assert "--trust-remote-code" in failed.error


@pytest.mark.parametrize("key", ["attn_implementation", "_attn_implementation"])
def test_a_configuration_fetches_no_kernels(key: str, tmp_path: Path, data: Path) -> None:
    folder = model_folder(tmp_path / "m", TINY_DISTILBERT, text_config={key: "someone/kernel"})
    for command in (("train", folder, "--data", data), ("estimate", folder)):
        failed = effcli(*command)
        assert failed.code == 2
        assert all(word in failed.error for word in (key, "someone/kernel", "--attn"))


# Files that others pickled


def pickled(path: Path, trap: Trap, kind: str) -> None:
    if kind == "plain pickle":
        path.write_bytes(pickle.dumps({"weight": trap}))
    else:
        torch.save({"weight": trap}, path, _use_new_zipfile_serialization=kind == "zip")


def test_every_torch_load_of_ours_builds_tensors_alone() -> None:
    calls = [
        node
        for path in Path(effcli_package.__file__).parent.rglob("*.py")
        if "torch.load" in (text := path.read_text())
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load"
    ]
    assert calls
    assert all("weights_only=True" in ast.unparse(call) for call in calls)


def test_the_trap_of_these_tests_works(tmp_path: Path, marker: Path) -> None:
    pickled(tmp_path / "f", Trap(marker), "zip")
    torch.load(tmp_path / "f", weights_only=False)
    assert marker.exists()


@pytest.mark.parametrize("kind", ["zip", "legacy", "plain pickle"])
def test_pickled_weights_run_no_code(kind: str, distilbert: Path, marker: Path, data: Path, tmp_path: Path) -> None:
    pickled(distilbert / "pytorch_model.bin", Trap(marker), kind)
    failed = effcli("train", distilbert, "--data", data, "--out", tmp_path / "o")
    assert (failed.code, marker.exists()) == (2, False)
    assert "weights cannot be used" in failed.error
    assert "weights_only" not in failed.error  # torch advises to switch its safety off


@pytest.mark.parametrize("name", ["training_args.bin", "optimizer.pt", "rng_state.pth", "tokenizer.pkl"])
def test_other_pickles_in_a_model_folder_are_left_alone(
    name: str, distilbert: Path, marker: Path, data: Path, tmp_path: Path
) -> None:
    pickled(distilbert / name, Trap(marker), "plain pickle")
    assert effcli("train", distilbert, "--data", data, "--max-steps", 1, "--out", tmp_path / "o").code == 0
    assert not marker.exists()


def test_a_checkpoint_that_someone_changed_runs_no_code(
    distilbert: Path, marker: Path, data: Path, tmp_path: Path
) -> None:
    out = tmp_path / "o"
    assert effcli("train", distilbert, "--data", data, "--max-steps", 1, "--out", out).code == 0
    shutil.rmtree(out / "model")
    (folder,) = (out / "checkpoints").iterdir()
    pickled(folder / TRAINING, Trap(marker), "zip")
    let_manifest_fit(folder, TRAINING)
    failed = effcli("train", "--out", out, "--resume", "--max-steps", 2)
    assert (failed.code, marker.exists()) == (7, False)
    assert "weights_only" not in failed.error


@pytest.mark.parametrize("name", ["d.pkl", "d.npy", "d.pt"])
def test_pickled_data_is_refused(name: str, distilbert: Path, marker: Path, tmp_path: Path) -> None:
    pickled(tmp_path / name, Trap(marker), "plain pickle")
    failed = effcli("train", distilbert, "--data", tmp_path / name)
    assert (failed.code, marker.exists()) == (2, False)
    assert name in failed.error


def test_a_script_beside_data_is_not_run(
    distilbert: Path, marker: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "owner" / "pairs"
    folder.mkdir(parents=True)
    (folder / "pairs.py").write_text(f"open({str(marker)!r}, 'w')")
    csv_file(folder / "train.csv")
    monkeypatch.chdir(tmp_path)
    failed = effcli("train", distilbert, "--data", "owner/pairs")
    assert (failed.code, marker.exists()) == (2, False)
    assert "train.csv" in failed.error
