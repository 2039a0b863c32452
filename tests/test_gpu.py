"""Runs on a CUDA device, beside the driver and torch's own counters. `make test-gpu` runs what is here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.commands import TINY_DISTILBERT, csv_file, model_folder
from tests.jobs import ENGINES
from tests.tiny_models import tiny_distilbert
from tests.watched import MIB

HAS_DEVICE = torch.cuda.is_available()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HAS_DEVICE, reason="no CUDA device")]

TOP = Path(__file__).parents[1]
OPTIMIZERS = ("adamw", "adam8bit", "adafactor")


def python(*arguments: object, **variables: str) -> str:
    """Return what a fresh Python process prints: CUDA's context lasts as long as a process does."""
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        capture_output=True, text=True, cwd=TOP, env={**os.environ, "HF_HUB_OFFLINE": "1", **variables},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def trained(folder: Path, *flags: object, **variables: str) -> dict[str, Any]:
    """Return the record of a run of the tiny classifier."""
    model, data, out = model_folder(folder / "m", TINY_DISTILBERT), csv_file(folder / "d.csv", 40), folder / "out"
    common = ("train", model, "--data", data, "--eval-data", data, "--device", "cuda", "--nvml-interval", 0.05)
    python("-m", "effcli", *common, "--epochs", 2, "--out", out, "--overwrite", "--quiet", *flags, **variables)
    record: dict[str, Any] = json.loads((out / "record.json").read_text())
    return record


def check_amounts(record: dict[str, Any]) -> None:
    """Check that each amount is there, and none is less than what it contains."""
    allocator, nvml = record["measured"]["allocator"], record["measured"]["nvml"]
    amounts = [nvml[name] for name in ("device", "process", "context", "others")]
    assert nvml["reason"] is None
    assert all(amount["peak_bytes"] is not None for amount in amounts), nvml
    assert list(allocator["phases"]) == ["loading", "forward", "backward", "step", "evaluation"]
    peaks = [phase["peak_allocated_bytes"] for phase in allocator["phases"].values()]
    assert allocator["peak_allocated_bytes"] == record["measured"]["peak_allocated_bytes"]
    if allocator["num_updates_seen"] is None:
        assert allocator["peak_allocated_bytes"] == max(peaks)
    assert 0 < allocator["peak_allocated_bytes"] <= allocator["peak_reserved_bytes"]
    assert allocator["peak_reserved_bytes"] <= nvml["process"]["peak_bytes"] <= nvml["device"]["peak_bytes"]
    assert nvml["device"]["peak_bytes"] <= nvml["total_bytes"]
    assert 100 * MIB <= nvml["context"]["last_bytes"] <= nvml["context"]["peak_bytes"] <= 2048 * MIB
    moment = nvml["highest"]
    assert moment["allocated_bytes"] <= moment["reserved_bytes"] <= moment["process_bytes"] <= moment["device_bytes"]
    if moment["context_bytes"] is not None:
        assert moment["reserved_bytes"] + moment["context_bytes"] == moment["process_bytes"]
    assert nvml["num_samples"] >= 2


def check_first_step(record: dict[str, Any]) -> None:
    """Check that the first step added to the allocator what was predicted of it.

    All tensors of the tiny classifier are below 1 MiB, where blocks are multiples of 512 bytes and no larger.
    """
    allocator, predicted = record["measured"]["allocator"], record["optimizer"]["allocator_state_bytes"]
    assert allocator["first_step_reason"] is None
    assert predicted is None or allocator["first_step_change_bytes"] == predicted


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("engine", ENGINES)
def test_each_engine_reports_amounts_that_contain_each_other(engine: str, optimizer: str, tmp_path: Path) -> None:
    record = trained(tmp_path, "--engine", engine, "--optim", optimizer)
    check_amounts(record)
    allocator, predicted = record["measured"]["allocator"], record["optimizer"]["allocator_state_bytes"]
    print(
        f"\n{engine} {optimizer}: allocated {allocator['peak_allocated_bytes']:,}, reserved "
        f"{allocator['peak_reserved_bytes']:,}, context {record['measured']['nvml']['context']}, first step "
        f"{allocator['first_step_change_bytes']:,} of {predicted} predicted, cuBLAS "
        f"{allocator['cublas_workspace_bytes']}"
    )
    check_first_step(record)
    assert allocator["cublas_workspace_bytes"] is None or 0 < allocator["cublas_workspace_bytes"] <= 256 * MIB
    assert allocator["cublas_workspace_bytes"] is not None or allocator["cublas_reason"]


def test_the_first_step_of_fp16_is_the_first_that_the_scaler_lets_pass(tmp_path: Path) -> None:
    record = trained(tmp_path, "--precision", "fp16")
    check_first_step(record)


