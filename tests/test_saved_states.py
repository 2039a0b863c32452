"""Saved optimizer states: the same amounts and values as live, from every layout of file."""

from __future__ import annotations

import math
import pickle
from argparse import Namespace
from collections import Counter, OrderedDict, defaultdict, deque
from datetime import datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from effcli.errors import DataError
from effcli.measure.inspection_record import SavedValues
from effcli.measure.optimizer_size import inspect_optimizer, inspect_states
from effcli.optim.registry import entries, find
from effcli.saved import SavedOptimizer, read_saved, values_of
from effcli.spec import OptimSpec
from effcli.storage import leaves
from tests.tiny_models import stepped, tiny_gpt2


def saved(state_dict: Any, path: Path, **options: Any) -> SavedOptimizer:
    torch.save(state_dict, path, **options)
    return read_saved(path)


def adamw(**options: Any) -> torch.optim.Optimizer:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.Linear(4, 3))
    decayed, others = ([p for p in model.parameters() if (p.dim() > 1) is big] for big in (True, False))
    optimizer = torch.optim.AdamW([{"params": decayed, "lr": 0.5}, {"params": others, "weight_decay": 0.0}], **options)
    model(torch.randn(2, 5)).sum().backward()
    optimizer.step()
    return optimizer


def values(found: SavedOptimizer, pattern: str) -> dict[str, SavedValues]:
    return {f"{each.parameter}.{each.key}": each for each in values_of(found, pattern)}


@pytest.mark.parametrize("name", [entry.name for entry in entries()])
def test_every_optimizers_state_counts_the_same_saved_as_live(name: str, tmp_path: Path) -> None:
    optimizer = stepped(find(name), tiny_gpt2(), OptimSpec(name=name))
    live, numbered = inspect_optimizer(optimizer), optimizer.state_dict()
    for options in ({}, {"_use_new_zipfile_serialization": False}):
        found = saved(numbered, tmp_path / "optimizer.pt", **options)
        assert found.names_known
        size = inspect_states(found.states.items())
        assert (size.tensors, size.dtypes, size.num_tensors) == (live.tensors, live.dtypes, live.num_tensors)
        assert (size.by_parameter, size.shared_bytes) == (live.by_parameter, live.shared_bytes)


@pytest.mark.parametrize("options", [{}, {"_use_new_zipfile_serialization": False}, {"pickle_protocol": 4}], ids=str)
def test_tensors_are_those_that_torch_loads(options: dict[str, Any], tmp_path: Path) -> None:
    torch.manual_seed(0)
    base = torch.randn(6, 5)
    widths = (torch.bfloat16, torch.float16, torch.float64, torch.int8, torch.uint8, torch.int64, torch.bool)
    state = {
        "transposed": base.t(), "row": base[2], "same": base, "expanded": torch.tensor([3.0]).expand(4, 2),
        "empty": torch.empty(0, 3), "lone": torch.tensor(7), "parameter": torch.nn.Parameter(torch.ones(2)),
        "narrow": torch.randn(3).to(torch.float8_e4m3fn), "unsigned": torch.tensor([1, 60_000], dtype=torch.uint16),
        "complex": torch.randn(3, dtype=torch.complex64), "meta": torch.empty(3, device="meta"),
        **{str(width): (torch.randn(8) * 9).to(width) for width in widths},
    }  # fmt: skip
    if "_use_new_zipfile_serialization" in options:
        del state["unsigned"], state["narrow"]  # torch does not read its own file of them
    path = tmp_path / "x.pt"
    found = saved({"state": {0: state}, "param_groups": [{"params": [0]}]}, path, **options).states["0"]
    loaded = torch.load(path, weights_only=False)["state"][0]
    assert found.keys() == loaded.keys()
    for key, tensor in loaded.items():
        ours = found[key]
        assert (ours.shape, ours.stride(), ours.dtype) == (tensor.shape, tensor.stride(), tensor.dtype), key
        assert tensor.is_meta or ours.tolist() == tensor.tolist(), key
    same = {ours.untyped_storage().data_ptr() for ours in (found["transposed"], found["row"], found["same"])}
    assert len(same) == 1


def test_a_tensor_of_many_small_dimensions_is_read(tmp_path: Path) -> None:
    """Strides are bounded one by one: those of twelve sides of 2 multiply to 2**66."""
    many = torch.arange(2.0**12).reshape((2,) * 12)
    found = saved({"state": {0: {"momentum_buffer": many}}, "param_groups": [{"params": [0]}]}, tmp_path / "o.pt")
    assert torch.equal(found.states["0"]["momentum_buffer"], many)


