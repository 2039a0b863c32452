"""Every registry entry: the state predicted from shapes is the state that the real class allocates, key by key."""

from __future__ import annotations

import ast
import importlib.util
import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from effcli.engines.checkpoint import CheckpointStore, restore
from effcli.measure.optimizer_size import inspect_optimizer
from effcli.memory.state import predict_state
from effcli.models.build import parameter_infos
from effcli.optim.entry import Hyper, OptimizerEntry
from effcli.optim.groups import decay_groups
from effcli.optim.hyper import default_hyper, resolve_hyper
from effcli.optim.overrides import hyper_for
from effcli.optim.registry import entries, find
from effcli.spec import OptimSpec
from effcli.units import DTYPE_BYTES, ParamInfo, Role
from tests.checkpoints import progress_after
from tests.tiny_models import set_gradients, stepped

SHAPES = {
    "one": (1,),
    "scalar": (),
    "n4095": (4095,),
    "n4096": (4096,),
    "n4097": (4097,),
    "m63x64": (63, 64),
    "m64x64": (64, 64),
    "m65x64": (65, 64),
    "m1x32": (1, 32),
    "slices": (8, 16, 32),
    "convolution": (4, 3, 3, 3),
    "large_convolution": (32, 16, 3, 3),
    "tied": (66, 64),
    "frozen": (70, 70),
}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FORMULA_FALLS_SHORT = {("stable-adamw", "float16"): "its second moment is float32, and w does not tell fp16 from bf16"}
VARIANTS = [
    ("adamw", OptimSpec(args={"amsgrad": True})),
    ("adam-amsgrad", OptimSpec(args={"amsgrad": False})),
    ("sgd", OptimSpec(args={"momentum": 0.9})),
    ("sgd-momentum", OptimSpec(args={"nesterov": True})),
    ("rmsprop", OptimSpec(args={"momentum": 0.9})),
    ("rmsprop", OptimSpec(args={"centered": True})),
    ("rmsprop", OptimSpec(args={"momentum": 0.9, "centered": True})),
    ("adafactor", OptimSpec(beta1=0.9)),
    ("adafactor", OptimSpec(beta1=0.0)),
    ("adafactor", OptimSpec(args={"relative_step": True})),
    ("adam8bit", OptimSpec(min_8bit_size=1)),
    ("adam8bit", OptimSpec(min_8bit_size=100_000)),
    ("adamw8bit", OptimSpec(keep_32bit=("slices", "m6*"))),
    ("adamw8bit", OptimSpec(optim_bits=32)),
    ("lion32bit", OptimSpec(optim_bits=8)),
    ("lamb32bit", OptimSpec(args={"max_unorm": 0})),
    ("lars8bit", OptimSpec(args={"max_unorm": 0.5})),
    ("adamw8bit-ao", OptimSpec(args={"block_size": 64})),
    ("adamw4bit", OptimSpec(args={"block_size": 32})),
    ("galore-adamw", OptimSpec(args={"rank": 16})),
    *(("galore-adamw", OptimSpec(args={"rank": 16, "proj_type": side})) for side in ("reverse_std", "left", "full")),
    ("stable-adamw", OptimSpec(args={"kahan_sum": False})),
]

each_entry = pytest.mark.parametrize("entry", entries(), ids=lambda entry: entry.name)


class AwkwardModel(torch.nn.Module):
    """A parameter of each shape; one has two names, one is frozen, one is an embedding and so not hidden."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        for case, shape in SHAPES.items():
            self.register_parameter(case, torch.nn.Parameter(torch.randn(shape).to(dtype)))
        self.embedding = torch.nn.Embedding(67, 64, dtype=dtype)
        self.second_name = self.tied
        self.frozen.requires_grad_(False)


def installed() -> list[OptimizerEntry]:
    return [e for e in entries() if e.package is None or importlib.util.find_spec(e.package) is not None]


def need(entry: OptimizerEntry) -> None:
    """Skip the test where the entry's package is missing."""
    if entry not in installed():
        pytest.skip(f"{entry.package} is not installed: pip install {entry.pip}")


