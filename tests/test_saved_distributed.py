"""Distributed checkpoints of torch: sizes without data, names, values from the shards, nothing run."""

from __future__ import annotations

import os
import pickle
import socket
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

from effcli.errors import DataError
from effcli.measure.optimizer_size import inspect_optimizer, inspect_states
from effcli.saved import read_saved, values_of
from tests.checkpoints import Trap

# torch's own writer warns of its own functions (2.13).
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning")


def trained() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.Linear(4, 3))
    groups = [{"params": model[0].parameters(), "lr": 0.5}, {"params": model[1].parameters(), "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups)
    model(torch.randn(2, 5)).sum().backward()
    optimizer.step()
    return model, optimizer


def write(folder: Path, *, flat: bool = False, nested: bool = True, **more: Any) -> torch.optim.Optimizer:
    model, optimizer = trained()
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    state = get_optimizer_state_dict(model, optimizer, options=options)
    dcp.save({"optimizer": state, **more} if nested else state, checkpoint_id=folder, no_dist=True)
    return optimizer


@pytest.mark.parametrize("flat", [False, True], ids=["nested", "flattened"])
@pytest.mark.parametrize("nested", [False, True], ids=["at the top", "under optimizer"])
def test_sizes_names_groups_and_values_are_the_live_ones(flat: bool, nested: bool, tmp_path: Path) -> None:
    optimizer = write(tmp_path, flat=flat, nested=nested)
    found = read_saved(tmp_path)
    assert (found.format, found.path, found.shards) == ("torch distributed checkpoint", tmp_path, 1)
    names = ["0.weight", "0.bias", "1.weight", "1.bias"]
    params = [param for group in optimizer.param_groups for param in group["params"]]
    named = dict(zip(params, names, strict=True))
    size = inspect_states(found.states.items())
    assert size == inspect_optimizer(optimizer, named)
    assert found.names_known
    if not flat:  # flattened, groups are told apart by their settings alone, and these differ
        assert found.members == (("0.weight", "0.bias"), ("1.weight", "1.bias"))
        assert [group["lr"] for group in found.groups] == [0.5, 1e-3]
    assert [group["weight_decay"] for group in found.groups][-1] == 0.0
    assert all(tensor.is_meta for state in found.states.values() for tensor in state.values())
    shown = {(each.parameter, each.key): each for each in values_of(found, "*")}
    for param, name in named.items():
        for key, tensor in optimizer.state[param].items():
            each = shown[name, key]
            assert each.first == tuple(tensor.flatten()[:6].tolist())
            assert (each.minimum, each.maximum) == (tensor.min().item(), tensor.max().item())


def test_the_folder_its_metadata_and_a_data_file_all_name_it(tmp_path: Path) -> None:
    write(tmp_path / "optimizer_0")
    (tmp_path / "trainer_state.json").write_text("{}")
    inside = tmp_path / "optimizer_0"
    sizes = {inspect_states(read_saved(path).states.items()).state_bytes for path in
             (tmp_path, inside, inside / ".metadata", inside / "__0_0.distcp")}  # fmt: skip
    assert len(sizes) == 1
    assert read_saved(tmp_path).format == "Trainer checkpoint"


@pytest.mark.parametrize("flat", [False, True], ids=["nested", "flattened"])
def test_an_optimizer_without_state_is_known_by_its_groups(flat: bool, tmp_path: Path) -> None:
    model, _ = trained()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    optimizer.step()
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    dcp.save(
        {"optimizer": get_optimizer_state_dict(model, optimizer, options=options)}, checkpoint_id=tmp_path, no_dist=True
    )
    found = read_saved(tmp_path)
    assert inspect_states(found.states.items()).state_bytes == 0
    assert [group["lr"] for group in found.groups] == [0.25]


@pytest.mark.parametrize("flat", [False, True], ids=["nested", "flattened"])
@pytest.mark.parametrize("nested", [False, True], ids=["at the top", "under optimizer"])
def test_a_module_may_be_called_as_a_part_of_an_optimizer(flat: bool, nested: bool, tmp_path: Path) -> None:
    model = torch.nn.ModuleDict({"state": torch.nn.Linear(3, 2), "param_groups": torch.nn.Linear(2, 2)})
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    state = get_optimizer_state_dict(model, optimizer, options=options)
    dcp.save({"optimizer": state} if nested else state, checkpoint_id=tmp_path, no_dist=True)
    found = read_saved(tmp_path)
    assert set(found.states) == {name for name, _ in model.named_parameters()}
    assert inspect_states(found.states.items()).state_bytes == inspect_optimizer(optimizer).state_bytes


def test_weights_beside_it_are_left_out_and_weights_alone_are_no_optimizer(tmp_path: Path) -> None:
    model, _ = trained()
    write(tmp_path / "both", model=model.state_dict() | {"state.inner.weight": torch.ones(9)})
    assert len(read_saved(tmp_path / "both").states) == 4
    dcp.save({"state.inner.weight": torch.ones(9)}, checkpoint_id=tmp_path / "weights", no_dist=True)
    with pytest.raises(DataError, match="holds no optimizer state: it holds weights, 1 tensor"):
        read_saved(tmp_path / "weights")


def test_sizes_need_no_data_and_values_say_what_is_missing(tmp_path: Path) -> None:
    optimizer = write(tmp_path)
    data = tmp_path / "__0_0.distcp"
    whole = data.read_bytes()
    for content, note, said in (
        (whole[: len(whole) // 2], "Incomplete: a data file cut short.", "is cut short"),
        (whole[:-600], "Incomplete: a data file cut short.", "is cut short"),
        (None, "Incomplete: 1 of 1 data file missing.", "is missing, though"),
    ):
        data.unlink() if content is None else data.write_bytes(content)
        found = read_saved(tmp_path)
        assert inspect_states(found.states.items()).state_bytes == inspect_optimizer(optimizer).state_bytes
        assert found.notes[0].startswith(note)
        with pytest.raises(DataError, match=said):
            list(values_of(found, "*"))


def test_parts_far_into_large_files_are_read_as_what_they_are(tmp_path: Path) -> None:
    """Offset and length of a part are two numbers: their product says nothing."""
    optimizer = write(tmp_path)
    path = tmp_path / ".metadata"
    metadata = dcp.FileSystemReader(tmp_path).read_metadata()
    moved = {
        index: replace(place, offset=place.offset + (30 << 30), length=500 << 20) if "exp_avg" in index.fqn else place
        for index, place in metadata.storage_data.items()
    }
    os.truncate(tmp_path / "__0_0.distcp", 40 << 30)
    path.write_bytes(pickle.dumps(replace(metadata, storage_data=moved)))
    found = read_saved(tmp_path)
    assert inspect_states(found.states.items()).state_bytes == inspect_optimizer(optimizer).state_bytes
    assert found.notes == ()


def test_hostile_metadata_is_refused_and_leads_nowhere_else(tmp_path: Path) -> None:
    write(tmp_path / "good")
    marker, bad = tmp_path / "marker", tmp_path / "bad"
    bad.mkdir()
    (bad / ".metadata").write_bytes(pickle.dumps(Trap(marker)))
    with pytest.raises(DataError, match=r"it asks to run '(pathlib\.Path\.touch|builtins\.getattr)'"):
        read_saved(bad)
    assert not marker.exists()
    whole = (tmp_path / "good" / ".metadata").read_bytes()
    (tmp_path / "x_0.distcp").write_bytes((tmp_path / "good" / "__0_0.distcp").read_bytes())
    (bad / ".metadata").write_bytes(whole.replace(b"__0_0.distcp", b"../x_0.distc"))
    with pytest.raises(DataError, match="is not the metadata of a distributed checkpoint"):
        read_saved(bad)
    for content in (b"", b"text", pickle.dumps({"a": 1}), whole[:-20]):
        (bad / ".metadata").write_bytes(content)
        with pytest.raises(DataError):
            read_saved(bad)


def test_a_setting_that_calls_is_refused(tmp_path: Path) -> None:
    model, optimizer = trained()
    state = get_optimizer_state_dict(model, optimizer)
    state["param_groups"][0]["lr"] = Trap(tmp_path / "marker")
    dcp.save({"optimizer": state}, checkpoint_id=tmp_path / "out", no_dist=True)
    with pytest.raises(DataError, match="it asks to run"):
        read_saved(tmp_path / "out")
    assert not (tmp_path / "marker").exists()


WORKER = """
import sys, torch, warnings
import torch.distributed as dist, torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

warnings.simplefilter("ignore")
dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.Linear(5, 3))
fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.25)
model(torch.ones(2, 7)).sum().backward()
optimizer.step()
dcp.save({"optimizer": get_optimizer_state_dict(model, optimizer)}, checkpoint_id=sys.argv[1])
if dist.get_rank() == 0:
    whole = {n: p.grad for n, p in model.named_parameters()}
torch.save(optimizer.state_dict(), f"{sys.argv[1]}/rank{dist.get_rank()}.pt")
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_two_processes_of_fsdp_write_shards_that_add_up(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    (tmp_path / "worker.py").write_text(textwrap.dedent(WORKER))
    shared = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2"}
    command = [sys.executable, str(tmp_path / "worker.py"), str(tmp_path / "out")]
    workers = [subprocess.Popen(command, env=shared | {"RANK": str(rank)}) for rank in range(2)]
    assert [worker.wait(timeout=120) for worker in workers] == [0, 0]
    found = read_saved(tmp_path / "out")
    size = inspect_states(found.states.items())
    assert (found.shards, size.state_elements) == (2, 2 * (40 + 18) + 4)
    assert size.state_bytes == 4 * size.state_elements
    assert list(found.states) == ["0.weight", "0.bias", "1.weight", "1.bias"]
    own = [read_saved(tmp_path / "out" / f"rank{rank}.pt") for rank in range(2)]
    held = [inspect_states(part.states.items()).tensors["exp_avg"].bytes for part in own]
    assert sum(held) == size.tensors["exp_avg"].bytes
    assert "torch.distributed.tensor.DTensor" in own[0].notes[0]
    assert own[0].notes[1].startswith("One rank's part of sharded tensors")
    shown = {(each.parameter, each.key): each for each in values_of(found, "*.exp_avg")}
    parts = [{(each.parameter, each.key): each for each in values_of(part, "*.exp_avg*")} for part in own]
    for position, name in enumerate(found.states):
        both = [part[str(position), "exp_avg._local_tensor"] for part in parts]
        ends = [each for each in both if each.minimum is not None]
        assert shown[name, "exp_avg"].minimum == min(each.minimum for each in ends)
        assert shown[name, "exp_avg"].maximum == max(each.maximum for each in ends)
        assert shown[name, "exp_avg"].first == (both[0].first + both[1].first)[:6]