@pytest.mark.filterwarnings("ignore:Sparse (CSR|CSC) tensor support")
@pytest.mark.parametrize("layout", ["to_sparse", "to_sparse_csr", "to_sparse_csc"])
def test_sparse_states_count_the_same_saved_as_live(layout: str, tmp_path: Path) -> None:
    live = {"m": getattr(torch.eye(4, 3), layout)()}
    found = saved({"state": {0: live}, "param_groups": [{"params": [0]}]}, tmp_path / "o.pt")
    counted, wanted = inspect_states(found.states.items()), inspect_states([("0", live)])
    assert (counted.state_bytes, counted.state_elements) == (wanted.state_bytes, wanted.state_elements)


def test_groups_are_plain_and_names_come_from_the_groups_or_the_keys(tmp_path: Path) -> None:
    optimizer = adamw()
    state_dict = optimizer.state_dict()
    found = saved(state_dict, tmp_path / "a.pt")
    assert not found.names_known
    assert found.members == (("0", "1"), ("2", "3"))
    assert [group["lr"] for group in found.groups] == [0.5, 1e-3]
    assert "params" not in found.groups[0]
    model = torch.nn.Linear(3, 2)
    named = torch.optim.SGD(model.named_parameters(), lr=torch.tensor(0.25), momentum=0.9)
    model(torch.ones(1, 3)).sum().backward()
    named.step()
    found = saved(named.state_dict(), tmp_path / "b.pt")
    assert (found.names_known, found.members) == (True, (("weight", "bias"),))
    assert list(found.states) == ["weight", "bias"]
    assert found.groups[0]["lr"] == 0.25
    by_name = {"state": {"w": {"m": torch.ones(2)}}, "param_groups": [{"params": ["w"], "lr": np.float64(0.5)}]}
    found = saved(by_name, tmp_path / "c.pt")
    assert (found.names_known, found.members, found.groups) == (True, (("w",),), ({"lr": 0.5},))


def test_names_that_tell_nothing_apart_are_left_out(tmp_path: Path) -> None:
    group = {"params": [0, 1], "param_names": ["w", "w"]}
    found = saved(
        {"state": {0: {"m": torch.ones(2)}, 1: {"m": torch.ones(3)}}, "param_groups": [group]}, tmp_path / "a"
    )
    assert (found.names_known, found.members, list(found.states)) == (False, (("0", "1"),), ["0", "1"])


@pytest.mark.parametrize(
    "wrap",
    [
        lambda state: {"model": {"w": torch.ones(3)}, "optimizer": state, "epoch": 3},
        lambda state: {"optimizer_state_dict": state, "rng": np.random.default_rng(0).bit_generator.state},
        lambda state: {"state_dict": OrderedDict(w=torch.ones(2)), "optimizer_states": [state], "callbacks": {}},
        lambda state: [{"deeper": {"optim": state}}],
    ],
)
def test_an_optimizer_is_found_inside_what_trainers_save(wrap: Any, tmp_path: Path) -> None:
    optimizer = adamw()
    found = saved(wrap(optimizer.state_dict()), tmp_path / "last.ckpt")
    assert inspect_states(found.states.items()) == inspect_optimizer(optimizer)


def test_settings_of_many_kinds_beside_the_state_are_no_hindrance(tmp_path: Path) -> None:
    more = {
        "args": Namespace(lr=0.1, path=tmp_path), "when": datetime(2030, 1, 31), "seen": {1, (2, 3)}, "raw": b"\xff",
        "counts": Counter("aab"), "by": defaultdict(list, a=[1]), "last": deque([1, 2], maxlen=3), "z": 1 + 2j,
        "seed": np.random.RandomState(0).get_state(), "bits": np.array([[True]]), "device": torch.device("cuda", 1),
        "size": torch.Size([2]), "buffer": bytearray(b"ab"), "frozen": frozenset({1}), "big": 1 << 70, "none": None,
        "exact": Decimal("0.1"), "both": (1, [2]),
    }  # fmt: skip
    optimizer = adamw()
    for protocol in (2, 5):
        optimizer.param_groups[0]["more"] = [np.float32(0.5), np.arange(3), (1, {"a": None})]
        found = saved(more | {"optimizer": optimizer.state_dict()}, tmp_path / "o.ckpt", pickle_protocol=protocol)
        assert found.groups[0]["more"] == [0.5, "array", (1, {"a": None})]
        assert found.notes == ("Read as what they store, without their classes: argparse.Namespace.",)


