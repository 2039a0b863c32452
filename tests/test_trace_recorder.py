"""What the recorder writes down, against the fake mode's own answers and against gradients that torch itself adds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

from effcli.memory.tape import Alloc, Free
from effcli.trace.fake import fake_tensors
from effcli.trace.micro import trace_micro
from effcli.trace.recorder import Recorder
from tests.profiled import profiled_peak
from tests.traces import PlainKernels, traced


@pytest.mark.parametrize("name", ["bert", "t5", "llama"])
def test_answers_by_shape_are_those_of_the_fake_mode(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _, by_shape = traced(name, whole=False, recompute=True)

    def ask(self: Recorder, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        return func(*args, **kwargs)

    monkeypatch.setattr(Recorder, "answer", ask)
    assert traced(name, whole=False, recompute=True)[1].events == by_shape.events


class Meeting(torch.nn.Module):
    """Two or three paths from one tensor, whose gradients meet there."""

    def __init__(self, join: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(256, 256))
        self.join = join

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.join(x @ self.weight)


JOINS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "two products": lambda h: h.relu() + h.sigmoid(),
    "three products": lambda h: h.relu() + h.sigmoid() + h.tanh(),
    "a residual": lambda h: h + (h.relu() * 2).tanh(),
    "a view": lambda h: h.view(-1).relu() + h.sigmoid().view(-1),
}


@pytest.mark.parametrize("name", JOINS)
def test_gradients_that_meet_take_what_they_take_in_torch(name: str) -> None:
    def loss(module: torch.nn.Module, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return module(batch["x"]).sum()

    real, data = Meeting(JOINS[name]), {"x": torch.ones(512, 256)}
    measured = profiled_peak(lambda: loss(real, data).backward())

    opened = fake_tensors()
    with opened():
        fake = Meeting(JOINS[name])
        batch = {"x": torch.empty(512, 256)}
        tape = trace_micro(fake, batch, forward=loss, loss=lambda value, _: value, kernels=PlainKernels())
    live = peak = 0
    held: dict[int, int] = {}
    for event in tape.events:
        if isinstance(event, Alloc):
            held[event.block] = 0 if event.kind == "batch" else event.num_bytes  # live before the measured call
            live += held[event.block]
        elif isinstance(event, Free):
            live -= held.pop(event.block)
        peak = max(peak, live)
    assert peak == pytest.approx(measured, rel=1e-4)
