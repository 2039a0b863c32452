"""`effcli plan --gpus N`: what is searched, what to type, and the recipe."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from effcli.pipeline.searching import Candidate, Found, Space, search
from tests import plans
from tests.commands import TINY_DISTILBERT, effcli, model_folder
from tests.plans import GIB

CARDS = 4


def need(candidate: Candidate) -> int:
    """Return bytes of a model of which a shard takes a quarter; a row takes less where activations are recomputed."""
    whole = 8 * GIB
    row = GIB // (4 if candidate.recompute else 1)
    return (whole // CARDS if candidate.shard == "fsdp" else whole) + candidate.batch_size * row


def searched(allowed: int, **space: Any) -> Found:
    settings = {
        "eight_bit": (False, True),
        "precisions": ("bf16",),
        "effective_batch": 32,
        "world_size": CARDS,
        "shards": ("fsdp", "ddp"),
        **space,
    }
    return search(Space(**settings), lambda candidate: plans.plan(device_total_bytes=need(candidate)), allowed)


def test_rows_are_divided_among_the_cards_before_they_are_cut_into_micro_batches() -> None:
    found = searched(12 * GIB)
    assert {planned.candidate.batch_size * planned.candidate.accum for planned in found.fitting} == {32 // CARDS}
    assert {(planned.candidate.shard, planned.candidate.batch_size) for planned in found.fitting} == {
        ("ddp", 4), ("ddp", 8), ("fsdp", 8),
    }  # fmt: skip


def test_replicas_come_before_shards_where_they_fit_and_that_is_said() -> None:
    ways = [planned.candidate.shard for planned in searched(12 * GIB).fitting]
    assert ways == sorted(ways), "ddp first"
    assert {planned.candidate.shard for planned in searched(7 * GIB).fitting} == {"fsdp"}
    many, one = (Space(eight_bit=(False,), precisions=("fp32",), effective_batch=8, world_size=size) for size in (2, 1))
    assert many.assumed[0].startswith("replicas before shards")
    assert many.assumed[1:] == one.assumed


def test_what_does_not_run_is_not_tried() -> None:
    found = searched(12 * GIB, runs=lambda optimizer, precision, shard: shard == "ddp" or optimizer == 0)
    assert {(planned.candidate.optimizer, planned.candidate.shard) for planned in found.fitting} == {
        (0, "ddp"), (1, "ddp"), (0, "fsdp"),
    }  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("model"), TINY_DISTILBERT)


@pytest.fixture
def plan(model: Path) -> Callable[..., Any]:
    common = ("--max-length", 32, "--effective-batch", 8, "--precision", "fp32", "--gpu", "2GiB")
    return lambda *flags: effcli("plan", model, *common, *flags)


def test_each_configuration_says_what_to_type_and_is_the_estimate_of_its_flags(
    plan: Callable[..., Any], model: Path
) -> None:
    record = plan("--gpus", 2, "--optim", "adamw", "--json").record
    assert (record["gpus"], record["tried"]["shards"]) == (2, ["ddp", "fsdp"])
    assert [configuration["shard"] for configuration in record["configurations"]] == ["ddp", "fsdp"]
    for configuration in record["configurations"]:
        assert configuration["batch"] == {"micro": 4, "accum": 1, "world_size": 2, "effective": 8}
        flags = configuration["flags"]
        assert configuration["command"] == f"torchrun --nproc-per-node 2 -m effcli train {model} {flags}"
        assert ("--shard fsdp" in flags) == (configuration["shard"] == "fsdp")
        estimated = effcli("estimate", model, "--world-size", 2, *flags.split(), "--json").record["optimizers"][0]
        assert estimated["plan"]["peak_allocated_bytes"] == configuration["peak_allocated_bytes"]
        assert estimated["per_rank"][0]["optimizer_state_bytes"] == configuration["optimizer_state_bytes"]
        assert estimated["per_rank"][0]["weights_bytes"] == configuration["weights_bytes"]


def test_one_card_is_asked_for_as_before(plan: Callable[..., Any], model: Path) -> None:
    (configuration,) = plan("--optim", "adamw", "--json").record["configurations"]
    assert configuration["command"] == f"effcli train {model} {configuration['flags']}"
    assert configuration["shard"] == "ddp"
    assert "--shard" not in configuration["flags"]


def test_an_optimizer_that_does_not_run_on_shards_is_tried_as_a_replica_and_that_is_noted(
    plan: Callable[..., Any],
) -> None:
    record = plan("--gpus", 2, "--optim", "adafactor", "--json").record
    assert [configuration["shard"] for configuration in record["configurations"]] == ["ddp"]
    (note,) = [note for note in record["notes"] if note.startswith("Left out")]
    assert "'adafactor' does not run with --shard fsdp: " in note


def test_the_recipe_of_a_shard_says_how_it_is_started_and_is_refused_alone(
    plan: Callable[..., Any], tmp_path: Path
) -> None:
    recipe = tmp_path / "recipe.yaml"
    plan("--gpus", 2, "--shard", "fsdp", "--optim", "adamw", "--out", recipe)
    text = recipe.read_text()
    assert f"# Command: torchrun --nproc-per-node 2 -m effcli train --recipe {recipe}\n" in text
    assert re.search(r"^  shard: fsdp$", text, re.MULTILINE)
    assert effcli("recipes", "check", recipe).code == 0
    alone = effcli("train", "--recipe", recipe, "--dry-run")
    assert alone.code == 2
    assert "--shard fsdp needs several processes" in alone.error


def test_what_deepspeed_shards_is_started_through_accelerate(plan: Callable[..., Any], tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    few_bits = ("--optim", "adamw", "--optim", "adamw8bit")
    record = plan("--gpus", 2, "--gpu", "4GiB", "--shard", "zero2", *few_bits, "--out", recipe, "--json").record
    (configuration,) = record["configurations"]
    assert configuration["flags"].endswith("--shard zero2 --engine accelerate")
    assert re.search(r"^  engine: accelerate$", recipe.read_text(), re.MULTILINE)
    (note,) = [note for note in record["notes"] if note.startswith("Left out")]
    assert "optimizer 'adamw8bit' with --shard zero2" in note
    nothing = plan("--gpus", 2, "--gpu", "1GiB", "--shard", "zero2", "--optim", "adamw")
    assert nothing.code == 6
    assert "bf16-pure" not in nothing.error


def test_the_table_has_a_column_for_the_mode_and_keeps_to_80_columns(plan: Callable[..., Any], model: Path) -> None:
    text = plan("--gpus", 2, "--optim", "adamw").stdout
    assert max(map(len, text.replace(str(model), "MODEL").splitlines())) <= 80
    assert re.search(r"^1 +adamw +fp32 +ddp +4 x 1 +no +", text, re.MULTILINE)
    assert "torchrun --nproc-per-node 2 -m effcli train" in " ".join(text.split())
    assert "2 x 2.00 GiB" in text


@pytest.mark.parametrize(
    ("flags", "wording"),
    [
        (("--gpus", "3"), "--gpus 3: 8 rows per update cannot be divided evenly among as many cards; give "
         "--effective-batch 6 or 9"),
        (("--gpus", "16"), "give --effective-batch 16"),
        (("--shard", "fsdp"), "--shard fsdp: one card has nobody to share with; say how many there are"),
        (("--gpus", "2", "--shard", "fsdp", "--optim", "adafactor"), "'adafactor' does not run with --shard fsdp: "),
        (("--gpus", "0"), "--gpus (loop.gpus): 0 is below the smallest allowed value 1"),
    ],
)  # fmt: skip
def test_wrong_cards_are_refused_in_one_line(plan: Callable[..., Any], flags: tuple[str, ...], wording: str) -> None:
    refused = plan(*flags)
    assert refused.code == 2
    assert wording in refused.error
