"""`effcli plan`: the search, its table and JSON, and the recipe that a run takes."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from effcli.memory.plan import MemoryPlan
from effcli.pipeline.searching import Candidate, Found, Space, search
from tests import plans
from tests.commands import TINY_DISTILBERT, effcli, model_folder
from tests.plans import GIB, MIB

STATES = (8 * GIB, 2 * GIB, GIB)
"""Bytes of state of three optimizers, the last with 8-bit state."""


def need(candidate: Candidate) -> int:
    """Return bytes that grow with the micro-batch, less so with recomputation and in 16 bit; waiting gradients cost."""
    row = GIB // (2 if candidate.precision == "bf16" else 1) // (8 if candidate.recompute else 1)
    waiting = 256 * MIB if candidate.accum > 1 else 0
    return 4 * GIB + STATES[candidate.optimizer] + waiting + candidate.batch_size * row


def searched(allowed: int, **space: Any) -> tuple[Found, list[Candidate]]:
    """Return what is found, and what was asked for."""
    asked: list[Candidate] = []

    def predict(candidate: Candidate) -> MemoryPlan:
        asked.append(candidate)
        return plans.plan(device_total_bytes=need(candidate))

    settings = {"eight_bit": (False, False, True), "precisions": ("bf16", "fp32"), "effective_batch": 64, **space}
    return search(Space(**settings), predict, allowed), asked


def every(effective: int) -> list[Candidate]:
    """Return every configuration there is."""
    sizes = [size for size in range(1, effective + 1) if effective % size == 0]
    return [
        Candidate(optimizer=o, precision=p, batch_size=size, accum=effective // size, recompute=r)
        for o, p, size, r in product(range(3), ("bf16", "fp32"), sizes, (False, True))
    ]


@pytest.mark.parametrize("gibibytes", [5, 7, 10, 13, 14, 20, 30, 45, 80])
@pytest.mark.parametrize("effective", [1, 7, 36, 64])
def test_the_search_finds_the_largest_micro_batches_that_trying_everything_finds(
    gibibytes: int, effective: int
) -> None:
    allowed = gibibytes * GIB
    found, _ = searched(allowed, effective_batch=effective)
    best: dict[tuple[int, str, bool], Candidate] = {}
    for candidate in every(effective):
        kind = (candidate.optimizer, candidate.precision, candidate.recompute)
        if need(candidate) <= allowed and candidate.batch_size >= best.get(kind, candidate).batch_size:
            best[kind] = candidate
    worthwhile = {
        candidate
        for (optimizer, precision, recompute), candidate in best.items()
        if not recompute
        or (optimizer, precision, False) not in best
        or candidate.batch_size > best[optimizer, precision, False].batch_size
    }
    assert {planned.candidate for planned in found.fitting} == worthwhile
    assert all(planned.need_bytes == need(planned.candidate) <= allowed for planned in found.fitting)


def test_few_predictions_are_made_and_none_twice() -> None:
    found, asked = searched(14 * GIB)
    assert len(asked) == len(set(asked)) == found.num_predictions
    assert len(asked) <= len(every(64)) / 2
    roomy, asked = searched(500 * GIB)
    assert len(asked) == 6, "where the whole batch fits, nothing else is worth trying"
    assert {planned.candidate.batch_size for planned in roomy.fitting} == {64}


def test_what_fits_is_ranked_by_what_is_assumed_about_speed() -> None:
    found, _ = searched(14 * GIB)
    ranked = [planned.candidate for planned in found.fitting]
    keys = [(c.recompute, -c.batch_size, c.precision == "fp32", c.optimizer == 2, c.optimizer) for c in ranked]
    assert keys == sorted(keys)
    assert not ranked[0].recompute


def test_an_8_bit_optimizer_that_was_named_first_comes_after_others_of_the_same_batch() -> None:
    found, _ = searched(500 * GIB, eight_bit=(True, False, False), precisions=("bf16",))
    assert [planned.candidate.optimizer for planned in found.fitting] == [1, 2, 0]


def test_where_nothing_fits_the_one_that_takes_least_is_closest() -> None:
    found, asked = searched(4 * GIB)
    assert found.fitting == ()
    assert found.closest.need_bytes == min(map(need, every(64)))
    assert len(asked) == 2 * len(every(64)) / 7, "the whole batch and a single row of each kind"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("model"), TINY_DISTILBERT)


@pytest.fixture
def plan(model: Path) -> Callable[..., Any]:
    return lambda *flags: effcli("plan", model, "--max-length", 32, "--effective-batch", 8, *flags)


ONE = ("--optim", "adamw", "--precision", "fp32", "--gpu", "2GiB")


def test_the_json_names_what_was_tried_what_is_assumed_and_each_configuration(plan: Callable[..., Any]) -> None:
    record = plan("--gpu", "rtx-4090", "--optim", "adamw", "--optim", "adamw8bit", "--json").record
    assert (record["command"], record["schema_version"]) == ("plan", 1)
    assert record["gpu"]["name"] == "GeForce RTX 4090"
    assert record["allowed_bytes"] == int(record["gpu"]["usable_bytes"] * 0.9)
    assert record["tried"] == {"optimizers": ["adamw", "adamw8bit"], "precisions": ["bf16", "fp32"]}
    assert any("recomputes" in sentence for sentence in record["assumed"])
    assert [(c["optimizer"], c["precision"]) for c in record["configurations"]] == [
        ("adamw", "bf16"), ("adamw8bit", "bf16"), ("adamw", "fp32"), ("adamw8bit", "fp32"),
    ]  # fmt: skip
    for configuration in record["configurations"]:
        assert configuration["batch"] == {"micro": 8, "accum": 1, "world_size": 1, "effective": 8}
        assert configuration["device_total_bytes"] + configuration["spare_bytes"] == record["gpu"]["usable_bytes"]
    assert record["closest"] is None


def test_the_plan_of_a_configuration_is_the_estimate_of_its_flags(plan: Callable[..., Any], model: Path) -> None:
    (configuration,) = plan(*ONE, "--json").record["configurations"]
    estimated = effcli("estimate", model, *configuration["flags"].split(), "--json").record["optimizers"][0]
    assert estimated["plan"]["device_total_bytes"] == configuration["device_total_bytes"]
    assert estimated["plan"]["peak_allocated_bytes"] == configuration["peak_allocated_bytes"]
    assert estimated["state_bytes"] == configuration["optimizer_state_bytes"]


def test_what_the_search_was_given_for_the_model_and_the_optimizer_is_to_be_typed_as_well(
    plan: Callable[..., Any], model: Path, tmp_path: Path
) -> None:
    """The recipe of the same row holds the same settings, and an estimate of them the same bytes."""
    recipe = tmp_path / "recipe.yaml"
    given = ("--freeze", "*embed*", "--freeze", "layer.0", "--stable-embedding", "--attn", "eager",
             "--min-8bit-size", 100, "--keep-32bit", "lin1", "--max-grad-norm", "0.5")  # fmt: skip
    own = ("--optim", "adam8bit", "--optim-arg", "beta2=0.98", "--precision", "fp32", "--gpu", "2GiB")
    (configuration,) = plan(*given, *own, "--out", recipe, "--json").record["configurations"]
    flags = shlex.split(configuration["flags"])
    assert flags[flags.index("--freeze") :] == [
        *("--freeze", "*embed*", "--freeze", "layer.0", "--attn", "eager", "--stable-embedding"),
        *("--optim-arg", "beta2=0.98", "--keep-32bit", "lin1", "--min-8bit-size", "100"),
        *("--max-grad-norm", "0.5"),
    ]
    typed = effcli("train", model, *flags, "--task", "classification", "--dry-run", "--json").record
    assert typed["spec"] == effcli("train", "--recipe", recipe, "--dry-run", "--json").record["spec"]
    estimated = effcli("estimate", model, *flags, "--json").record["optimizers"][0]
    assert estimated["plan"]["device_total_bytes"] == configuration["device_total_bytes"]
    assert estimated["state_bytes"] == configuration["optimizer_state_bytes"]


def test_the_chosen_recipe_runs_and_holds_what_was_chosen(plan: Callable[..., Any], tmp_path: Path) -> None:
    recipe = tmp_path / "my recipe.yaml"
    both = ("--optim", "adamw", "--optim", "adamw8bit", "--precision", "fp32", "--gpu", "2GiB")
    record = plan(*both, "--out", recipe, "--choose", 2, "--json").record
    assert (record["chosen"], record["recipe"]) == (2, str(recipe))
    run = effcli("train", "--recipe", recipe, "--dry-run", "--json").record
    chosen = record["configurations"][1]
    assert run["optimizer"]["name"] == chosen["optimizer"] == "adamw8bit"
    assert run["batch"] == chosen["batch"]
    assert run["optimizer"]["state_bytes"] == chosen["optimizer_state_bytes"]
    assert run["spec"]["data"]["max_length"] == 32
    assert effcli("recipes", "check", recipe).code == 0
    head = recipe.read_text()
    assert f"# Command: effcli train --recipe '{recipe}'\n" in head
    stated = {
        name: int(size.replace(",", ""))
        for name, size in re.findall(r"^#  +(\w[\w ]*\w) +([\d,]+) B", head, re.MULTILINE)
    }
    assert stated["weights"] == run["model"]["weights_bytes"]
    assert stated["total"] == run["optimizer"]["total_before_activations_bytes"]


def test_a_recipe_is_not_written_over_another_file_nor_for_what_cannot_be_trained(
    plan: Callable[..., Any], tmp_path: Path
) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("mine")
    refused = plan(*ONE, "--out", recipe)
    assert refused.code == 2
    assert refused.error == f"--out {recipe} is there already; give another file, or --overwrite"
    assert recipe.read_text() == "mine"
    assert plan(*ONE, "--out", recipe, "--overwrite").code == 0
    assert "adamw" in recipe.read_text()
    untrainable = plan(*ONE, "--task", "masked-lm", "--out", tmp_path / "other.yaml")
    assert untrainable.code == 2
    assert "effcli train does not learn masked-lm" in untrainable.error


def test_the_table_keeps_to_80_columns_and_says_what_to_type(plan: Callable[..., Any], model: Path) -> None:
    text = plan("--gpu", "2GiB", "--optim", "adamw").stdout
    assert max(map(len, text.replace(str(model), "MODEL").splitlines())) <= 80
    assert "What fits, the fastest first (assumed)" in text
    assert re.search(r"^1 +adamw +bf16 +8 x 1 +no +", text, re.MULTILINE)
    assert "10 % stays free" in text


def test_where_nothing_fits_the_error_names_the_closest_and_what_it_would_take(plan: Callable[..., Any]) -> None:
    result = plan("--gpu", "400MiB", "--optim", "adamw", "--precision", "fp32", "--json")
    assert result.code == 6
    assert result.error.startswith("nothing fits in 360.00 MiB (400.00 MiB less the margin): closest is --optim adamw")
    assert '"configurations": []' in result.stdout
    assert '"ways_out": [' in result.stdout


@pytest.mark.parametrize(
    ("flags", "wording"),
    [
        ((), "say what the settings must fit: --gpu 24GiB, or a card that `effcli gpus` lists"),
        (("--gpu", "rtx-4091"), "--gpu: no card 'rtx-4091' is known. Did you mean rtx-4090"),
        (("--gpu", "24"), "--gpu: "),
        (("--gpu", "2GiB", "--margin", "100"), "--margin (loop.margin): 100 is not below 100"),
        (("--gpu", "2GiB", "--effective-batch", "0"), "--effective-batch (loop.effective_batch): 0 is below"),
        (("--gpu", "2GiB", "--precision", "bf61"), "'bf61' is not one of fp32, bf16, fp16, bf16-pure"),
        (("--gpu", "2GiB", "--optim", "adamz"), "adamz"),
        (("--gpu", "2GiB", "--max-length", "65"), "--max-length 65: "),
    ],
)
def test_wrong_flags_are_refused_in_one_line(flags: tuple[str, ...], wording: str, model: Path) -> None:
    refused = effcli("plan", model, *flags)
    assert refused.code == 2
    assert wording in refused.error


def test_a_row_that_is_not_there_is_refused(plan: Callable[..., Any], tmp_path: Path) -> None:
    refused = plan(*ONE, "--out", tmp_path / "recipe.yaml", "--choose", 9)
    assert refused.code == 2
    assert refused.error == "--choose 9: there is 1 configuration that fits"
