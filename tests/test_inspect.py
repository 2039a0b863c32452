"""`inspect`: amounts, resemblance and reasons, against live optimizers and storages that the test counts itself."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from effcli.measure.optimizer_size import inspect_optimizer
from effcli.optim.entry import OptimizerEntry
from effcli.optim.hyper import resolve_hyper
from effcli.optim.registry import entries, find
from effcli.spec import OptimSpec
from tests.commands import effcli
from tests.tiny_models import stepped, tiny_distilbert

SHAPES = ((64, 64), (64, 63), (65, 64), (64,))
"""4,096, 4,032, 4,160 and 64 elements, around the 4,096 from which states are quantised and the blocks of 256."""


def saved(path: Path, optimizer: torch.optim.Optimizer) -> Path:
    """Return a file with the optimizer's `state_dict`."""
    torch.save(optimizer.state_dict(), path)
    return path


def inspected(path: Path, *flags: object) -> dict[str, Any]:
    return effcli("inspect", path, "--json", *flags).record


def storage_bytes(values: Iterable[Any]) -> int:
    """Return the bytes of all storages in nested states, each once, found without the code under test."""
    found: dict[int, int] = {}
    waiting = list(values)
    while waiting:
        value = waiting.pop()
        if isinstance(value, torch.Tensor) and hasattr(value, "__tensor_flatten__"):
            waiting += [getattr(value, name) for name in value.__tensor_flatten__()[0]]
        elif isinstance(value, torch.Tensor):
            found[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
        elif isinstance(value, dict):
            waiting += value.values()
        elif isinstance(value, list | tuple):
            waiting += value
        elif hasattr(value, "ortho_matrix"):
            waiting.append(value.ortho_matrix)
    return sum(found.values())


def optimizer_of(name: str, shapes: Iterable[tuple[int, ...]] = SHAPES, **values: Any) -> torch.optim.Optimizer:
    """Return an optimizer after one update of parameters of these shapes, called `p0`, `p1`, ..."""
    params = [torch.nn.Parameter(torch.randn(shape)) for shape in shapes]
    for param in params:
        param.grad = torch.randn_like(param)
    entry = find(name)
    group = {"params": params, "names": [f"p{index}" for index in range(len(params))], "weight_decay": 0.0}
    optimizer = entry.build([group], resolve_hyper(entry, OptimSpec(name=name, **values)))
    optimizer.step()
    return optimizer


def installed(entry: OptimizerEntry) -> bool:
    return entry.package is None or importlib.util.find_spec(entry.package) is not None


@pytest.mark.parametrize("entry", [pytest.param(entry, id=entry.name) for entry in entries()])
def test_the_state_of_every_listed_optimizer_is_counted_to_the_byte_and_recognised(
    entry: OptimizerEntry, tmp_path: Path
) -> None:
    if not installed(entry):
        pytest.skip(f"{entry.package} is not installed")
    torch.manual_seed(0)
    optimizer = stepped(entry, tiny_distilbert(), OptimSpec(name=entry.name))
    live = inspect_optimizer(optimizer)
    record = inspected(saved(tmp_path / "optimizer.pt", optimizer))

    assert record["state_bytes"] == live.state_bytes == storage_bytes(optimizer.state.values())
    assert record["state_elements"] == live.state_elements
    assert record["num_tensors"] == live.num_tensors
    assert {key: amount["bytes"] for key, amount in record["tensors"].items()} == {
        key: amount.bytes for key, amount in live.tensors.items()
    }
    assert record["by_parameter"] == live.by_parameter
    assert sum(record["by_parameter"].values()) + record["shared_bytes"] == record["state_bytes"]
    assert entry.name in (record["optimizer"], *record["also_fits"])
    if record["state_bytes"]:
        assert record["alternatives"][0] == {"name": record["optimizer"], "state_bytes": record["state_bytes"]}


def state_of(path: Path, states: dict[int, Any], **group: Any) -> Path:
    """Return a file with states that no optimizer of ours wrote, over one group."""
    torch.save({"state": states, "param_groups": [{**group, "params": list(states)}]}, path)
    return path


def test_sizes_around_the_threshold_and_the_blocks_of_bitsandbytes(tmp_path: Path) -> None:
    record = inspected(saved(tmp_path / "o.pt", optimizer_of("adam8bit")))
    assert record["by_parameter"] == {"p0": 8_320, "p1": 32_256, "p2": 8_456, "p3": 512}
    assert record["shared_bytes"] == 2_048
    reasons = {parameter["name"]: parameter["reason"] for parameter in record["parameters"]}
    few = "fewer than 4,096 elements"
    assert reasons == {"p0": None, "p1": few, "p2": None, "p3": few}


def test_sizes_around_the_threshold_and_the_blocks_of_torchao(tmp_path: Path) -> None:
    record = inspected(saved(tmp_path / "o.pt", optimizer_of("adamw8bit-ao")))
    assert record["optimizer"] == "adamw8bit-ao"
    assert record["by_parameter"]["p2"] == 33_284
    reasons = {parameter["name"]: parameter["reason"] for parameter in record["parameters"]}
    few = "fewer than 4,096 elements"
    assert reasons == {"p0": None, "p1": few, "p2": "not a multiple of the block size 256 (torchao)", "p3": few}


def test_a_model_of_small_layers_alone_saves_nothing_and_is_told_why(tmp_path: Path) -> None:
    record = inspected(saved(tmp_path / "o.pt", optimizer_of("adam8bit", [(63, 64)])))
    assert record["state_bytes"] == 32_256
    assert {record["optimizer"], *record["also_fits"]} >= {"adam8bit", "adam32bit"}
    assert [(each["quantised"], each["reason"]) for each in record["parameters"]] == [
        (False, "fewer than 4,096 elements")
    ]


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("adamw", {"args": {"amsgrad": True}}),
        ("sgd-momentum", {"args": {"momentum": 0.5}}),
        ("rmsprop", {"args": {"momentum": 0.9, "centered": True}}),
        ("adafactor", {"beta1": 0.9}),
        ("adam8bit", {"min_8bit_size": 64}),
        ("adam8bit", {"min_8bit_size": 4_100}),
        ("adam8bit", {"overrides": {"p0": {"optim_bits": 32}}}),
        ("lion8bit", {"keep_32bit": ("p2",)}),
        ("adamw8bit-ao", {"args": {"block_size": 64}}),
        ("adamw4bit", {"args": {"block_size": 32}}),
        ("galore-adamw", {"args": {"rank": 8}}),
        ("galore-adamw", {"args": {"rank": 8, "proj_type": "full"}}),
    ],
)
def test_an_optimizer_is_recognised_with_other_settings_than_its_defaults(
    name: str, values: dict[str, Any], tmp_path: Path
) -> None:
    optimizer = optimizer_of(name, **values)
    record = inspected(saved(tmp_path / "o.pt", optimizer))
    assert record["state_bytes"] == inspect_optimizer(optimizer).state_bytes
    assert name in (record["optimizer"], *record["also_fits"]), record["resemblance"]
    assert [tuple(each["shape"]) for each in sorted(record["parameters"], key=lambda each: each["name"])] == [*SHAPES]
    assert record["alternatives"][0]["state_bytes"] == record["state_bytes"]


