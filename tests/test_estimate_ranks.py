"""`effcli estimate --world-size N --shard MODE`: what each process holds, beside torch and the ZeRO paper."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import CONFIG_MAPPING, AutoModelForSequenceClassification

from effcli.measure.optimizer_size import inspect_optimizer
from effcli.memory.sharding.share import Sharding
from effcli.memory.sharding.shares import shares
from effcli.optim.registry import default_hyper, find
from effcli.pipeline.facts import own_class_name
from effcli.pipeline.ranks import rank_amounts
from effcli.units import ParamInfo
from tests.commands import TINY_DISTILBERT, TINY_GPT2, effcli, model_folder

LARGE = "effcli estimate Llama-2-70b-hf --world-size 64 --shard zero3 --optim adamw --precision bf16"
"""The README's example."""
PER_RANK = ("weights_bytes", "gradients_bytes", "optimizer_state_bytes", "communication_bytes")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EFFCLI_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def distilbert(tmp_path: Path) -> Path:
    return model_folder(tmp_path / "distilbert", TINY_DISTILBERT)


def estimate(*arguments: object) -> dict[str, Any]:
    return effcli("estimate", *arguments, "--json").record


def shown(*arguments: object) -> str:
    result = effcli("estimate", *arguments)
    assert result.code == 0, result.stderr
    return result.stdout


def chunks_of(parameter: torch.Tensor, world_size: int) -> list[torch.Tensor]:
    """Return the shard of each rank as torch cuts it; ranks beyond the last chunk have nothing."""
    found = list(parameter.detach().chunk(world_size))
    return found + [parameter.detach()[:0]] * (world_size - len(found))


@pytest.mark.parametrize("world_size", [2, 3])
def test_the_state_of_each_rank_is_what_torch_holds_for_its_chunks(distilbert: Path, world_size: int) -> None:
    record = estimate(
        distilbert, "--world-size", world_size, "--shard", "fsdp", "--optim", "adamw", "--optim", "sgd-momentum"
    )
    model = AutoModelForSequenceClassification.from_config(
        CONFIG_MAPPING["distilbert"](**{key: value for key, value in TINY_DISTILBERT.items() if key != "model_type"})
    )
    for place, (name, build) in enumerate(
        {"adamw": torch.optim.AdamW, "sgd-momentum": lambda given: torch.optim.SGD(given, momentum=0.9)}.items()
    ):
        facts = record["optimizers"][place]
        assert (facts["name"], len(facts["per_rank"])) == (name, world_size)
        for rank, amounts in enumerate(facts["per_rank"]):
            held = [
                torch.nn.Parameter(chunks_of(parameter, world_size)[rank].clone()) for parameter in model.parameters()
            ]
            optimizer = build(held)
            for parameter in held:
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
            size = inspect_optimizer(optimizer)
            assert amounts["rank"] == rank
            assert amounts["optimizer_state_bytes"] == size.state_bytes
            assert amounts["optimizer_state_elements"] == size.state_elements
            largest = [chunks_of(parameter, world_size)[0] for parameter in model.parameters()]
            assert amounts["weights_bytes"] == sum(4 * chunk.numel() for chunk in largest)


def test_replicas_hold_what_one_process_holds(distilbert: Path) -> None:
    both = ("--optim", "adamw", "--optim", "adam8bit")
    alone, many = estimate(distilbert, *both), estimate(distilbert, *both, "--world-size", 4)
    assert (alone["distribution"], many["distribution"]) == (None, {"world_size": 4, "shard": "ddp"})
    assert many["model"] == alone["model"]
    for one, other in zip(alone["optimizers"], many["optimizers"], strict=True):
        assert one["per_rank"] == []
        assert [rank["rank"] for rank in other["per_rank"]] == [0, 1, 2, 3]
        assert {rank["total_before_activations_bytes"] for rank in other["per_rank"]} == {
            one["total_before_activations_bytes"]
        }
        assert {**other, "per_rank": []} == one
    assert alone["modes"] == []


@pytest.mark.parametrize("shard", ["ddp", "fsdp", "zero1", "zero2", "zero3"])
def test_amounts_outside_the_ranks_are_those_of_rank_0_and_counts_the_whole_models(
    distilbert: Path, shard: str
) -> None:
    whole = estimate(distilbert, "--optim", "adamw")["model"]
    record = estimate(distilbert, "--world-size", 3, "--shard", shard, "--optim", "adamw")
    model, facts = record["model"], record["optimizers"][0]
    first = facts["per_rank"][0]
    for key in ("num_parameters", "num_trainable_parameters", "num_parameter_tensors"):
        assert model[key] == whole[key]
    assert (model["weights_bytes"], model["gradients_bytes"]) == (first["weights_bytes"], first["gradients_bytes"])
    assert (facts["state_bytes"], facts["state_elements"]) == (
        first["optimizer_state_bytes"],
        first["optimizer_state_elements"],
    )
    assert sum(amount["bytes"] for amount in facts["tensors"].values()) == facts["state_bytes"]
    assert sum(facts["placements"].values()) == facts["state_bytes"]
    assert facts["total_before_activations_bytes"] == first["total_before_activations_bytes"]
    assert ("master_weights" in facts["tensors"]) is shard.startswith("zero")
    for rank in facts["per_rank"]:
        assert rank["total_before_activations_bytes"] == sum(rank[key] for key in PER_RANK)


