"""`--compile`: the model's layers through `torch.compile`, forward and backward, the same for every engine."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers.modeling_layers import GradientCheckpointingLayer

from effcli.errors import DeviceError, first_line

SETTINGS: dict[str, Any] = {"backend": "inductor", "dynamic": True, "options": {"fallback_random": True}}
"""Keyword arguments of `torch.compile`. Lengths differ from batch to batch, so sizes are symbols from the start: else
each new length would be compiled until torch gives up. Dropout draws what it draws uncompiled."""

_VARIANTS = 64
"""Times that one layer's code may be compiled: for training and evaluation, batches of one row, and kinds of layers
with the same code (T5 has four). Torch stops at 8, and goes on uncompiled."""


@contextmanager
def compiled(model: torch.nn.Module) -> Iterator[None]:
    """Compile the repeated layers of `model`, which share kernels, or all of it where transformers marks none.

    Afterwards it is as before. Names of weights never change, since no module is wrapped. What is around a layer stays
    outside: hooks, the autocast of an engine, and the recomputing of activations, inside which torch 2.13 fails on
    GPT-2 when sizes vary.
    """
    regions = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)] or [model]
    for region in regions:
        vars(region)["forward"] = torch.compile(region.forward, **SETTINGS)
    try:
        with torch._dynamo.config.patch(recompile_limit=_VARIANTS), warnings.catch_warnings():
            # The compiler reads `grad` of what goes into a layer, and torch warns of that (2.13).
            warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
            yield
    finally:
        for region in regions:
            vars(region).pop("forward", None)


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
        why = first_line(getattr(error, "inner_exception", error))  # torch's own text begins with the backend
        raise DeviceError(
            f"--compile: torch {torch.__version__} cannot compile for {device.type} here ({why}). "
            f"It needs {needs}; install what is missing, or leave --compile out"
        ) from error
    if not done:
        raise DeviceError(
            "--compile: torch.compile is switched off here, by TORCHDYNAMO_DISABLE, TORCH_COMPILE_DISABLE or "
            "torch.compiler.set_stance; switch it on, or leave --compile out"
        )
