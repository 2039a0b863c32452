"""Where optimizer state lies, and what torch's CUDA allocator counts for it: laws against tensors of real steps."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch

from effcli.memory.state import StateSummary, paged_notes, predict_state
from effcli.models.build import parameter_infos
from effcli.optim.groups import decay_groups
from effcli.optim.hyper import default_hyper, resolve_hyper
from effcli.optim.registry import entries, find
from effcli.pipeline.build import build
from effcli.pipeline.facts import planned_record
from effcli.pipeline.prepare import prepare
from effcli.pipeline.run_plan import RunPlanner
from effcli.pipeline.subjects import target
from effcli.report.progress import QuietProgress
from effcli.spec import OptimSpec, build_spec
from effcli.units import ParamInfo, Placement
from tests.commands import TINY_DISTILBERT, csv_file, effcli, model_folder
from tests.test_optim_laws import VARIANTS, need
from tests.tiny_models import stepped

BLOCK = 512
"""What torch's CUDA allocator rounds every tensor up to (kMinBlockSize in c10/cuda/CUDACachingAllocator.h)."""
SHAPES = ((1,), (129,), (4096,), (4097,), (63, 64), (64, 64), (66, 64), (8, 16, 32), (320, 320), (300, 340))
CASES = [(entry.name, OptimSpec(name=entry.name)) for entry in entries()] + [
    (name, spec.model_copy(update={"name": name})) for name, spec in VARIANTS if not spec.keep_32bit
]
ON_THE_HOST = {
    "bitsandbytes": frozenset[str](),  # its step is a Python number
    "torchao": frozenset({"step"}),  # torch.tensor(0.0) in the step of torchao/optim/adam.py
}
"""Packages whose optimizers cannot step without values -> keys of tensors that they make on the host."""


def model_of(device: str) -> torch.nn.Module:
    """Return parameters of awkward sizes: below, at and above what is quantised, paged, and fills whole blocks."""
    torch.manual_seed(0)
    model = torch.nn.Module()
    for number, shape in enumerate(SHAPES):
        model.register_parameter(f"p{number}", torch.nn.Parameter(torch.randn(shape, device=device)))
    return model