def test_of_several_optimizers_the_first_is_taken_and_the_path_names_another(tmp_path: Path) -> None:
    path, first, second = tmp_path / "gan.pt", adamw(), torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=3.0)
    found = saved({"optimizers": {"g": first.state_dict(), "d": second.state_dict()}}, path)
    assert len(found.states) == 4
    (note,) = found.notes
    assert "2 optimizers: 'optimizers.g', 'optimizers.d'" in note
    assert read_saved(Path(f"{path}::optimizers.d")).groups[0]["lr"] == 3.0
    with pytest.raises(DataError, match=r"no optimizer under .x.; it has .optimizers\.g."):
        read_saved(Path(f"{path}::x"))


def test_a_plain_object_in_a_state_is_read_as_what_it_stores(tmp_path: Path) -> None:
    galore = pytest.importorskip("galore_torch")
    param = torch.nn.Parameter(torch.randn(12, 8))
    group = {"params": [param], "rank": 2, "update_proj_gap": 5, "scale": 1.0, "proj_type": "std"}
    optimizer = galore.GaLoreAdamW([group], lr=0.1, no_deprecation_warning=True)
    param.grad = torch.randn_like(param)
    optimizer.step()
    found = saved(optimizer.state_dict(), tmp_path / "o.pt")
    assert "galore_torch.galore_projector.GaLoreProjector" in found.notes[-1]
    assert type(found.states["0"]["projector"]).__name__ == "GaLoreProjector"
    assert type(found.states["0"]["projector"]) is not galore.galore_projector.GaLoreProjector
    live = inspect_optimizer(optimizer)
    assert inspect_states(found.states.items()).tensors == live.tensors
    assert live.tensors["projector"].bytes > 0


@pytest.mark.parametrize("name", ["Lookahead", "ScheduleFreeWrapper"])
def test_what_a_wrapper_keeps_around_an_optimizer_counts_too(name: str, tmp_path: Path) -> None:
    wrapper = getattr(pytest.importorskip("pytorch_optimizer"), name)
    params = [torch.nn.Parameter(torch.randn(8, 8)), torch.nn.Parameter(torch.randn(3))]
    optimizer = wrapper(torch.optim.AdamW([{"params": params[:1]}, {"params": params[1:], "lr": 0.1}]))
    if name == "ScheduleFreeWrapper":
        optimizer.train()
    for param in params:
        param.grad = torch.randn_like(param)
    optimizer.step()
    found = saved(optimizer.state_dict(), tmp_path / "o.pt")
    live, size = inspect_optimizer(optimizer), inspect_states(found.states.items())
    assert (size.tensors, size.by_parameter) == (live.tensors, live.by_parameter)
    assert size.state_bytes > 2 * 4 * (64 + 3) + 8
    assert found.notes == ()


def test_states_that_belong_to_nobody_are_all_counted(tmp_path: Path) -> None:
    state = {0: {"m": torch.ones(2)}, "0": {"m": torch.ones(3)}, (1, 2): {"m": torch.ones(5)}, (3, 4): torch.ones(7)}
    found = saved({"state": state, "param_groups": [{"params": [0]}]}, tmp_path / "o.pt")
    assert inspect_states(found.states.items()).state_bytes == 4 * (2 + 3 + 5 + 7)


def test_values_are_those_of_the_tensors(tmp_path: Path) -> None:
    optimizer = adamw()
    found = saved(optimizer.state_dict(), tmp_path / "o.pt")
    shown = values(found, "*exp_avg*")
    assert list(shown) == [f"{index}.{key}" for index in range(4) for key in ("exp_avg", "exp_avg_sq")]
    for index, state in optimizer.state_dict()["state"].items():
        each, tensor = shown[f"{index}.exp_avg"], state["exp_avg"]
        assert (each.shape, each.dtype) == (tuple(tensor.shape), "float32")
        assert each.first == tuple(tensor.flatten()[:6].tolist())
        assert (each.minimum, each.maximum) == (tensor.min().item(), tensor.max().item())
    assert list(values(found, "=1.step")) == ["1.step"]
    assert len(values(found, "0")) == 3
    assert values_of(found, "=0.step", {"0": "layer.weight"}).__next__  # a generator: nothing fits the label any more
    assert not list(values_of(found, "=0.step", {"0": "layer.weight"}))
    (each,) = values_of(found, "=layer.weight.step", {"0": "layer.weight"})
    assert (each.parameter, each.first, each.minimum, each.maximum) == ("layer.weight", (1.0,), 1.0, 1.0)


