"""The allocator's peaks part by part, and what the first steps add, with counters that a test sets."""

from __future__ import annotations

import gc
import operator
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from effcli.engines.window import WindowLoss
from effcli.measure.cuda_allocator import (
    ALWAYS,
    AllocatorPhases,
    Counted,
    Counters,
    Peaks,
    TorchCounters,
    allocator_facts,
)
from effcli.measure.device_record import Doing
from effcli.measure.first_steps import FirstSteps
from effcli.measure.whereabouts import Whereabouts
from tests import gpu
from tests.jobs import ENGINES, run_job
from tests.tiny_models import set_gradients, tiny_distilbert, tiny_gpt2
from tests.watched import FakeCounters, LiveTensors

F1_ADAMW = 1_115_824
"""Bytes of AdamW's state for the tiny classifier: 8 for each of 139,458 parameters, 4 for each of 40 tensors."""


def held(counters: FakeCounters, *amounts: tuple[int, int]) -> None:
    for allocated, reserved in amounts:
        counters.hold(allocated, reserved)


def test_each_part_has_its_own_peak_and_together_they_are_what_torch_would_have_said() -> None:
    counters = FakeCounters(999, 999)
    counters.hold(5, 10)
    phases = AllocatorPhases(counters)
    counters.ever = (5, 10)  # a run before this one does not count
    held(counters, (40, 60), (30, 60))
    phases.enter("forward")
    held(counters, (90, 100), (70, 100))
    phases.enter("backward")
    held(counters, (95, 100), (60, 100))
    phases.enter("step")
    held(counters, (120, 140), (80, 140))
    phases.enter("forward")
    held(counters, (110, 140), (80, 120))
    assert phases.peaks() == counters.ever == (120, 140)
    phases.enter("evaluation")
    held(counters, (130, 150), (80, 120))
    phases.enter("evaluation")
    held(counters, (85, 120), (80, 120))
    phases.finish()
    assert phases.phases == {
        "loading": Peaks(40, 60), "forward": Peaks(110, 140), "backward": Peaks(95, 100), "step": Peaks(120, 140),
        "evaluation": Peaks(130, 150),
    }  # fmt: skip
    assert phases.peaks() == counters.ever == (130, 150)
    assert phases.num_updates_seen is None


class Clock:
    """Goes on by what it is told, or at each look."""

    def __init__(self) -> None:
        self.now = 0.0
        self.each_look = 0.0

    def __call__(self) -> float:
        self.now += self.each_look
        return self.now


def test_updates_that_are_short_beside_looking_at_them_are_left_out_and_count_in_the_whole_peak() -> None:
    counters, clock = FakeCounters(), Clock()
    phases = AllocatorPhases(counters, clock=clock)
    clock.each_look = 0.001
    for update in range(1, 201):
        for number, phase in enumerate(("forward", "backward", "step")):
            phases.enter(phase)
            counters.hold(1000 * number + update, 5000)
            clock.now += 0.01
            counters.hold(0, 5000)
    most = counters.ever
    counters.hold(9, 5000)
    facts = allocator_facts(counters, phases, None)
    assert ALWAYS <= facts.num_updates_seen < 100
    assert (facts.peak_allocated_bytes, facts.peak_reserved_bytes) == most == (2200, 5000)
    # No part has another's bytes, although peaks of updates that were left out lie between.
    for number, phase in enumerate(("forward", "backward", "step")):
        assert 1000 * number + ALWAYS <= facts.phases[phase].peak_allocated_bytes <= 1000 * number + 200


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["update", "two batches", "skipped", "evaluation", "no step yet"]),
            st.lists(st.tuples(st.integers(0, 99), st.integers(0, 99)), min_size=1, max_size=3),
            st.sampled_from([0.0, 0.5]),
        ),
        max_size=40,
    )
)
def test_peaks_of_any_run_are_those_of_its_parts_and_of_torch(
    run: list[tuple[str, list[tuple[int, int]], float]],
) -> None:
    parts: dict[str, list[Doing]] = {
        "update": ["forward", "backward", "step"],
        "two batches": ["forward", "backward", "forward", "backward", "step"],
        "skipped": ["forward", "backward"],
        "evaluation": ["evaluation", "evaluation"],
        "no step yet": ["forward"],
    }
    counters, clock = FakeCounters(), Clock()
    phases = AllocatorPhases(counters, clock=clock)
    most: dict[str, list[Peaks]] = {}
    now = (0, 0)
    for kind, amounts, cost_s in [("update", [(1, 1)], 0.5)] * ALWAYS + run:
        clock.each_look = cost_s
        for part in parts[kind]:
            phases.enter(part)
            for amount in (now, *amounts):
                counters.hold(*amount)
                most.setdefault(part, []).append(Peaks(*amount))
            now = amounts[-1]
        assert phases.peaks() == counters.ever
    facts = allocator_facts(counters, phases, None)
    assert (facts.peak_allocated_bytes, facts.peak_reserved_bytes) == counters.ever
    highest = {part: Peaks(*map(max, *amounts, (0, 0))) for part, amounts in most.items()}
    for part, peak in facts.phases.items():
        found = Peaks(peak.peak_allocated_bytes, peak.peak_reserved_bytes)
        assert found == highest.get(part, Peaks()) or facts.num_updates_seen is not None
        assert all(map(operator.le, found, highest.get(part, Peaks())))