def plain_tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield every tensor inside, whether in a wrapper tensor, a container or an object, in the plainest way."""
    if isinstance(value, torch.Tensor) and hasattr(value, "__tensor_flatten__"):
        value = [getattr(value, name) for name in value.__tensor_flatten__()[0]]
    if isinstance(value, torch.Tensor):
        yield value
        return
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else None
    for one in vars(value).values() if inner is None and hasattr(value, "__dict__") else inner or ():
        yield from plain_tensors(one)


def plain_bytes(value: Any) -> int:
    return sum(tensor.untyped_storage().nbytes() for tensor in plain_tensors(value))


def plain_elements(value: Any) -> int:
    return value.numel() if isinstance(value, torch.Tensor) else sum(t.numel() for t in plain_tensors(value)) or 1


def formula_bytes(entry: OptimizerEntry, info: ParamInfo, hyper: Hyper) -> int:
    """Return the value of the entry's formula for one parameter."""
    names = {
        "n": math.prod(info.shape),
        "w": DTYPE_BYTES[info.dtype],
        "dims": len(info.shape),
        "rows": math.prod(info.shape[:-1]),
        "columns": math.prod(info.shape[:-2]) * math.prod(info.shape[-1:]),
        "hidden": info.hidden,
        "ceil": math.ceil,
        "min": min,
        "max": max,
    }
    return eval(entry.formula, {"__builtins__": {}}, {**hyper, **names})


def check(entry: OptimizerEntry, spec: OptimSpec, model: torch.nn.Module) -> tuple[str, ...]:
    """Compare law, formula and measurement; return the names of the parameters that were compared."""
    hyper = resolve_hyper(entry, spec)
    optimizer = stepped(entry, model, spec)
    for _ in range(2):  # a later update allocates nothing more
        predicted, measured = predict_state(entry, parameter_infos(model), hyper), inspect_optimizer(optimizer)
        assert predicted.tensors == measured.tensors
        assert predicted.state_bytes == measured.state_bytes
        assert predicted.state_elements == measured.state_elements
        assert {name: b for name, b in predicted.by_parameter.items() if b} == {
            name: b for name, b in measured.by_parameter.items() if b
        }
        assert predicted.shared_bytes == measured.shared_bytes
        assert sum(predicted.by_parameter.values()) + predicted.shared_bytes == predicted.state_bytes
        assert sum(predicted.placements.values()) == predicted.state_bytes
        optimizer.step()
    for info, param in zip(parameter_infos(model), model.parameters(), strict=True):
        own_hyper, state = hyper_for(info.name, hyper), optimizer.state.get(param, {})
        layout = entry.state_layout(info, own_hyper) if info.trainable else ()
        shared = {tensor.key for tensor in layout if tensor.shared}
        held = {key: value for key, value in state.items() if key not in shared and value is not None}
        own = {key: [tensor for tensor in layout if tensor.key == key] for key in dict.fromkeys(t.key for t in layout)}
        sizes = [(key, sum(t.num_bytes for t in parts)) for key, parts in own.items() if key not in shared]
        assert sizes == [(key, plain_bytes(value)) for key, value in held.items()]
        for key, value in held.items():
            constant = all(tensor.role is Role.QUANTISATION for tensor in own[key])
            assert sum(tensor.num_elements for tensor in own[key]) == (0 if constant else plain_elements(value)), key
        if info.trainable:
            agrees = formula_bytes(entry, info, own_hyper) == sum(plain_bytes(value) for value in held.values())
            assert agrees is ((entry.name, info.dtype) not in FORMULA_FALLS_SHORT), info.name
    return tuple(name for name, _ in model.named_parameters())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@each_entry
def test_predicted_state_is_the_measured_state_for_every_awkward_shape(
    entry: OptimizerEntry, dtype: torch.dtype
) -> None:
    need(entry)
    torch.manual_seed(0)
    assert len(check(entry, OptimSpec(name=entry.name), AwkwardModel(dtype))) == 15