def test_values_show_what_is_not_finite_codes_as_codes_and_odd_layouts(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("effcli.saved.values.CHUNK_BYTES", 64)
    torch.manual_seed(0)
    grid = torch.randn(20, 30, 7)
    state = {
        "odd": torch.tensor([math.nan, 2.0, -math.inf, 1.0]), "nan": torch.tensor([math.nan]), "none": torch.empty(0),
        "codes": torch.tensor([0, 255, 7], dtype=torch.uint8), "half": torch.tensor([1.5, -2.0]).bfloat16(),
        "narrow": torch.tensor([0.5, -448.0]).to(torch.float8_e4m3fn), "flags": torch.tensor([True, False]),
        "huge": torch.tensor([1.0]).expand(1 << 40), "moved": grid.permute(2, 0, 1), "part": grid[3:9, ::2, 1:],
        "windows": torch.arange(10.0).as_strided((5, 4), (1, 1)), "step": 3, "big": torch.tensor([1 << 60]),
        "factors": [torch.ones(2), torch.zeros(3)], "complex": torch.tensor([3 + 4j]),
    }  # fmt: skip
    shown = values(saved({"state": {0: state}, "param_groups": [{"params": [0]}]}, tmp_path / "o.pt"), "0")
    ends = {key.removeprefix("0."): (each.minimum, each.maximum) for key, each in shown.items()}
    assert ends["odd"] == (-math.inf, 2.0)
    assert (shown["0.odd"].num_nan, shown["0.odd"].num_infinite) == (1, 1)
    assert ends["nan"] == ends["none"] == (None, None)
    assert (ends["codes"], shown["0.codes"].first) == ((0, 255), (0.0, 255.0, 7.0))
    assert (ends["half"], ends["narrow"], ends["flags"]) == ((-2.0, 1.5), (-448.0, 0.5), (0, 1))
    assert (ends["huge"], shown["0.huge"].shape) == ((1.0, 1.0), (1 << 40,))
    for key in ("moved", "part"):
        assert ends[key] == (state[key].min().item(), state[key].max().item())
        assert shown[f"0.{key}"].first == tuple(state[key].flatten()[:6].tolist())
    assert (ends["windows"], ends["step"], ends["complex"]) == ((0.0, 7.0), (3.0, 3.0), (5.0, 5.0))
    assert (ends["big"], shown["0.step"].dtype) == ((1 << 60, 1 << 60), "number")


class Operations(TorchDispatchMode):
    """Counts what torch does."""

    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("shape", [(-1,), (-1, 1), (2, -1), (1, -1)], ids=str)
def test_values_that_lie_apart_are_read_many_at_a_time(shape: tuple[int, ...], tmp_path: Path) -> None:
    tensor = torch.arange(40_000.0).view(*shape, 2)[..., 1]
    found = saved({"state": {0: {"m": tensor}}, "param_groups": [{"params": [0]}]}, tmp_path / "o.pt")
    with Operations() as operations:
        (shown,) = values_of(found, "*")
    assert (shown.minimum, shown.maximum) == (tensor.min().item(), tensor.max().item())
    assert operations.count < 100


def test_values_of_quantised_states_are_those_of_what_they_hold(tmp_path: Path) -> None:
    for name, keys in (
        ("adam8bit", ["step", "state1", "state2", "qmap1", "qmap2", "absmax1", "absmax2"]),
        (
            "adamw8bit-ao",
            ["step", *(f"{k}.{part}" for k in ("exp_avg", "exp_avg_sq") for part in ("codes", "scale", "qmap"))],
        ),
    ):
        optimizer = stepped(find(name), tiny_gpt2(), OptimSpec(name=name))
        found = saved(optimizer.state_dict(), tmp_path / "o.pt")
        shown = values(found, "=transformer.wte.weight") | values(found, "=transformer.h.0.attn.c_attn.weight")
        assert {key.removeprefix("transformer.wte.weight.") for key in shown if ".wte." in key} == set(keys)
        live = {
            f"{part}.{inner}" if part in ("exp_avg", "exp_avg_sq") else part: getattr(leaf, inner or "data")
            for part, leaf in leaves(next(iter(optimizer.state.values())), "")
            if isinstance(leaf, torch.Tensor)
            for inner in (leaf.__tensor_flatten__()[0] if type(leaf) is not torch.Tensor else [""])
        }
        for key, tensor in live.items():
            each = shown[f"transformer.wte.weight.{key}"]
            assert (each.minimum, each.maximum) == (tensor.min().item(), tensor.max().item()), key


def test_a_plain_pickle_of_numbers_is_read_and_one_of_tensors_refused(tmp_path: Path) -> None:
    path = tmp_path / "o.pkl"
    path.write_bytes(pickle.dumps({"state": {0: {"step": 3}}, "param_groups": [{"params": [0], "lr": 0.1}]}))
    assert (read_saved(path).format, read_saved(path).states) == ("plain pickle", {"0": {"step": 3}})
    path.write_bytes(pickle.dumps({"state": {0: {"m": torch.ones(2)}}, "param_groups": [{"params": [0]}]}))
    with pytest.raises(DataError, match=r"it asks to run 'torch\.storage\._load_from_bytes'"):
        read_saved(path)
