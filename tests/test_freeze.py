"""Frozen parameters: counted as weights, without gradient or state, and where they were."""

from __future__ import annotations

from pathlib import Path

import bitsandbytes
import pytest
import torch
from safetensors.torch import load_file

from tests.commands import effcli, saved_weights
from tests.jobs import ENGINES
from tests.tiny_models import tiny_distilbert

pytestmark = pytest.mark.usefixtures("without_plan")

OPTIMIZERS = {"adamw": torch.optim.AdamW, "adam8bit": bitsandbytes.optim.Adam8bit}
# Beginning of the frozen names -> flag, elements and tensors that still train.
FROZEN = {"distilbert.": ("distilbert.*", 4_290, 4), "distilbert.embeddings.": ("embeddings", 71_234, 36)}
RUNS = [
    *((begins, optim, "pytorch") for begins in FROZEN for optim in OPTIMIZERS),
    *(("distilbert.embeddings.", "adam8bit", engine) for engine in ENGINES if engine != "pytorch"),
]


def frozen_by_hand(begins: str) -> torch.nn.Module:
    """Return the tiny classifier without the gradients of parameters whose name begins so."""
    model = tiny_distilbert()
    for name, param in model.named_parameters():
        param.requires_grad_(not name.startswith(begins))
    return model


def upstream_state_bytes(model: torch.nn.Module, optim: str) -> int:
    """Return the true bytes of upstream's state after one step over all parameters."""
    optimizer = OPTIMIZERS[optim](list(model.parameters()))
    model(input_ids=torch.arange(8)[None], labels=torch.tensor([1])).loss.backward()
    optimizer.step()
    tensors = [value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)]
    found = (tensor.untyped_storage() for tensor in tensors)
    return sum({storage.data_ptr(): storage.nbytes() for storage in found}.values())


@pytest.mark.parametrize(("begins", "optim", "engine"), RUNS)
def test_only_what_trains_has_gradients_and_state(
    begins: str, optim: str, engine: str, data: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "m"
    pattern, trainable, tensors = FROZEN[begins]
    by_hand = frozen_by_hand(begins)
    by_hand.save_pretrained(folder)
    record = effcli(
        "train", folder, "--data", data, "--freeze", pattern, "--optim", optim, "--engine", engine, "--lr", 0.1,
        "--max-steps", 2, "--out", tmp_path / "o", "--json",
    ).record  # fmt: skip
    model, measured = record["model"], record["measured"]
    counted = [param.numel() for param in by_hand.parameters() if param.requires_grad]
    assert (len(counted), sum(counted)) == (tensors, trainable)
    assert (model["num_trainable_parameters"], model["num_parameters"]) == (trainable, 139_458)
    assert model["weights_bytes"] == measured["weights_bytes"] == 557_832
    assert model["gradients_bytes"] == measured["gradients_bytes"] == 4 * trainable
    assert sum(group["num_tensors"] for group in record["groups"]) == tensors
    expected = upstream_state_bytes(by_hand, optim)
    assert record["optimizer"]["state_bytes"] == measured["optimizer_state_bytes"] == expected
    assert record["optimizer"]["tensors"] == measured["tensors"]

    before, after = load_file(folder / "model.safetensors"), saved_weights(tmp_path / "o")
    moved = {name for name, value in before.items() if not torch.equal(value, after[name])}
    assert moved
    assert not any(name.startswith(begins) for name in moved)
    checkpoint = next((tmp_path / "o" / "checkpoints").iterdir())
    state = torch.load(checkpoint / "training.pt", weights_only=True)["optimizer"]["state"]
    assert len(state) == tensors


def test_trainable_frozen_and_total_stand_in_the_table_of_run_and_report(
    distilbert: Path, data: Path, tmp_path: Path
) -> None:
    out = tmp_path / "o"
    arguments = ("train", distilbert, "--data", data, "--freeze", "distilbert.*", "--max-steps", 1, "--out", out)
    for text in (effcli(*arguments, "--dry-run").stdout, effcli(*arguments).stdout, effcli("report", out).stdout):
        assert "4,290 trainable + 135,168 frozen = 139,458, in 40 tensors" in text


def test_several_patterns_add_up_and_a_whole_name_freezes_one(distilbert: Path, data: Path) -> None:
    common = ("train", distilbert, "--data", data, "--dry-run", "--json")
    patterns = ("--freeze", "*.weight", "--freeze", "=pre_classifier.bias")
    record = effcli(*common, *patterns).record
    by_hand = tiny_distilbert()
    biases = {name: p.numel() for name, p in by_hand.named_parameters() if name.endswith(".bias")}
    assert record["model"]["num_trainable_parameters"] == sum(biases.values()) - biases["pre_classifier.bias"]