def test_the_largest_models_come_to_what_the_zero_paper_says_of_them() -> None:
    _, *arguments = LARGE.split()[1:]
    record = estimate(*arguments)
    parameters, cards = 68_976_648_192, 64
    assert record["model"]["num_parameters"] == parameters
    paper = {  # arXiv 1910.02054, figure 1, with K = 12 for Adam in mixed precision
        "ddp": (2 + 2 + 12) * parameters,
        "zero1": 4 * parameters + 12 * parameters // cards,
        "zero2": 2 * parameters + (2 + 12) * parameters // cards,
        "zero3": (4 + 12) * parameters // cards,
        "fsdp": (4 + 12) * parameters // cards,
    }
    assert {mode["shard"] for mode in record["modes"]} == set(paper)
    whole_tensors = 2 * 32_000 * 8_192 * 2  # of the largest: one that begins and one that ends outside its partition
    for mode in record["modes"]:
        fullest = mode["fullest"]
        held = fullest["total_before_activations_bytes"] - fullest["communication_bytes"]
        above = held - paper[mode["shard"]]
        most = whole_tensors if mode["shard"] == "zero2" else 4 * 723  # else AdamW's step for each tensor
        assert 0 <= above <= most, mode
    chosen = next(mode for mode in record["modes"] if mode["shard"] == "zero3")
    assert chosen["fullest"] in record["optimizers"][0]["per_rank"]


def test_zero_sharded_in_the_paper_s_own_example_comes_to_its_published_gigabytes() -> None:
    """Figure 1: 7.5 billion parameters on 64 devices take 120, 31.4, 16.6 and 1.9 GB."""
    parameters = tuple(ParamInfo(name=f"w{number}", shape=(10_000, 7_500)) for number in range(100))
    published = {"zero1": 31.4, "zero2": 16.6, "zero3": 1.9}
    for shard, gigabytes in published.items():
        held = shares(parameters, Sharding(shard=shard, world_size=64), "bf16")  # type: ignore[arg-type]
        first = rank_amounts(find("adam"), default_hyper(find("adam")), held)[0]
        total = first.total_before_activations_bytes - first.communication_bytes
        assert total / 1e9 == pytest.approx(gigabytes, abs=0.2 if shard == "zero2" else 0.06)


def test_tables_fit_80_columns_and_show_the_fullest_and_all_together(distilbert: Path) -> None:
    arguments = (distilbert, "--world-size", 3, "--shard", "fsdp", "--optim", "adamw", "--optim", "sgd")
    record, text = estimate(*arguments), shown(*arguments)
    assert max(map(len, text.splitlines())) <= 80
    assert "3 (fsdp): weights, gradients and optimizer state are sharded" in " ".join(text.split())
    ranks = record["optimizers"][0]["per_rank"]
    states = [rank["optimizer_state_bytes"] for rank in ranks]
    assert min(states) < max(states)
    row = next(line for line in text.splitlines() if line.startswith("optimizer state"))
    assert re.split(r"\s{2,}", row)[1:] == [
        f"{num_bytes / 1024**unit:,.2f} {name}"
        for num_bytes, unit, name in ((max(states), 1, "KiB"), (min(states), 1, "KiB"), (sum(states), 2, "MiB"))
    ]
    for name in ("ddp", "fsdp", "zero1", "zero2", "zero3"):
        assert re.search(rf"^{name} +\d", text, re.MULTILINE)
    large = shown(*LARGE.split()[2:])
    assert max(map(len, large.splitlines())) <= 80


def test_equal_ranks_are_computed_once() -> None:
    adamw = find("adamw")
    laid_out: list[str] = []

    def law(parameter: ParamInfo, hyper: Any) -> Any:
        laid_out.append(parameter.name)
        return adamw.state_layout(parameter, hyper)

    parameters = tuple(ParamInfo(name=f"w{number}", shape=(1000 + number, 8)) for number in range(10))
    held = shares(parameters, Sharding(shard="fsdp", world_size=4096))
    ranks = rank_amounts(replace(adamw, state_layout=law), default_hyper(adamw), held)
    assert len(ranks) == 4096
    assert len(laid_out) <= 10 * 12  # each length of a tensor ends at a rank of its own, and beyond all is nothing
    assert ranks[-1].optimizer_state_elements == 10  # a step for each tensor of which nothing lies there


def test_another_rank_holds_more_than_the_first_where_its_shards_are_too_small_for_8_bits() -> None:
    entry = find("adamw8bit-ao")
    held = shares([ParamInfo(name="w", shape=(63, 128))], Sharding(shard="fsdp", world_size=2))
    first, second = rank_amounts(entry, default_hyper(entry), held)
    assert first.optimizer_state_elements > second.optimizer_state_elements
    assert first.optimizer_state_bytes < second.optimizer_state_bytes


