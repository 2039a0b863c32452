"""What was asked is what runs: the dtype of every product, in training and evaluation, whatever lies around a run."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.nn.modules.module import register_module_forward_hook

from effcli.data.batches import Collator
from effcli.engines.surroundings import isolated_from_caller
from effcli.optim import registry
from effcli.optim.trial import trial_group, trial_step
from tests.commands import csv_file, effcli, saved_weights, untimed
from tests.fp16 import scale_on_cpu
from tests.heads import rows, tiny_model
from tests.jobs import ENGINES, run_job
from tests.tiny_models import tiny_distilbert

PRODUCTS = {"fp32": torch.float32, "bf16": torch.bfloat16, "bf16-pure": torch.bfloat16}
CPU = torch.device("cpu")

pytestmark = pytest.mark.usefixtures("without_plan")


@contextmanager
def seen_products() -> Iterator[set[tuple[bool, torch.dtype, bool, str]]]:
    """Give a set that fills with mode, dtype, autocast and matmul precision of every real output of a linear layer."""
    seen: set[tuple[bool, torch.dtype, bool, str]] = set()

    def look(module: torch.nn.Module, inputs: object, output: torch.Tensor) -> None:
        if isinstance(module, torch.nn.Linear):
            autocast, products = torch.is_autocast_enabled("cpu"), torch.get_float32_matmul_precision()
            seen.add((module.training, output.dtype, autocast, products))

    handle = register_module_forward_hook(look)
    try:
        yield seen
    finally:
        handle.remove()


@pytest.mark.parametrize("engine", ENGINES)
def test_products_have_the_dtype_that_was_asked_for_run_after_run_in_one_process(
    engine: str, distilbert: Path, tmp_path: Path
) -> None:
    data = csv_file(tmp_path / "d.csv", 4)
    for precision in ("bf16", "fp32", "bf16-pure"):
        out = ("--out", tmp_path / "o", "--overwrite")
        common = ("train", distilbert, "--data", data, "--eval-data", data, "--max-steps", 1, "--engine", engine)
        with seen_products() as seen:
            assert effcli(*common, "--precision", precision, *out).code == 0
        uses_autocast = precision == "bf16"
        assert seen == {(mode, PRODUCTS[precision], uses_autocast, "highest") for mode in (True, False)}


@pytest.mark.parametrize("engine", ENGINES)
def test_neither_the_environment_nor_the_caller_changes_a_run(
    engine: str, distilbert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = csv_file(tmp_path / "d.csv")
    common = ("train", distilbert, "--data", data, "--engine", engine, "--batch-size", 4, "--max-steps", 3, "--json")
    plain = effcli(*common, "--out", tmp_path / "a").record["history"]

    around = {
        "ACCELERATE_MIXED_PRECISION": "bf16", "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "3", "LOCAL_RANK": "0",
        "ACCELERATE_DYNAMO_BACKEND": "EAGER", "ACCELERATE_TORCH_DEVICE": "meta", "ACCELERATE_USE_FSDP": "true",
    }  # fmt: skip
    for name, value in around.items():
        monkeypatch.setenv(name, value)
    configuration = Path(os.environ["HF_HOME"]) / "accelerate" / "default_config.yaml"
    configuration.parent.mkdir(exist_ok=True)
    configuration.write_text("compute_environment: LOCAL_MACHINE\nmixed_precision: bf16\ngradient_clipping: 0.1\n")
    torch.set_float32_matmul_precision("medium")
    try:
        with torch.autocast("cpu", torch.bfloat16), seen_products() as seen:
            surrounded = effcli(*common, "--out", tmp_path / "b").record["history"]
            assert torch.is_autocast_enabled("cpu")
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision("highest")
        configuration.unlink()
    assert seen == {(True, torch.float32, False, "highest")}
    assert untimed(surrounded) == untimed(plain)
    assert {name: os.environ[name] for name in around} == around


@pytest.mark.parametrize("engine", ENGINES)
def test_each_update_under_autocast_computes_with_the_weights_of_that_update(engine: str) -> None:
    row = rows(3, "classification")[2:]  # one row: no order of additions to differ in
    model = tiny_model("classification")
    start = copy.deepcopy(model)
    with torch.autocast("cpu", torch.bfloat16), isolated_from_caller(CPU):  # an outer autocast keeps casts of weights
        outcome = run_job(
            engine, "classification", num_rows=1, batch_size=1, accum=1, max_steps=3, model=model, made_rows=row,
            precision="bf16", scheduler="constant", max_grad_norm=0.0,
            make_optimizer=lambda groups: torch.optim.SGD(model.parameters(), lr=0.1),
        )  # fmt: skip

    batch, losses = Collator(0, "right", "classification")(row), []
    optimizer = torch.optim.SGD(start.train().parameters(), lr=0.1)
    for _ in range(3):
        with torch.autocast("cpu", torch.bfloat16):
            logits = start(**{name: value for name, value in batch.items() if name != "labels"}).logits
        loss = torch.nn.functional.cross_entropy(logits.float(), batch["labels"])
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    assert outcome.losses == losses
    assert all(torch.equal(outcome.weights[name], value) for name, value in start.state_dict().items())


@pytest.mark.parametrize(
    ("precision", "stored"),
    [("fp32", "bfloat16"), ("bf16", "float16"), ("fp16", "float16"), ("bf16-pure", "float16")],
)
def test_weights_are_held_in_32_bit_whatever_the_model_was_stored_in(
    precision: str, stored: str, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scale_on_cpu(monkeypatch)
    tiny_distilbert().to(getattr(torch, stored)).save_pretrained(tmp_path / "half")
    assert {value.dtype for value in load_file(tmp_path / "half" / "model.safetensors").values()} == {
        getattr(torch, stored)
    }
    out = ("--out", tmp_path / "o", "--max-steps", 2, "--json")
    record = effcli("train", tmp_path / "half", "--data", data, "--precision", precision, *out).record
    width = 2 if precision == "bf16-pure" else 4
    assert record["measured"]["weights_bytes"] == record["model"]["weights_bytes"] == width * 139_458
    assert record["measured"]["gradients_bytes"] == width * 139_458
    held = torch.bfloat16 if precision == "bf16-pure" else torch.float32
    assert {value.dtype for value in saved_weights(tmp_path / "o").values()} == {held}


def pretend_cuda(monkeypatch: pytest.MonkeyPatch, *, bf16: bool) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: bf16 or including_emulation)


@pytest.mark.parametrize("precision", ["bf16", "bf16-pure"])
def test_bf16_is_refused_on_a_card_without_it_before_model_and_data(
    precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_cuda(monkeypatch, bf16=False)
    nothing = (tmp_path / "no" / "model", "--data", tmp_path / "no" / "data.csv", "--out", tmp_path / "o")
    done = effcli("train", *nothing, "--precision", precision)
    assert done.code == 4
    assert all(word in done.error for word in (f"--precision {precision}", "Tesla T4", "fp16", "fp32"))
    assert not (tmp_path / "o").exists()
    # Asked for what the card has, the run gets as far as the model, which isn't there.
    assert "no such folder" in effcli("train", *nothing, "--precision", "fp16").error


def test_fp16_is_refused_on_a_cpu_before_model_and_data(tmp_path: Path) -> None:
    done = effcli("train", tmp_path / "no" / "model", "--data", tmp_path / "no" / "data.csv", "--precision", "fp16")
    assert done.code == 4
    assert all(word in done.error for word in ("--precision fp16", "CUDA", "bf16", "fp32"))


@pytest.mark.parametrize("engine", ["accelerate", "trainer"])
def test_an_engine_that_would_leave_fp16_out_says_so_instead(
    engine: str, distilbert: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("effcli.pipeline.settling.check_precision", lambda *_: None)
    out = ("--out", tmp_path / "o")
    done = effcli("train", distilbert, "--data", data, "--precision", "fp16", "--engine", engine, *out)
    assert done.code == 4
    assert "computes in fp32 on cpu" in done.error


@pytest.mark.parametrize("entry", registry.entries(), ids=lambda entry: entry.name)
def test_every_optimizer_takes_bf16_weights_and_leaves_out_what_the_scaler_skips(entry) -> None:
    hyper = {**registry.default_hyper(entry), "overrides": ()}
    trial_step(entry, hyper, "cpu", "bfloat16")

    weights = [torch.nn.Parameter(torch.ones(shape)) for shape in ((64, 64), (64,))]
    optimizer = entry.build([trial_group(weights)], hyper)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for gradient, moves in ((float("inf"), False), (1.0, True)):
        before = [weight.detach().clone() for weight in weights]
        optimizer.zero_grad()
        scaler.scale(sum((weight * gradient).sum() for weight in weights)).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        assert any(not torch.equal(one, other) for one, other in zip(before, weights, strict=True)) is moves