def test_a_paged_state_is_outside_the_allocator(tmp_path: Path) -> None:
    record = trained(tmp_path, "--optim", "paged-adamw8bit")
    assert record["measured"]["optimizer_state_bytes"] == record["optimizer"]["state_bytes"]
    check_first_step(record)


@pytest.mark.parametrize("setting", ["expandable_segments:True", "backend:cudaMallocAsync"])
def test_other_allocators_give_amounts_that_contain_each_other(setting: str, tmp_path: Path) -> None:
    check_amounts(trained(tmp_path, PYTORCH_CUDA_ALLOC_CONF=setting))


def test_a_device_is_found_by_the_identifier_that_makes_it_visible(tmp_path: Path) -> None:
    nvml = trained(tmp_path)["measured"]["nvml"]
    for listed in (nvml["uuid"], nvml["uuid"][:12]):
        if not listed.startswith("MIG-"):
            assert trained(tmp_path, CUDA_VISIBLE_DEVICES=listed)["measured"]["nvml"]["uuid"] == nvml["uuid"]


BASELINE = """
import json, os, sys, torch
from effcli.devices import activate, card_names, resolve_device
from effcli.measure.card_readings import opened
from effcli.measure.device_monitor import read_baseline

device = resolve_device("cuda")
before = torch.cuda.is_initialized()
baseline = read_baseline(device, interval_s=0.2)
activate(device)
held = torch.ones(300 * 2**20, dtype=torch.uint8, device=device)
torch.cuda.synchronize()
with opened(lambda: card_names(device)) as card:
    reading = card.read()
print(json.dumps({
    "before": before, "baseline": baseline.used_bytes, "reason": baseline.reason, "used": reading.used.num_bytes,
    "process": reading.process.num_bytes, "again": read_baseline(device, interval_s=0.2).reason,
}))
"""


def test_what_was_in_use_is_read_before_there_is_a_context() -> None:
    told = json.loads(python("-c", BASELINE).splitlines()[-1])
    print(f"\n{told}")
    assert (told["before"], told["reason"]) == (False, None)
    assert 400 * MIB <= told["used"] - told["baseline"] <= 2400 * MIB  # 300 of them the tensor, the rest the context
    assert "before this run" in told["again"]


def test_peaks_of_the_parts_are_those_that_torch_would_have_said() -> None:
    from effcli.measure.cuda_allocator import AllocatorPhases, Peaks, TorchCounters
    from effcli.measure.first_steps import FirstSteps
    from effcli.measure.whereabouts import Whereabouts

    device = torch.device("cuda", 0)
    model = tiny_distilbert().to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    counters = TorchCounters(device)
    steps = FirstSteps(counters, optimizer, is_resumed=False)
    steps.arm()
    ids = torch.ones(8, 32, dtype=torch.long, device=device)
    watchers: list[Whereabouts] = []

    def update() -> None:
        loss = model(input_ids=ids).logits.square().mean()
        for watcher in watchers:
            watcher.watch(loss)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    update()
    # The moments of 40 tensors in blocks of 512 bytes; `step` lies in main memory.
    moments = sum(-(-parameter.numel() * 4 // 512) * 512 for parameter in model.parameters())
    assert steps.change_bytes == 2 * moments
    update()
    torch.cuda.reset_peak_memory_stats(device)
    update()
    unwatched = Peaks(torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device))
    phases = AllocatorPhases(counters)
    watchers.append(Whereabouts(model, optimizer, phases.enter))
    update()
    assert phases.peaks() == unwatched
    phases.finish()
    watchers.pop().detach()
    found = phases.phases
    assert unwatched.allocated_bytes == max(peaks.allocated_bytes for peaks in found.values())
    # Weights and moments lie in all parts; gradients, as large as the weights, are freed where the step is over.
    assert found["forward"].allocated_bytes >= 3 * moments
    assert found["backward"].allocated_bytes >= 4 * moments
    assert found["step"].allocated_bytes >= 4 * moments


def test_the_driver_and_torch_name_the_same_card() -> None:
    from effcli.devices import card_names
    from effcli.measure.card_readings import opened

    device = torch.device("cuda", torch.cuda.current_device())
    with opened(lambda: card_names(device)) as card:
        bare = str(torch.cuda.get_device_properties(device).uuid)
        assert bare in card.identity.uuid or card.identity.uuid.startswith("MIG-")
        total_bytes = card.read().total.num_bytes
    torch_bytes = torch.cuda.get_device_properties(device).total_memory
    assert total_bytes is None or torch_bytes <= total_bytes <= torch_bytes * 1.1


def test_what_watching_costs_is_printed() -> None:
    print("\n" + python(TOP / "tests" / "bench" / "sampler.py", "--seconds", 10, "--pairs", 10))