def test_an_evaluation_is_looked_at_whatever_it_costs() -> None:
    counters, clock = FakeCounters(), Clock()
    phases = AllocatorPhases(counters, clock=clock)
    clock.each_look = 1.0
    for _ in range(2 * ALWAYS):
        for phase in ("forward", "backward", "step"):
            phases.enter(phase)
            counters.hold(50)
            counters.hold(0)
    phases.enter("evaluation")
    counters.hold(20)
    counters.hold(0)
    phases.enter("forward")
    counters.hold(70)
    phases.finish()
    assert phases.phases["evaluation"] == Peaks(20, 0)
    assert phases.phases["forward"] == Peaks(50, 0)
    assert phases.peaks() == Peaks(70, 0)
    assert phases.num_updates_seen == ALWAYS


def entered_by(engine: str, **settings: Any) -> list[str]:
    """Return the parts of a run in the order in which they begin, and where its losses are computed."""
    entered: list[str] = []
    watchers: list[Whereabouts] = []

    class Told(WindowLoss):
        def total(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            entered.append("loss")
            return super().total(logits, labels)

    def attach(model: torch.nn.Module, optimizer: torch.optim.Optimizer, schedule: Any) -> None:
        watchers.append(Whereabouts(model, optimizer, entered.append))

    loss = Told("classification", lambda share: watchers[0].watch(share))
    run_job(engine, "classification", num_rows=8, batch_size=2, prepare=attach, window_loss=loss, **settings)
    return entered


@pytest.mark.parametrize("engine", ENGINES)
def test_every_engine_goes_through_the_parts_of_an_update(engine: str) -> None:
    window = ["forward", "loss", "backward", "forward", "loss", "backward", "step"]
    assert entered_by(engine, accum=2) == window * 2


def test_recomputed_layers_are_no_forward_pass() -> None:
    model = tiny_gpt2().train()
    model.activation_checkpointing_enable()
    entered: list[str] = []
    watcher = Whereabouts(model, torch.optim.SGD(model.parameters()), entered.append)
    loss = model(torch.ones(2, 8, dtype=torch.long), use_cache=False).logits.sum()
    watcher.watch(loss)
    loss.backward()
    assert entered == ["forward", "backward"]


@pytest.fixture(params=[torch.optim.AdamW, torch.optim.Adam])
def optimizer(request: pytest.FixtureRequest) -> torch.optim.Optimizer:
    model = tiny_distilbert()
    set_gradients(model)
    return request.param(model.parameters(), lr=1e-3)


def first_steps(counters: Counters, optimizer: torch.optim.Optimizer, *, is_resumed: bool = False) -> FirstSteps:
    made = FirstSteps(counters, optimizer, is_resumed=is_resumed)
    made.arm()
    return made


def test_the_first_step_adds_the_state_to_the_byte_and_later_ones_nothing(optimizer: torch.optim.Optimizer) -> None:
    steps = first_steps(LiveTensors(), optimizer)
    assert (steps.change_bytes, steps.reason) == (None, "no step was made")
    optimizer.step()
    assert (steps.change_bytes, steps.reason) == (F1_ADAMW, None)
    optimizer.step()
    assert steps.change_bytes == F1_ADAMW
    steps.detach()
    steps.detach()


def test_what_other_watchers_take_around_a_step_is_not_the_steps() -> None:
    model = torch.nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    counters = FakeCounters()
    steps = FirstSteps(counters, optimizer, is_resumed=False)
    optimizer.register_step_pre_hook(lambda *_: counters.hold(100))
    optimizer.register_step_post_hook(lambda *_: counters.hold(1000))
    steps.arm()
    set_gradients(model)
    optimizer.step()
    assert steps.change_bytes == 0


def test_garbage_that_lies_about_is_not_collected_during_the_step(optimizer: torch.optim.Optimizer) -> None:
    def look(*ignored: object) -> None:
        assert not gc.isenabled()

    steps = first_steps(LiveTensors(), optimizer)
    optimizer.register_step_pre_hook(look)
    optimizer.step()
    assert gc.isenabled()
    assert steps.change_bytes == F1_ADAMW


def test_a_step_that_fails_leaves_the_collector_as_it_was(optimizer: torch.optim.Optimizer) -> None:
    def fail(*ignored: object) -> None:
        raise RuntimeError

    steps = first_steps(LiveTensors(), optimizer)
    optimizer.register_step_pre_hook(fail)
    with pytest.raises(RuntimeError):
        optimizer.step()
    steps.detach()
    assert gc.isenabled()


def test_a_step_that_calls_that_of_its_base_is_one() -> None:
    class Derived(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            counters.hold(counters.read().allocated_bytes + 7)
            return super().step(closure)

    counters = FakeCounters()
    model = torch.nn.Linear(3, 3)
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = Derived(model.parameters(), lr=0.1)
    steps = first_steps(counters, optimizer)
    set_gradients(model)
    plain.step()
    optimizer.step()
    optimizer.step()
    assert (steps.change_bytes, steps.reason) == (7, None)


def test_a_paged_optimizer_is_read_after_two_steps() -> None:
    class Paged(torch.optim.SGD):
        is_paged = True

        def step(self, closure: Any = None) -> None:
            counters.hold(counters.read().allocated_bytes + next(growth))

    growth: Iterator[int] = iter((10, 5, 100))
    counters = FakeCounters()
    optimizer = Paged(torch.nn.Linear(3, 3).parameters(), lr=0.1)
    steps = first_steps(counters, optimizer)
    optimizer.step()
    assert steps.change_bytes is None
    assert "after two steps" in steps.reason
    counters.hold(500)
    optimizer.step()
    optimizer.step()
    assert (steps.change_bytes, steps.reason) == (15, None)


def resumed(optimizer: torch.optim.Optimizer) -> FirstSteps:
    return first_steps(LiveTensors(), optimizer, is_resumed=True)


def with_state(optimizer: torch.optim.Optimizer) -> FirstSteps:
    optimizer.step()
    return first_steps(LiveTensors(), optimizer)


@pytest.mark.parametrize(("start", "reason"), [(resumed, "with a checkpoint"), (with_state, "before its first step")])
def test_a_state_that_was_there_before_is_no_change(
    start: Callable[[torch.optim.Optimizer], FirstSteps], reason: str, optimizer: torch.optim.Optimizer
) -> None:
    steps = start(optimizer)
    optimizer.step()
    assert gc.isenabled()
    assert steps.change_bytes is None
    assert reason in steps.reason


def test_an_entry_without_anything_in_it_is_no_state(optimizer: torch.optim.Optimizer) -> None:
    for parameter in optimizer.param_groups[0]["params"]:
        assert not optimizer.state[parameter]
    steps = first_steps(LiveTensors(), optimizer)
    optimizer.step()
    assert (steps.change_bytes, steps.reason) == (F1_ADAMW, None)


def test_a_step_that_the_scaler_skips_is_none(optimizer: torch.optim.Optimizer) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    steps = first_steps(LiveTensors(), optimizer)
    parameter = optimizer.param_groups[0]["params"][0]
    for bad, change in ((float("inf"), None), (1.0, F1_ADAMW)):
        scaler.scale(parameter.new_zeros(1))
        parameter.grad.view(-1)[0] = bad
        scaler.step(optimizer)
        scaler.update()
        assert steps.change_bytes == change


def test_workspaces_of_cublas_are_told_where_torch_can_free_them() -> None:
    counters = FakeCounters(100, 200)
    counters.workspace_bytes = 33
    facts = allocator_facts(counters, AllocatorPhases(counters), None)
    assert (facts.cublas_workspace_bytes, facts.cublas_reason) == (33, None)
    assert (facts.peak_allocated_bytes, facts.peak_reserved_bytes) == (100, 200)
    assert (facts.first_step_change_bytes, facts.first_step_reason) == (None, "no step was made")


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (AttributeError("_cuda_clearCublasWorkspaces"), "this build of torch"),
        (RuntimeError("CUDA error: a\nb"), "error: a"),
    ],
)
def test_workspaces_that_are_not_told_have_a_reason(error: Exception, reason: str) -> None:
    class Without(FakeCounters):
        def clear_workspaces(self) -> None:
            raise error

    counters = Without(100, 200)
    facts = allocator_facts(counters, AllocatorPhases(counters), None)
    assert facts.cublas_workspace_bytes is None
    assert reason in facts.cublas_reason
    assert "\n" not in facts.cublas_reason


