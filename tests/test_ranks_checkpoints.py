"""Checkpoints and the saved model of several processes: whole, and gone on from by any number of them."""

from __future__ import annotations

import random
import shutil
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification

from effcli.engines.same_weights import sums_of_bits
from effcli.optim import registry
from effcli.optim.groups import decay_groups
from tests.commands import TINY_DISTILBERT, csv_file, model_folder, same_weights, saved_weights, untimed
from tests.launched import Launched, LaunchServer

UPDATES = 6
"""22 rows in windows of 8, twice."""


def flags(folder: Path, *more: object, **config: Any) -> tuple[object, ...]:
    """Return a command that trains a tiny classifier without dropout; its embeddings have an odd number of rows."""
    model, data = model_folder(folder / "encoder", TINY_DISTILBERT, **config), csv_file(folder / "d.csv", 22)
    common = ("--lr", 0.01, "--epochs", 2, "--seed", 3, "--device", "cpu", "--save-every", 3, "--keep", 9, "--json")
    return ("train", model, "--data", data, "--eval-data", data, *common, *more)


def resumed(launches: LaunchServer, whole: Path, out: Path, *changes: object, ranks: int = 2, **more: Any) -> Launched:
    """Return how a run went on in another folder after its third update."""
    shutil.copytree(whole, out)
    shutil.rmtree(out / "model")
    shutil.rmtree(out / "checkpoints" / f"update-{UPDATES:08d}")
    return launches.run("train", "--out", out, "--resume", "--json", *changes, ranks=ranks, **more)


def assert_close(one: Path, other: Path, *, weights: float) -> None:
    mine, its = saved_weights(one), saved_weights(other)
    assert mine.keys() == its.keys()
    assert max(float((mine[name] - its[name]).abs().max()) for name in mine) <= weights


