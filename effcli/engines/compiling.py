"""`--compile`: the model's forward and backward through `torch.compile`, the same for every engine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from effcli.errors import DeviceError, first_line

SETTINGS: dict[str, Any] = {"backend": "inductor", "dynamic": True, "options": {"fallback_random": True}}
"""Keyword arguments of `torch.compile`. Lengths differ from batch to batch, so sizes are symbols from the start: else
each new length would be compiled until torch gives up (`recompile_limit`). Dropout draws what it draws uncompiled."""


@contextmanager
def compiled(model: torch.nn.Module) -> Iterator[None]:
    """Compile `model.forward`, and put it back afterwards.

    Names of weights stay as they are, since no module is wrapped. Hooks on the model stay outside what is compiled, and
    so does the autocast of an engine, which decides the dtypes inside.
    """
    vars(model)["forward"] = torch.compile(model.forward, **SETTINGS)
    try:
        yield
    finally:
        vars(model).pop("forward", None)


def check_compiles(device: torch.device) -> None:
    """Compile one addition on `device`: what is missing shows before anything is read.

    Raises:
        DeviceError: `torch.compile` fails here, or is switched off.
    """

    def probe(tensor: torch.Tensor) -> torch.Tensor:
        return tensor + int(torch.compiler.is_compiling())

    try:
        done = bool(torch.compile(probe, **SETTINGS)(torch.zeros(2, device=device)).all())
    except Exception as error:  # torch raises whatever a backend or a compiler raises
        needs = "a C++ compiler such as g++ (CXX names another)" if device.type == "cpu" else "Triton and a C compiler"
        raise DeviceError(
            f"--compile: torch {torch.__version__} cannot compile for {device.type} here ({first_line(error)}). "
            f"It needs {needs}; install what is missing, or leave --compile out"
        ) from error
    if not done:
        raise DeviceError(
            "--compile: torch.compile is switched off here, by TORCHDYNAMO_DISABLE, TORCH_COMPILE_DISABLE or "
            "torch.compiler.set_stance; switch it on, or leave --compile out"
        )