def test_what_can_keep_a_state_whole_is_told_and_no_more(tmp_path: Path) -> None:
    shapes = [(64, 64), (128, 64), (256, 64), (512, 64)]
    larger = inspected(saved(tmp_path / "a.pt", optimizer_of("adam8bit", shapes, min_8bit_size=16_384)))
    kept = inspected(saved(tmp_path / "b.pt", optimizer_of("adam8bit", shapes, keep_32bit=("p3",))))
    smaller = inspected(saved(tmp_path / "c.pt", optimizer_of("adam8bit", [(8, 64), (4, 64)], min_8bit_size=512)))
    assert smaller["parameters"][0]["reason"] == "fewer than 512 elements, the smallest that is quantised here"
    reasons = {each["name"]: each["reason"] for each in larger["parameters"]}
    assert reasons["p0"] == reasons["p1"] == "kept in 32 bit by an override or a larger min_8bit_size"
    assert {each["name"]: each["reason"] for each in kept["parameters"]} == {
        "p0": None, "p1": None, "p2": None, "p3": "kept in 32 bit by an override",
    }  # fmt: skip


@pytest.mark.parametrize(
    "name", ["shared.weight", "wte.weight", "x.word_embeddings.weight", "relative_attention_bias.weight"]
)
def test_trainers_rule_is_named_for_what_may_be_an_embedding(name: str, tmp_path: Path) -> None:
    state_dict = optimizer_of("adam8bit", [(64, 64), (128, 64)], keep_32bit=("p1",)).state_dict()
    state_dict["param_groups"] = [{"params": list(state_dict["state"]), "param_names": ["fc.weight", name]}]
    torch.save(state_dict, tmp_path / "o.pt")
    reasons = {each["name"]: each["reason"] for each in inspected(tmp_path / "o.pt")["parameters"]}
    assert reasons == {"fc.weight": None, name: "kept in 32 bit by an override or Trainer's rule for embeddings"}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_state_tells_the_dtype_of_the_weights_for_what_others_would_take(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    record = inspected(saved(tmp_path / "o.pt", stepped(find("adamw"), tiny_distilbert().to(dtype), OptimSpec())))
    others = {row["name"]: row["state_bytes"] for row in record["alternatives"]}
    assert others == {
        "adamw": 557_992, "adafactor": 19_280, "adam8bit": 295_648, "adamw4bit": others["adamw4bit"],
        "lion8bit": 147_824, "sgd": 0,
    }  # fmt: skip
    assert not [note for note in record["notes"] if "dtype" in note]


def test_what_others_would_take_is_what_estimate_says(distilbert: Path, tmp_path: Path) -> None:
    record = inspected(saved(tmp_path / "o.pt", stepped(find("adafactor"), tiny_distilbert(), OptimSpec())))
    names = [row["name"] for row in record["alternatives"]]
    flags = [flag for name in names for flag in ("--optim", name)]
    estimate = effcli("estimate", distilbert, *flags, "--json").record
    assert {row["name"]: row["state_bytes"] for row in estimate["optimizers"]} == {
        row["name"]: row["state_bytes"] for row in record["alternatives"]
    }


def test_of_optimizers_that_keep_the_same_all_are_named_where_nothing_tells_them_apart(tmp_path: Path) -> None:
    states = {0: {"step": torch.tensor(1.0), "exp_avg": torch.ones(4, 3), "exp_avg_sq": torch.ones(4, 3)}}
    record = inspected(state_of(tmp_path / "o.pt", states, lr=1e-3))
    assert (record["optimizer"], *record["also_fits"])[:3] == ("adamw", "adam", "radam")
    assert "nothing that was saved tells them apart" in record["resemblance"]


def test_a_layout_alone_is_no_evidence_against_the_settings_beside_it(tmp_path: Path) -> None:
    states = {0: {"step": 1, "exp_avg": torch.ones(4, 3), "exp_avg_sq": torch.ones(4, 3)}}
    record = inspected(state_of(tmp_path / "o.pt", states, lr=1e-3, bias_correction=True, fused_by="someone"))
    assert record["optimizer"] is None
    assert "galore-adamw" in record["resemblance"]
    assert "the parameter groups are of another one" in record["resemblance"]


def test_an_unknown_layout_is_not_guessed_but_its_keys_and_what_others_would_take_are_told(tmp_path: Path) -> None:
    record = inspected(state_of(tmp_path / "o.pt", {0: {"memory": torch.ones(64, 64), "count": torch.tensor(1.0)}}))
    assert record["optimizer"] is None
    assert "memory, count" in record["resemblance"]
    assert record["state_bytes"] == 4 * 4096 + 4
    assert {"name": "adamw", "state_bytes": 8 * 4096 + 4} in record["alternatives"]


def test_a_state_that_tells_no_shape_has_no_alternatives(tmp_path: Path) -> None:
    record = inspected(state_of(tmp_path / "o.pt", {0: {"one": torch.ones(64), "two": torch.ones(63, 2)}}))
    assert record["optimizer"] is None
    assert record["parameters"][0]["shape"] is None
    assert record["alternatives"] == []
    assert "does not tell the parameter's shape" in record["resemblance"]


@pytest.mark.parametrize(("momentum", "optimizer"), [(0.0, "sgd"), (0.9, None)])
def test_without_state_only_sgd_without_momentum_can_be_told(
    momentum: float, optimizer: str | None, tmp_path: Path
) -> None:
    live = torch.optim.SGD([torch.nn.Parameter(torch.ones(3))], lr=0.1, momentum=momentum)
    record = inspected(saved(tmp_path / "o.pt", live))
    assert record["state_bytes"] == 0
    assert record["optimizer"] == optimizer
    assert "there is no state" in record["resemblance"]


@pytest.mark.parametrize("name", ["LARS", "PID", "SGDW", "Tiger", "EmoLynx", "ScheduleFreeRAdam"])
def test_an_optimizer_that_is_not_listed_is_not_taken_for_one_that_keeps_the_same(name: str, tmp_path: Path) -> None:
    parameter = torch.nn.Parameter(torch.ones(64, 64))
    optimizer = getattr(pytest.importorskip("pytorch_optimizer"), name)([parameter], lr=0.1)
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert inspected(saved(tmp_path / "o.pt", optimizer))["optimizer"] is None


@pytest.mark.parametrize(
    ("vectors", "moment", "shape"),
    [
        ((8, 8), (8, 8), [8, 8]), ((8, 8), (16, 8), [16, 8]), ((8, 8), (8, 16), [8, 16]), ((2, 8), (16, 2), [16, 8]),
        ((8, 2), (2, 16), [8, 16]), ((2, 8), (8, 2), [8, 8]), ((3, 8), (5, 7), None),
    ],
    ids=str,
)  # fmt: skip
def test_a_projected_state_tells_the_shape_of_its_parameter(
    vectors: tuple[int, ...], moment: tuple[int, ...], shape: list[int] | None, tmp_path: Path
) -> None:
    state = {"step": 1, "projector": torch.ones(vectors), "exp_avg": torch.ones(moment)}
    record = inspected(state_of(tmp_path / "o.pt", {0: state}))
    assert record["parameters"][0]["shape"] == shape
