"""`inspect`: bytes, names, resemblance and reasons, against live optimizers and storages that the test counts itself."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from effcli.measure.optimizer_size import inspect_optimizer
from effcli.optim.entry import OptimizerEntry
from effcli.optim.groups import decay_groups
from effcli.optim.hyper import resolve_hyper
from effcli.optim.registry import entries, find
from effcli.spec import OptimSpec
from tests.checkpoints import Trap
from tests.commands import Result, effcli
from tests.tiny_models import set_gradients, stepped, tiny_distilbert, tiny_gpt2

EMBEDDINGS = ("distilbert.embeddings.word_embeddings.weight", "distilbert.embeddings.position_embeddings.weight")


def saved(path: Path, optimizer: torch.optim.Optimizer, *, names: bool = True) -> Path:
    """Return a file with the optimizer's `state_dict`, without `names` as upstream alone would save it."""
    state = optimizer.state_dict()
    if not names:
        own = ("names", "hidden")
        groups = [{key: value for key, value in group.items() if key not in own} for group in state["param_groups"]]
        state = {**state, "param_groups": groups}
    torch.save(state, path)
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


def optimizer_of(name: str, shapes: Iterable[tuple[int, ...]], **values: Any) -> torch.optim.Optimizer:
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
