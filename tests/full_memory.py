"""Memory that runs out on request, in a run alone: plans are traced with the same code, on tensors that are fake."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import DistilBertForSequenceClassification

CUDA_ALLOCATOR = "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity"
CPU_ALLOCATOR = (
    "[enforce fail at alloc_cpu.cpp:129] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate "
    "1024 bytes. Error code 12 (Cannot allocate memory)"
)


def cuda_error() -> Exception:
    """Return a new error each time: one that is raised keeps what it came through alive."""
    return torch.OutOfMemoryError(CUDA_ALLOCATOR)


def no_memory_above(
    monkeypatch: pytest.MonkeyPatch, rows: int, make: Callable[[], Exception] = cuda_error
) -> list[int]:
    """Let the tiny classifier's training fail with more than that many rows; return the sizes that it was given."""
    given: list[int] = []

    def check(model: torch.nn.Module, input_ids: torch.Tensor) -> None:
        if model.training:
            given.append(len(input_ids))
            if len(input_ids) > rows:
                raise make()

    _before_forward(monkeypatch, check)
    return given


def no_memory_in(monkeypatch: pytest.MonkeyPatch, moment: str, *, above: int = 0) -> None:
    """Let the tiny classifier, trained by AdamW, fail in one moment of a run; in evaluation `above` so many rows."""
    forward = DistilBertForSequenceClassification.forward

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise cuda_error()

    def failing_backward(model: torch.nn.Module, input_ids: torch.Tensor, **kwargs: Any) -> Any:
        output = forward(model, input_ids, **kwargs)
        if type(input_ids) is torch.Tensor and model.training:
            output.logits.register_hook(fail)
        return output

    def failing_step(optimizer: Any, group: dict[str, Any], *args: Any) -> Any:
        return fail() if type(group["params"][0].data) is torch.Tensor else init_group(optimizer, group, *args)

    def check(model: torch.nn.Module, input_ids: torch.Tensor) -> None:
        if not model.training and len(input_ids) > above:
            fail()

    if moment == "backward":
        monkeypatch.setattr(DistilBertForSequenceClassification, "forward", failing_backward)
    elif moment == "step":
        init_group = torch.optim.AdamW._init_group
        monkeypatch.setattr(torch.optim.AdamW, "_init_group", failing_step)
    elif moment == "loading":
        monkeypatch.setattr(DistilBertForSequenceClassification, "to", fail)
    else:
        _before_forward(monkeypatch, check)


def _before_forward(monkeypatch: pytest.MonkeyPatch, check: Callable[[torch.nn.Module, torch.Tensor], None]) -> None:
    forward = DistilBertForSequenceClassification.forward

    def checked(model: torch.nn.Module, input_ids: torch.Tensor, **kwargs: Any) -> Any:
        if type(input_ids) is torch.Tensor:
            check(model, input_ids)
        return forward(model, input_ids, **kwargs)

    monkeypatch.setattr(DistilBertForSequenceClassification, "forward", checked)
