"""Probes against real models and real steps."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from effcli.measure.peak import StepProbe, peak_rss_bytes
from effcli.measure.throughput import ThroughputMeter
from tests.jobs import ENGINES, rows, run_job, tiny_model
from tests.tiny_models import set_gradients, tiny_distilbert, tiny_gpt2


def first_lr(optimizer: torch.optim.Optimizer) -> float:
    return float(optimizer.param_groups[0]["lr"])


def stepped(model: torch.nn.Module) -> StepProbe:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.125)
    probe = StepProbe(model, optimizer, first_lr)
    set_gradients(model)
    optimizer.step()
    return probe


def test_a_classifier_holds_four_bytes_per_parameter_and_per_gradient() -> None:
    probe = stepped(tiny_distilbert())
    assert (probe.weights_bytes, probe.gradients_bytes, probe.last_lr) == (557_832, 557_832, 0.125)


def test_a_tied_head_counts_once() -> None:
    probe = stepped(tiny_gpt2())
    assert (probe.weights_bytes, probe.gradients_bytes) == (4 * 168_192, 4 * 168_192)


def test_weights_and_gradients_in_bf16_are_half_as_large() -> None:
    probe = stepped(tiny_distilbert().to(torch.bfloat16))
    assert (probe.weights_bytes, probe.gradients_bytes) == (278_916, 278_916)


def test_frozen_parameters_have_weights_but_no_gradients() -> None:
    model = tiny_distilbert()
    model.distilbert.requires_grad_(False)
    probe = stepped(model)
    assert probe.weights_bytes == 557_832
    assert probe.gradients_bytes == 4 * (64 * 64 + 64 + 64 * 2 + 2)


def test_nothing_is_known_before_the_first_step_and_detached_probes_see_nothing() -> None:
    model = torch.nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    probe = StepProbe(model, optimizer, first_lr)
    assert (probe.weights_bytes, probe.gradients_bytes, probe.last_lr) == (None, None, 0.5)
    probe.detach()
    probe.detach()
    set_gradients(model)
    optimizer.step()
    assert probe.weights_bytes is None


def test_bytes_are_those_of_the_first_step() -> None:
    model = torch.nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    probe = StepProbe(model, optimizer, first_lr)
    set_gradients(model)
    optimizer.step()
    model.bias.grad = None
    optimizer.step()
    assert probe.gradients_bytes == 4 * 12


def test_the_rate_is_that_of_the_step_just_made_not_of_the_next() -> None:
    model = torch.nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 2)
    probe = StepProbe(model, optimizer, first_lr)
    rates = []
    for _ in range(2):
        set_gradients(model)
        optimizer.step()
        schedule.step()
        rates.append(probe.last_lr)
    assert rates == [1.0, 0.5]


@pytest.mark.parametrize("engine", ENGINES)
def test_probe_and_meter_see_the_same_through_every_engine(engine: str) -> None:
    model = tiny_model("classification")
    made = rows(10, "classification")
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    ticks = iter(range(0, 1000, 2))
    attached: dict[str, Any] = {}

    def attach(model: torch.nn.Module, optimizer: torch.optim.Optimizer, schedule: Any) -> None:
        attached["probe"] = StepProbe(model, optimizer, first_lr)
        attached["meter"] = ThroughputMeter(model, clock=lambda: float(next(ticks)))
        attached["meter"].start()

    run_job(engine, "classification", num_rows=10, made_rows=made, batch_size=2, accum=2, model=model, prepare=attach)
    probe, meter = attached["probe"], attached["meter"]
    assert probe.weights_bytes == probe.gradients_bytes == 4 * num_parameters
    assert probe.last_lr == pytest.approx(0.1 / 3)
    meter.pause()
    assert meter.rows_since_last() == 10
    speed = meter.result(3)
    assert (speed.updates_per_second, speed.samples_per_second) == (1.5, 5.0)
    assert speed.tokens_per_second == sum(len(row["input_ids"]) for row in made) / 2


def batch(num_rows: int, kept: int) -> dict[str, torch.Tensor]:
    mask = torch.zeros(num_rows, 8, dtype=torch.long)
    mask[:, :kept] = 1
    return {"input_ids": torch.ones(num_rows, 8, dtype=torch.long), "attention_mask": mask}


def metered(model: torch.nn.Module) -> tuple[ThroughputMeter, SimpleNamespace]:
    clock = SimpleNamespace(now=0.0)
    return ThroughputMeter(model, clock=lambda: clock.now), clock


def test_only_training_counts_in_rows_tokens_and_seconds() -> None:
    model = tiny_distilbert()
    meter, clock = metered(model)
    meter.start()
    model.train()
    model(**batch(4, kept=5))
    clock.now = 2.0
    meter.pause()
    model.eval()
    model(**batch(100, kept=8))
    clock.now = 50.0
    model.train()
    meter.start()
    meter.start()
    model(**batch(2, kept=3))
    clock.now = 52.0
    meter.pause()
    meter.pause()
    speed = meter.result(2)
    assert (speed.updates_per_second, speed.samples_per_second, speed.tokens_per_second) == (0.5, 1.5, 26 / 4)


@pytest.mark.parametrize(
    ("before_s", "seconds"), [(0.0, [2.0, 2.0, 5.0]), (10.0, [12.0, 12.0, 15.0]), (None, [None] * 3)]
)
def test_seconds_of_training_go_on_from_those_before(before_s: float | None, seconds: list[float | None]) -> None:
    clock = SimpleNamespace(now=0.0)
    meter = ThroughputMeter(tiny_distilbert(), clock=lambda: clock.now, before_s=before_s)
    read = []
    for moment, change in ((0.0, meter.start), (2.0, meter.pause), (7.0, meter.start), (10.0, meter.pause)):
        clock.now = moment
        change()
        read.append(meter.training_s)
    assert read[1:] == seconds


def test_an_update_that_is_left_out_counts_in_nothing() -> None:
    model = tiny_distilbert().train()
    meter, clock = metered(model)
    for seconds, num_rows, end in ((2.0, 4, meter.pause), (50.0, 90, meter.leave_out), (1.0, 2, meter.pause)):
        meter.start()
        model(**batch(num_rows, kept=5))
        clock.now += seconds
        end()
    meter.leave_out()  # nothing goes on
    speed = meter.result(3)
    assert (speed.updates_per_second, speed.samples_per_second, speed.tokens_per_second) == (2 / 3, 2.0, 10.0)
    assert (meter.training_s, meter.rows_since_last()) == (3.0, 96)
    meter.start()
    meter.leave_out()
    assert meter.result(2) is None


def test_rows_are_told_once() -> None:
    model = tiny_distilbert().train()
    meter, _ = metered(model)
    model(**batch(4, kept=5))
    model(**batch(3, kept=5))
    assert [meter.rows_since_last(), meter.rows_since_last()] == [7, 0]
    meter.detach()
    model(**batch(4, kept=5))
    assert meter.rows_since_last() == 0


def test_a_stretch_that_is_not_closed_belongs_to_no_update() -> None:
    model = tiny_distilbert().train()
    meter, clock = metered(model)
    meter.start()
    model(**batch(4, kept=5))
    clock.now = 1.0
    assert meter.result(1) is None
    meter.pause()
    meter.start()
    model(**batch(4, kept=5))
    clock.now = 100.0
    assert meter.result(1).samples_per_second == 4.0


def test_without_a_mask_every_position_is_a_token() -> None:
    model = tiny_gpt2().train()
    meter, clock = metered(model)
    meter.start()
    model(torch.ones(2, 8, dtype=torch.long))
    clock.now = 1.0
    meter.pause()
    assert meter.result(1).tokens_per_second == 16.0


def test_gradient_checkpointing_does_not_count_twice() -> None:
    model = tiny_gpt2().train()
    model.activation_checkpointing_enable()
    layer_calls = []
    model.transformer.h[0].attn.register_forward_pre_hook(lambda *_: layer_calls.append(1))
    meter, clock = metered(model)
    meter.start()
    model(**batch(4, kept=5), use_cache=False).logits.sum().backward()
    clock.now = 1.0
    meter.pause()
    assert len(layer_calls) == 2  # the layers did run again
    assert (meter.result(1).samples_per_second, meter.result(1).tokens_per_second) == (4.0, 20.0)


def test_the_resident_set_grows_with_what_is_held_and_is_not_that_of_the_parent() -> None:
    held = torch.ones(300 * 2**20, dtype=torch.uint8)  # this process is large; the one below starts small
    program = (
        "from effcli.measure.peak import peak_rss_bytes as peak; first = peak()\n"
        "held = bytes(range(256)) * (2**20); del held; print(first, peak())"
    )
    environment = {"PYTHONPATH": os.pathsep.join(sys.path)}
    output = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, check=True, text=True, env=environment
    ).stdout
    first, second = map(int, output.split())
    assert peak_rss_bytes() > held.nbytes
    assert first < 100 * 2**20
    assert 250 * 2**20 < second - first < 270 * 2**20


def test_without_the_process_file_the_resident_set_comes_from_getrusage(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = peak_rss_bytes()
    monkeypatch.setattr("effcli.measure.peak._LINUX_STATUS", SimpleNamespace(read_text=lambda: ""))
    assert peak_rss_bytes() >= exact - 2**20