def test_layers_of_a_sharded_model_add_up_to_rank_0(distilbert: Path) -> None:
    whole = estimate(distilbert, "--optim", "adamw", "--per-layer")
    record = estimate(distilbert, "--world-size", 2, "--shard", "fsdp", "--optim", "adamw", "--per-layer", "--top", "3")
    first = record["optimizers"][0]["per_rank"][0]
    assert sum(part["weights_bytes"] for part in record["layers"]) == first["weights_bytes"]
    assert sum(part["gradients_bytes"] for part in record["layers"]) == first["gradients_bytes"]
    assert sum(part["state_bytes"][0] for part in record["layers"]) == first["optimizer_state_bytes"]
    assert [part["num_parameters"] for part in record["layers"]] == [part["num_parameters"] for part in whole["layers"]]
    assert len(record["largest"]) == 3
    refused = effcli("estimate", distilbert, "--world-size", 2, "--shard", "zero2", "--per-layer")
    assert (refused.code, "belong to no layer" in refused.error) == (2, True)


def test_shares_of_one_process_are_refused(distilbert: Path) -> None:
    refused = effcli("estimate", distilbert, "--shard", "fsdp")
    assert refused.code == 2
    assert "--world-size 8" in refused.error
    assert effcli("estimate", distilbert, "--shard", "none", "--json").record["distribution"] is None


@pytest.mark.parametrize(("shard", "also_refused"), [("fsdp", "adam8bit"), ("zero2", "muon")])
def test_an_optimizer_that_does_not_run_on_shares_is_refused_by_name_and_left_out_of_all(
    distilbert: Path, shard: str, also_refused: str
) -> None:
    sharded = ("--world-size", 2, "--shard", shard)
    refused = effcli("estimate", distilbert, *sharded, "--optim", "adafactor")
    assert refused.code == 2
    assert "adafactor" in refused.error
    for chosen in (("--optim", "all"), ()):
        record = estimate(distilbert, *sharded, *chosen)
        names = [optimizer["name"] for optimizer in record["optimizers"]]
        assert "adamw" in names
        assert not {"adafactor", also_refused} & set(names)
        assert any(note.startswith("Left out") and "adafactor" in note for note in record["notes"])
    both = effcli("estimate", distilbert, *sharded, "--optim", "all", "--optim", "adafactor")
    assert (both.code, "adafactor" in both.error) == (2, True)


def test_what_can_be_estimated_and_not_trained_is_said(distilbert: Path) -> None:
    def about(*arguments: object) -> list[str]:
        record = estimate(distilbert, "--world-size", 2, "--optim", "adamw", *arguments)
        return [note for note in record["notes"] if note.startswith("Estimated, and not trained")]

    assert about("--shard", "fsdp") == about("--shard", "zero3") == []
    assert "--precision fp16" in about("--shard", "fsdp", "--precision", "fp16")[0]
    assert "--precision bf16-pure" in about("--shard", "zero2", "--precision", "bf16-pure")[0]
    (few_bits,) = about("--shard", "zero2", "--optim", "adam8bit")
    assert "optimizer 'adam8bit' with --shard zero2" in few_bits


def test_names_mean_nothing_to_an_optimizer_of_flat_tensors(distilbert: Path) -> None:
    sharded = ("--world-size", 2, "--shard", "zero1", "--optim", "adamw")
    refused = effcli("estimate", distilbert, *sharded, "--override", "embed:lr=0.1")
    assert refused.code == 2
    assert "--override 'embed'" in refused.error
    allowed = estimate(
        distilbert, "--world-size", 2, "--shard", "fsdp", "--optim", "adamw", "--override", "embed:lr=0.1"
    )
    assert [mode["shard"] for mode in allowed["modes"]] == ["ddp", "fsdp"]


def test_frozen_weights_are_shared_and_have_neither_gradient_nor_state(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "gpt2", TINY_GPT2)
    sharded = ("--world-size", 2, "--shard", "fsdp", "--optim", "adamw")
    all_trained, frozen = estimate(folder, *sharded), estimate(folder, *sharded, "--freeze", "transformer.wte*")
    before, after = (record["optimizers"][0]["per_rank"][1] for record in (all_trained, frozen))
    half = 1000 // 2 * 64
    assert after["weights_bytes"] == before["weights_bytes"]
    assert before["gradients_bytes"] - after["gradients_bytes"] == 4 * half
    assert before["optimizer_state_bytes"] - after["optimizer_state_bytes"] == 8 * half + 4


def test_a_sharded_model_keeps_its_name_in_the_record() -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = torch.nn.Linear(4, 4)
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        assert type(model).__name__ == "FSDPLinear"
        assert own_class_name(model) == "Linear"
    finally:
        dist.destroy_process_group()