def test_counters_of_torch_are_zero_before_cuda_is_initialised_and_its_own_after(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counters = TorchCounters(torch.device("cuda", 0))
    if not torch.cuda.is_initialized():
        counters.reset_peaks()
        assert counters.read() == Counted(
            allocated_bytes=0, reserved_bytes=0, peak_allocated_bytes=0, peak_reserved_bytes=0
        )
    kept = {"allocated_bytes": {"current": 5, "peak": 6}, "reserved_bytes": {"current": 7, "peak": 8}}
    nested = {name: {"all": values, "large_pool": {"current": 1, "peak": 1}} for name, values in kept.items()}
    monkeypatch.setattr("torch.cuda.memory_stats_as_nested_dict", lambda device: nested)
    assert counters.read() == Counted(
        allocated_bytes=5, reserved_bytes=7, peak_allocated_bytes=6, peak_reserved_bytes=8
    )


def test_once_cuda_has_failed_what_was_counted_before_is_kept() -> None:
    class Lost(FakeCounters):
        is_lost = False

        def read(self) -> Counted:
            if self.is_lost:
                raise RuntimeError("CUDA error: an illegal memory access was encountered")
            return super().read()

    counters = Lost(50, 60)
    phases = AllocatorPhases(counters)
    phases.enter("forward")
    counters.hold(70, 80)
    phases.enter("backward")
    counters.is_lost = True
    assert phases.peaks() == Peaks(70, 80)
    facts = allocator_facts(counters, phases, None)
    assert (facts.peak_allocated_bytes, facts.peak_reserved_bytes) == (70, 80)
    assert list(facts.phases) == ["loading", "forward"]
    assert "illegal memory access" in facts.cublas_reason


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a CUDA device")
def test_tests_for_a_device_say_that_there_is_none_rather_than_pass(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main([]) == 4
    assert "finds no CUDA device" in capsys.readouterr().err