def tensors_in(value: Any, key: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors inside with the key of the state they are under: those in subclasses, containers, objects."""
    if hasattr(value, "__tensor_flatten__") and type(value) is not torch.Tensor:
        for name in value.__tensor_flatten__()[0]:
            yield from tensors_in(getattr(value, name), key)
    elif isinstance(value, torch.Tensor):
        yield key, value
    elif isinstance(value, dict):
        for name, inner in value.items():
            yield from tensors_in(inner, key or str(name))
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from tensors_in(inner, key)
    elif hasattr(value, "__dict__"):
        yield from tensors_in(list(vars(value).values()), key)


def state_tensors(optimizer: torch.optim.Optimizer) -> list[tuple[str, torch.Tensor]]:
    """Return the tensors of all states, one for each storage."""
    found: dict[int, tuple[str, torch.Tensor]] = {}
    for state in optimizer.state.values():
        for key, tensor in tensors_in(state):
            found.setdefault(tensor.untyped_storage()._cdata, (key, tensor))
    return list(found.values())


def bytes_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().nbytes()


def in_blocks(num_bytes: int) -> int:
    return (num_bytes + BLOCK - 1) // BLOCK * BLOCK


def predicted(name: str, spec: OptimSpec, model: torch.nn.Module) -> StateSummary:
    return predict_state(find(name), parameter_infos(model), resolve_hyper(find(name), spec))


def pages_of(optimizer: torch.optim.Optimizer) -> set[int]:
    """Return the tensors that bitsandbytes pages on CUDA: moments from 100,000 elements on (`get_state_buffer`)."""
    large = [state for param, state in optimizer.state.items() if param.numel() >= 100_000]
    return {id(state[key]) for state in large for key in ("state1", "state2") if key in state}


def host_keys(name: str, spec: OptimSpec) -> frozenset[str]:
    """Return the state keys whose tensors lie on the host: on torch's meta device they alone are real."""
    entry = find(name)
    if entry.package in ON_THE_HOST:
        return ON_THE_HOST[entry.package]
    model = model_of("meta")
    for parameter in model.parameters():
        parameter.grad = torch.empty_like(parameter)
    optimizer = entry.build(decay_groups(model, spec.weight_decay), resolve_hyper(entry, spec))
    with redirect_stdout(StringIO()), contextlib.suppress(RuntimeError, NotImplementedError):
        optimizer.step()  # where it reads a value it fails, after it made the state
    held = state_tensors(optimizer)
    hosts, others = ({key for key, tensor in held if tensor.is_meta is meta} for meta in (False, True))
    assert not hosts & others
    return frozenset(hosts)


@pytest.mark.parametrize(("name", "spec"), CASES)
def test_what_the_allocator_counts_is_each_real_tensor_in_whole_blocks(name: str, spec: OptimSpec) -> None:
    need(find(name))
    model, paged = model_of("cpu"), name.startswith("paged-")
    optimizer = stepped(find(name), model, spec)
    elsewhere = pages_of(optimizer) if paged else set()
    on_host = host_keys(name, spec)
    real = [tensor for key, tensor in state_tensors(optimizer) if key not in on_host and id(tensor) not in elsewhere]
    law = predicted(name, spec, model)
    assert law.allocator_state_bytes == sum(map(in_blocks, map(bytes_of, real)))
    assert law.placements.get(Placement.DEVICE, 0) == sum(map(bytes_of, real))
    assert (Placement.PAGED in law.placements) is paged


@pytest.mark.parametrize(
    ("name", "args", "blocks"),
    [
        # (1,), (129,) and (64, 64) in float32: 1, 2 and 32 blocks a moment
        ("adamw", {}, 2 * (1 + 2 + 32)),
        ("adamw", {"implementation": "fused"}, 2 * (1 + 2 + 32) + 3),  # its step is a tensor on the device
        ("sgd", {}, 0),
        # the small ones as adamw; 4,096 codes and 16 absmax twice; two tables of 1,024 bytes that both share
        ("adamw8bit", {}, 2 * (1 + 2) + 2 * (8 + 1) + 2 * 2),
        # 2,048 bytes of codes, 32 scales and 16 values of a code table, each a tensor of its own, twice
        ("adamw4bit", {}, 2 * (1 + 2) + 2 * (4 + 1 + 1)),
    ],
)
def test_blocks_counted_by_hand(name: str, args: dict[str, Any], blocks: int) -> None:
    params = [ParamInfo(name=f"p{number}", shape=shape) for number, shape in enumerate([(1,), (129,), (64, 64)])]
    hyper = resolve_hyper(find(name), OptimSpec(name=name, args=args))
    assert predict_state(find(name), params, hyper).allocator_state_bytes == blocks * BLOCK


def test_a_class_by_its_path_promises_no_blocks() -> None:
    entry = find("torch.optim:AdamW")
    state = predict_state(entry, [ParamInfo(name="w", shape=(64, 64))], default_hyper(entry))
    assert state.allocator_state_bytes is None
    assert state.state_bytes == 32_772


def test_a_plan_on_cuda_holds_what_is_on_the_device_and_names_what_is_paged(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "m", TINY_DISTILBERT, vocab_size=2000)  # an embedding of 128,000 elements
    flags = ("--optim", "paged-adamw32bit", "--batch-size", 2, "--max-length", 8, "--json")
    record = effcli("estimate", folder, *flags).record
    (optimizer,) = record["optimizers"]
    paged = 2 * 4 * 128_000
    assert optimizer["placements"] == {"paged": paged, "device": optimizer["state_bytes"] - paged}
    assert optimizer["plan"]["phases"]["step"]["optimizer_state_bytes"] == optimizer["placements"]["device"]
    assert optimizer["allocator_state_bytes"] >= optimizer["placements"]["device"]
    # no tensor that is not paged is larger than 1 MiB, so that every block is as large as asked for
    assert optimizer["plan"]["first_step_bytes"] == optimizer["allocator_state_bytes"]
    note = "paged-adamw32bit: 1,000.00 KiB of its state lie in paged (managed) memory, outside torch's allocator."
    assert note in record["notes"]
    assert note in optimizer["plan"]["notes"]
    shown = effcli("estimate", folder, *flags[:-1])
    assert " ".join(shown.stdout.split()).count(note) == 1
    (on_cpu,) = effcli("estimate", folder, *flags, "--device", "cpu").record["optimizers"]
    assert on_cpu["placements"] == {"device": on_cpu["state_bytes"]}
    assert on_cpu["allocator_state_bytes"] is None
    assert on_cpu["plan"]["first_step_bytes"] is None
    assert on_cpu["plan"]["phases"]["step"]["optimizer_state_bytes"] == optimizer["state_bytes"]


def test_large_blocks_of_the_state_may_be_larger_than_asked_for(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "m", TINY_DISTILBERT, vocab_size=9000)  # an embedding of 2.2 MiB
    flags = ("--batch-size", 2, "--max-length", 8, "--json")
    (optimizer,) = effcli("estimate", folder, "--optim", "adamw", *flags).record["optimizers"]
    assert optimizer["allocator_state_bytes"] <= optimizer["plan"]["first_step_bytes"]
    assert optimizer["plan"]["first_step_bytes"] <= optimizer["allocator_state_bytes"] + 2 * 2**20


def test_a_paged_optimizer_that_has_nothing_to_page_says_so(tmp_path: Path) -> None:
    record = effcli("estimate", model_folder(tmp_path / "m", TINY_DISTILBERT), "--optim", "paged-adamw8bit",
                    "--optim", "adam8bit", "--json").record  # fmt: skip
    paged, plain = record["optimizers"]
    assert paged["state_bytes"] == plain["state_bytes"] == 295_648
    assert paged["placements"] == plain["placements"] == {"device": 295_648}
    assert sum("none of its state lies in paged (managed) memory" in note for note in record["notes"]) == 1
    assert any("no trained parameter has 100,000 elements" in note for note in record["notes"])


@pytest.mark.usefixtures("without_plan")
def test_a_run_on_a_cpu_pages_nothing_and_says_so(distilbert: Path, tmp_path: Path) -> None:
    done = effcli("train", distilbert, "--data", csv_file(tmp_path / "d.csv", 8), "--optim", "paged-adamw32bit",
                  "--max-steps", 1, "--out", tmp_path / "run", "--json")  # fmt: skip
    optimizer = done.record["optimizer"]
    assert optimizer["placements"] == {"device": optimizer["state_bytes"]}
    assert done.record["measured"]["optimizer_state_bytes"] == optimizer["state_bytes"]
    assert any("pages on CUDA only" in note for note in done.record["notes"])
    assert not any("managed" in note for note in done.record["notes"])


def test_only_a_paged_optimizer_has_a_note() -> None:
    for entry in entries():
        state = predict_state(entry, [ParamInfo(name="w", shape=(400, 400))], default_hyper(entry))
        assert bool(paged_notes(entry, state, device="cuda")) is entry.name.startswith("paged-")
        assert paged_notes(entry, state, device="cpu") == ()


@pytest.mark.parametrize("is_traced", [True, False], ids=["traced", "untraced"])
def test_the_record_planned_for_a_gpu_names_what_is_paged_once_and_leaves_it_out(
    is_traced: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = model_folder(tmp_path / "m", TINY_DISTILBERT, vocab_size=2000)
    optim = {"name": "paged-adamw32bit"}
    spec = build_spec(
        {"model": {"name": str(folder)}, "data": {"train": str(csv_file(tmp_path / "d.csv", 8))}, "optim": optim}
    )
    prepared = prepare(spec, QuietProgress())
    built = build(prepared, meta=True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (60 * 2**30, 80 * 2**30))
    monkeypatch.setattr("effcli.pipeline.run_plan.present", lambda device: target("cuda", (9, 0)))
    on_gpu = replace(prepared, device=torch.device("cuda:0"))
    plan = RunPlanner(on_gpu).plan(on_gpu, QuietProgress()) if is_traced else None
    record = planned_record(on_gpu, built, plan, out="o")
    state = record.optimizer
    paged = 2 * 4 * 128_000
    assert state.placements == {"paged": paged, "device": state.state_bytes - paged}
    assert state.plan is not None
    assert state.plan.phases["step"].optimizer_state_bytes == state.state_bytes - paged
    assert sum("1,000.00 KiB of its state lie in paged (managed) memory" in note for note in record.notes) == 1
    assert state.plan.first_step_bytes == (state.allocator_state_bytes if is_traced else None)