def test_2430_combinations_of_entry_dtype_and_shape_are_walked() -> None:
    packages = Counter(entry.package for entry in entries())
    assert packages == {
        None: 15, "bitsandbytes": 26, "pytorch_optimizer": 6, "torchao": 3, "schedulefree": 2, "transformers": 1,
        "galore_torch": 1,
    }  # fmt: skip
    assert packages.total() * len(DTYPES) * 15 == 54 * 3 * 15 == 2_430


def test_every_option_that_a_formula_names_has_a_variant() -> None:
    named = {node.id for e in entries() for node in ast.walk(ast.parse(e.formula)) if isinstance(node, ast.Name)}
    options = {name for entry in entries() for name in default_hyper(entry)}
    given = {name for _, spec in VARIANTS for name in (*spec.args, *spec.model_fields_set)}
    assert named & options <= given


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("name", "spec"), VARIANTS, ids=lambda value: value if isinstance(value, str) else "")
def test_predicted_state_is_the_measured_state_for_the_options_that_change_it(
    name: str, spec: OptimSpec, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    check(find(name), spec, AwkwardModel(dtype))


def test_a_parameter_listed_twice_has_one_state_and_one_update() -> None:
    for entry in installed():
        moved = []
        for times in (1, 2):
            param = torch.nn.Parameter(torch.ones(64, 64))
            param.grad = torch.linspace(-1, 1, 4096).view(64, 64)
            group = {"params": [param] * times, "names": ["w"] * times, "hidden": [True] * times, "weight_decay": 0.0}
            optimizer = entry.build([group, dict(group)], resolve_hyper(entry, OptimSpec(name=entry.name)))
            optimizer.step()
            moved.append(param.detach())
            assert len(inspect_optimizer(optimizer).by_parameter) <= 1, entry.name
        assert torch.equal(*moved), entry.name


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    entry=st.sampled_from(installed()),
    shape=st.lists(st.integers(1, 70), max_size=3).filter(lambda sides: math.prod(sides) <= 40_000),
    dtype=st.sampled_from(DTYPES),
)
def test_predicted_state_is_the_measured_state_for_any_shape(
    entry: OptimizerEntry, shape: list[int], dtype: torch.dtype
) -> None:
    model = torch.nn.Module()
    model.weight = torch.nn.Parameter(torch.ones(shape, dtype=dtype))
    check(entry, OptimSpec(name=entry.name), model)


@each_entry
def test_a_step_moves_the_weights_and_a_frozen_one_stays(entry: OptimizerEntry) -> None:
    need(entry)
    torch.manual_seed(0)
    model = AwkwardModel(torch.float32)
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    stepped(entry, model, OptimSpec(name=entry.name))
    for name, param in model.named_parameters():
        assert torch.equal(param, before[name]) is (name == "frozen"), name


def no_schedule(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda update: 1.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@each_entry
def test_a_resumed_optimizer_has_the_same_size_and_makes_the_same_next_step(
    entry: OptimizerEntry, dtype: torch.dtype, tmp_path: Path
) -> None:
    need(entry)
    torch.manual_seed(0)
    spec = OptimSpec(name=entry.name)
    model, fresh_model = AwkwardModel(dtype), AwkwardModel(dtype)
    optimizer = stepped(entry, model, spec)
    store = CheckpointStore(tmp_path, keep=1)
    path = store.save(progress_after(1), model=model, optimizer=optimizer, scheduler=no_schedule(optimizer))

    fresh = entry.build(decay_groups(fresh_model, spec.weight_decay), resolve_hyper(entry, spec))
    restore(path, model=fresh_model, optimizer=fresh, scheduler=no_schedule(fresh))
    assert inspect_optimizer(fresh) == inspect_optimizer(optimizer)
    for each, its_optimizer in ((model, optimizer), (fresh_model, fresh)):
        torch.manual_seed(1)
        set_gradients(each)
        its_optimizer.step()
    for (name, param), resumed in zip(model.named_parameters(), fresh_model.parameters(), strict=True):
        assert torch.equal(param, resumed), name
    assert inspect_optimizer(fresh) == inspect_optimizer(optimizer)
