"""Marks which module runs, and where the elements of a list of layers begin, forward and backward."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from effcli.memory.tape import END
from effcli.trace.recorder import Recorder


@contextmanager
def watched(model: torch.nn.Module, recorder: Recorder, layers: Mapping[str, torch.nn.ModuleList]) -> Iterator[None]:
    """Keep the recorder's `source` at the innermost module that runs, and mark the elements of `layers`, while open.

    In the backward pass an element begins where the gradient of its output is complete and ends where that of its
    input is. A recomputation within the backward pass makes no marks.
    """
    names = {module: name for name, module in model.named_modules()}
    running: list[str] = []

    def enter(module: torch.nn.Module, args: Any) -> None:
        running.append(recorder.source)
        recorder.source = names.get(module, recorder.source)

    def leave(module: torch.nn.Module, args: Any, output: Any) -> None:
        recorder.source = running.pop()

    with ExitStack() as hooks:
        for name, elements in layers.items():
            for index, element in enumerate(elements):
                _mark_element(element, name, index, recorder, hooks)
        hooks.callback(torch.nn.modules.module.register_module_forward_pre_hook(enter).remove)
        hooks.callback(torch.nn.modules.module.register_module_forward_hook(leave, always_call=True).remove)
        yield


def _mark_element(element: torch.nn.Module, name: str, index: int, recorder: Recorder, hooks: ExitStack) -> None:
    path = f"{name}.{index}"

    def begin_backward(gradient: torch.Tensor) -> None:
        recorder.mark(name, index)
        recorder.source = path

    def end_backward(gradient: torch.Tensor) -> None:
        recorder.mark(END + name, index)
        if recorder.source == path:  # the element before it may have begun already
            recorder.source = ""

    def enter(module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        if recorder.in_backward:
            return
        recorder.mark(name, index)
        entering = _first_tensor((*args, *kwargs.values()))
        if entering is not None and entering.requires_grad:
            entering.register_hook(end_backward)

    def leave(module: torch.nn.Module, args: Any, output: Any) -> None:
        if recorder.in_backward:
            return
        recorder.mark(END + name, index)
        leaving = _first_tensor(output if isinstance(output, tuple) else (output,))
        if leaving is not None and leaving.requires_grad:
            leaving.register_hook(begin_backward)

    hooks.callback(element.register_forward_pre_hook(enter, with_kwargs=True).remove)
    hooks.callback(element.register_forward_hook(leave).remove)


def _first_tensor(values: Any) -> torch.Tensor | None:
    return next((value for value in values if isinstance(value, torch.Tensor) and value.is_floating_point()), None)