def assert_same_course(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert len(one["history"]) == len(other["history"]) == UPDATES
    for mine, its in zip(one["history"], other["history"], strict=True):
        assert mine["loss"] == pytest.approx(its["loss"], rel=1e-6, abs=2e-8)
        assert mine["grad_norm"] == pytest.approx(its["grad_norm"], rel=1e-6, abs=2e-8)


TWO = ("--batch-size", 2, "--accum", 2)
"""For two processes a window of 8."""
SGD = ("--optim", "sgd-momentum")
EAGER = {"TORCHDYNAMO_DISABLE": "1"}
ROUNDING = ("--optim", "adamw8bit-ao", "--optim-arg", "bf16_stochastic_round=true", "--precision", "bf16-pure")


@pytest.fixture(scope="module")
def shards(launches: LaunchServer, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Return the folder and the record of a run of two processes that shard the model."""
    folder = tmp_path_factory.mktemp("shards")
    return folder / "o", launches.run(*flags(folder, *TWO, *SGD, "--shard", "fsdp", "--out", folder / "o")).record


def test_a_run_of_shards_goes_on_as_if_it_had_not_ended_also_as_replicas(
    shards: tuple[Path, dict[str, Any]], launches: LaunchServer, tmp_path: Path
) -> None:
    whole, record = shards
    again = resumed(launches, whole, tmp_path / "again", ranks=2).record
    assert untimed(again["history"]) == untimed(record["history"])
    assert same_weights(saved_weights(tmp_path / "again"), saved_weights(whole))
    replicas = resumed(launches, whole, tmp_path / "replicas", "--shard", "ddp", ranks=2)
    assert_same_course(replicas.record, record)
    assert_close(tmp_path / "replicas", whole, weights=1e-6)
    assert "--shard fsdp becomes ddp: results agree, but not in every bit." in replicas.stderr[0]


def test_one_process_goes_on_from_shards_and_shards_from_one_process(
    shards: tuple[Path, dict[str, Any]], launches: LaunchServer, tmp_path: Path
) -> None:
    whole, record = shards
    alone = resumed(launches, whole, tmp_path / "alone", "--shard", "ddp", "--batch-size", 4, ranks=1)
    assert_same_course(alone.record, record)
    assert_close(tmp_path / "alone", whole, weights=1e-6)
    note = "2 processes become 1, batch 2 x 2 becomes 4 x 2: the same 8 rows per update."
    assert note in alone.stderr[0]
    one = tmp_path / "one"
    record = launches.run(*flags(tmp_path, *SGD, "--batch-size", 4, "--accum", 2, "--out", one), ranks=1).record
    back = resumed(launches, one, tmp_path / "back", *TWO, "--shard", "fsdp", ranks=2)
    assert_same_course(back.record, record)
    assert_close(tmp_path / "back", one, weights=1e-6)
    check_saved_alike(one, whole)


def check_saved_alike(one: Path, two: Path) -> None:
    """Check that two runs saved the same names, shapes, types and bytes, and nearly the same numbers."""
    name = f"checkpoints/update-{UPDATES:08d}"
    weights, state = {}, {}
    for out in (one, two):
        model = AutoModelForSequenceClassification.from_pretrained(out / "model")
        assert type(model).__name__ == model.config.architectures[0] == "DistilBertForSequenceClassification"
        weights[out] = load_file(out / name / "model.safetensors")
        assert all(torch.equal(value, weights[out][key]) for key, value in model.state_dict().items())
        state[out] = torch.load(out / name / "training.pt", weights_only=True)["optimizer"]["state"]
    assert weights[one].keys() == weights[two].keys()
    assert all(torch.allclose(weights[two][key], value, rtol=0, atol=1e-6) for key, value in weights[one].items())
    assert state[one].keys() == state[two].keys()
    for index, entries in state[one].items():
        assert list(entries) == list(state[two][index])
        for key, value in entries.items():
            its = state[two][index][key]
            assert (its.shape, its.dtype, its.untyped_storage().nbytes()) == (value.shape, value.dtype, value.nbytes)
            assert torch.allclose(its, value, rtol=1e-4, atol=1e-6)


def test_replicas_draw_apart_in_dropout_and_alike_where_they_round_at_random(
    launches: LaunchServer, tmp_path: Path
) -> None:
    whole, out = tmp_path / "whole", tmp_path / "again"
    record = launches.run(*flags(tmp_path, *TWO, *ROUNDING, "--out", whole, dropout=0.1), environment=EAGER).record
    again = resumed(launches, whole, out, ranks=2, environment=EAGER).record
    assert untimed(again["history"]) == untimed(record["history"])
    assert same_weights(saved_weights(out), saved_weights(whole))
    import_module("torchao.optim")  # which lets torch load its tensors
    training = torch.load(whole / "checkpoints" / "update-00000003" / "training.pt", weights_only=True)
    first, second = (state["torch"] for state in training["random"])
    assert not torch.equal(first, second)


def test_a_folder_that_one_process_does_not_see_ends_the_run_with_one_error(
    shards: tuple[Path, dict[str, Any]], launches: LaunchServer, tmp_path: Path
) -> None:
    hidden = resumed(launches, shards[0], tmp_path / "hidden", faults={1: [("without_checkpoints", {})]})
    assert "rank 0 finds update-00000003 in" in hidden.error
    assert "and rank 1 none; put --out where all processes see the same files" in hidden.error
    unreadable = resumed(launches, shards[0], tmp_path / "unreadable", faults={1: [("unreadable_checkpoint", {})]})
    assert "rank 1: checkpoint" in unreadable.error
    assert "was not loaded: OSError: gone" in unreadable.error


@pytest.mark.slow
def test_replicas_that_have_become_several_models_are_not_saved_as_one(launches: LaunchServer, tmp_path: Path) -> None:
    apart = {rank: [("drawing_apart", {})] for rank in range(2)}
    failed = launches.run(*flags(tmp_path, *TWO, *ROUNDING, "--out", tmp_path / "o"), environment=EAGER, faults=apart)
    assert "are no longer those in rank 0: the processes have trained different models" in failed.error
    assert set(failed.codes.values()) <= {7, -15}
    assert not list((tmp_path / "o" / "checkpoints").glob("*"))
    assert not (tmp_path / "o" / "model").exists()


@pytest.mark.slow
def test_two_processes_become_four_and_one_becomes_two(launches: LaunchServer, tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    record = launches.run(*flags(tmp_path, *TWO, *SGD, "--out", whole)).record
    four = resumed(launches, whole, tmp_path / "four", "--batch-size", 1, "--shard", "fsdp", ranks=4)
    assert_same_course(four.record, record)
    assert_close(tmp_path / "four", whole, weights=1e-6)
    other = resumed(launches, whole, tmp_path / "other", ranks=4)
    assert other.record["status"] == "completed"
    assert "2 processes become 4: the 22 rows left of epoch 2 make 2 updates, a whole epoch 2." in other.stderr[0]

    alone = tmp_path / "alone"
    record = launches.run(*flags(tmp_path, "--batch-size", 4, "--accum", 2, *SGD, "--out", alone), ranks=1).record
    two = resumed(launches, alone, tmp_path / "two", "--batch-size", 2, ranks=2)
    assert_same_course(two.record, record)
    assert_close(tmp_path / "two", alone, weights=1e-6)


@pytest.mark.slow
def test_an_evaluation_leaves_no_weights_gathered_that_the_next_update_would_take(
    launches: LaunchServer, tmp_path: Path
) -> None:
    given = flags(tmp_path, *TWO, "--optim", "schedulefree-sgd", "--shard", "fsdp", "--save-every", UPDATES)
    record = launches.run(*given, "--out", tmp_path / "evaluated").record
    evaluated = given.index("--eval-data")
    without = (*given[:evaluated], *given[evaluated + 2 :])
    other = launches.run(*without, "--out", tmp_path / "not").record
    assert len(record["eval"]) == 2
    assert not other["eval"]
    assert untimed(record["history"]) == untimed(other["history"])


@pytest.mark.slow
@pytest.mark.parametrize("optim", ["adamw8bit-ao", "adamw4bit", "adamwfp8"])
def test_state_in_few_bits_goes_on_where_it_was_cut(optim: str, launches: LaunchServer, tmp_path: Path) -> None:
    import_module("torchao.optim")  # so that this process may read what it packs
    given = flags(tmp_path, *TWO, "--optim", optim, "--shard", "fsdp", hidden_dim=256)
    whole = tmp_path / "whole"
    record = launches.run(*given, "--out", whole, environment=EAGER).record
    shards = resumed(launches, whole, tmp_path / "shards", environment=EAGER).record
    assert untimed(shards["history"]) == untimed(record["history"])
    assert same_weights(saved_weights(tmp_path / "shards"), saved_weights(whole))
    replicas = resumed(launches, whole, tmp_path / "replicas", "--shard", "ddp", environment=EAGER).record
    state = torch.load(tmp_path / "replicas/checkpoints/update-00000006/training.pt", weights_only=True)["optimizer"]
    assert any(type(value) is not torch.Tensor for entries in state["state"].values() for value in entries.values())
    assert replicas["history"][3]["loss"] == pytest.approx(record["history"][3]["loss"], rel=1e-6)
    assert_close(tmp_path / "replicas", whole, weights=0.01)


def model_of(dtype: torch.dtype) -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.ModuleDict({"wide": torch.nn.Linear(64, 256), "head": torch.nn.Linear(256, 4)}).to(dtype)


def stepped(entry: registry.OptimizerEntry, dtype: torch.dtype, seed: int, **hyper: Any) -> dict[str, int]:
    """Return the sums of the bits of a model after three steps on the same gradients, drawn upon a seed."""
    model = model_of(dtype)
    optimizer = entry.build(decay_groups(model, 0.01), {**registry.default_hyper(entry), **hyper})
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
    for update in range(3):
        numbers = torch.Generator().manual_seed(update)
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=numbers).to(dtype)
        optimizer.step()
    return sums_of_bits(model)


@pytest.mark.slow
@pytest.mark.parametrize("entry", registry.entries(), ids=lambda entry: entry.name)
def test_no_optimizer_draws_in_its_step_but_those_that_round_at_random(
    entry: registry.OptimizerEntry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    if "cpu" not in entry.devices:
        pytest.skip("does not run on a CPU")
    for dtype in (torch.float32, torch.bfloat16):
        assert stepped(entry, dtype, 1) == stepped(entry, dtype, 2)
    if "bf16_stochastic_round" in entry.defaults:
        one, other = (stepped(entry, torch.bfloat16, seed, bf16_stochastic_round=True) for seed in (1, 2))
        assert one != other
