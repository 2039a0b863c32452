"""torchao's low-bit AdamW: true bytes, no compiler on a CPU, runs that stop and go on, nothing unasked on stderr."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torchao.optim

from effcli.measure.optimizer_size import inspect_optimizer
from effcli.optim.hyper import resolve_hyper
from effcli.optim.learning_rate import current_lr
from effcli.optim.registry import find
from effcli.spec import OptimSpec
from tests.stopped_runs import check_that_a_stop_changes_nothing
from tests.tiny_models import measured, tiny_distilbert

pytestmark = pytest.mark.usefixtures("without_plan")

NAMES = ("adamw8bit-ao", "adamw4bit", "adamwfp8")


def optimizer_of(name: str, params: list[torch.nn.Parameter], **args: object) -> torch.optim.Optimizer:
    entry = find(name)
    hyper = resolve_hyper(entry, OptimSpec(name=name, args={"lr": 1e-3, **args}))
    return entry.build([{"params": params, "weight_decay": 0.1}], hyper)


def stepped(optimizer: torch.optim.Optimizer, params: list[torch.nn.Parameter], steps: int = 3) -> None:
    torch.manual_seed(1)
    for _ in range(steps):
        for param in params:
            param.grad = torch.randn_like(param)
        optimizer.step()


def test_tiny_distilbert_takes_the_bytes_of_the_inner_tensors_each_with_a_table_of_its_own() -> None:
    size = measured(find("adamw8bit-ao"), tiny_distilbert(), OptimSpec(name="adamw8bit-ao"))
    assert size.state_bytes == 324_480
    assert size.state_elements == 2 * 139_458 + 40
    assert size.dtypes["exp_avg"] == ("float32", "uint8")


@pytest.mark.parametrize(
    ("name", "codes", "scales", "table"),
    [("adamw8bit-ao", 8192, 128, 1024), ("adamw4bit", 4096, 256, 64), ("adamwfp8", 8192, 128, 0)],
)
def test_a_quantised_moment_holds_codes_scales_and_a_table(name: str, codes: int, scales: int, table: int) -> None:
    params = [torch.nn.Parameter(torch.randn(64, 128))]
    optimizer = optimizer_of(name, params)
    stepped(optimizer, params, 1)
    moment = optimizer.state[params[0]]["exp_avg"]
    held = [getattr(moment, inner).untyped_storage().nbytes() for inner in moment.__tensor_flatten__()[0]]
    assert held == [codes, scales, table][: len(held)]
    assert sum(held) == codes + scales + table


@pytest.mark.parametrize("name", NAMES)
def test_a_step_on_a_cpu_compiles_nothing_and_leaves_compiling_to_others(name: str) -> None:
    params = [torch.nn.Parameter(torch.randn(64, 64))]
    optimizer = optimizer_of(name, params)
    torch._dynamo.utils.counters.clear()
    stepped(optimizer, params)
    assert not torch._dynamo.utils.counters["stats"]

    compiled = []

    def backend(graph, inputs):
        compiled.append(graph)
        return graph.forward

    torch.compile(lambda x: x + 1, backend=backend)(torch.ones(1))
    assert len(compiled) == 1


@pytest.mark.parametrize("name", NAMES)
def test_step_hooks_run_once_also_after_upstream_has_made_an_optimizer_of_the_class(name: str) -> None:
    params, calls = [torch.nn.Parameter(torch.randn(64, 64))], []
    class_name = {"adamw8bit-ao": "AdamW8bit", "adamw4bit": "AdamW4bit", "adamwfp8": "AdamWFp8"}[name]
    getattr(torchao.optim, class_name)(params)
    optimizer = optimizer_of(name, params)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda update: 1.0)
    optimizer.register_step_pre_hook(lambda *arguments: calls.append("before"))
    optimizer.register_step_post_hook(lambda *arguments: calls.append("after"))
    stepped(optimizer, params, 1)
    assert calls == ["before", "after"]


@pytest.mark.parametrize("name", NAMES)
def test_small_tensors_move_as_torch_moves_them(name: str) -> None:
    ours, theirs = ([torch.nn.Parameter(torch.linspace(-1, 1, 300))] for _ in range(2))
    stepped(optimizer_of(name, ours, beta1=0.8, beta2=0.95, eps=1e-3), ours)
    stepped(torch.optim.AdamW(theirs, lr=1e-3, betas=(0.8, 0.95), eps=1e-3, weight_decay=0.1), theirs)
    torch.testing.assert_close(ours[0], theirs[0], rtol=1e-6, atol=1e-7)


def test_a_schedule_changes_the_rate_though_it_is_a_tensor() -> None:
    params = [torch.nn.Parameter(torch.randn(64, 64))]
    optimizer = optimizer_of("adamw8bit-ao", params)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda update: 0.5**update)
    rates = []
    for _ in range(3):
        stepped(optimizer, params, 1)
        rates.append(current_lr(optimizer))
        schedule.step()
    assert rates == pytest.approx([1e-3, 5e-4, 2.5e-4], rel=1e-6)


def test_stochastic_rounding_lets_small_updates_of_bf16_weights_through() -> None:
    moved = {}
    for rounding in (False, True):
        params = [torch.nn.Parameter(torch.ones(64, 64, dtype=torch.bfloat16))]
        stepped(optimizer_of("adamw8bit-ao", params, lr=1e-4, bf16_stochastic_round=rounding), params, 1)
        moved[rounding] = int((params[0] != 1).sum())
    assert moved[False] == 0
    assert 0 < moved[True] < 4096 / 4


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_on_cuda_the_compiled_step_allocates_the_same_and_a_loaded_state_is_there(name: str) -> None:
    if name == "adamwfp8" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("fp8 needs compute capability 8.9")
    tensors = {}
    for device in ("cpu", "cuda"):
        params = [torch.nn.Parameter(torch.randn(64, 64, device=device))]
        optimizer, fresh = (optimizer_of(name, params) for _ in range(2))
        stepped(optimizer, params)
        tensors[device] = inspect_optimizer(optimizer).tensors
        fresh.load_state_dict(optimizer.state_dict())
        stepped(fresh, params)
        assert fresh.state[params[0]]["exp_avg"].device.type == device
    assert tensors["cuda"] == tensors["cpu"]


@pytest.mark.parametrize(
    ("engine", "optim", "precision"),
    [("pytorch", "adamw8bit-ao", "bf16-pure"), ("accelerate", "adamw4bit", "fp32"), ("trainer", "adamwfp8", "fp32")],
)
def test_a_resumed_run_ends_as_the_uninterrupted_one(engine: str, optim: str, precision: str, tmp_path: Path) -> None:
    record = check_that_a_stop_changes_nothing(tmp_path, {"name": optim}, engine=engine, precision=precision)
    assert [line.lr for line in record.history] == pytest.approx([1e-4 * (10 - i) for i in range(10)], rel=1e-6)
    assert any("runs uncompiled" in note for note in record.notes)


@pytest.mark.slow
def test_importing_torchao_says_nothing() -> None:
    code = "import effcli.pipeline, transformers.quantizers.auto, sys; print('torchao' in sys.modules)"
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("True\n", "")
