"""What a fresh process tries: torch as it was built, a training step on a device, a step of an optimizer. Torch inside.

All return values that JSON has.
"""

from __future__ import annotations

import math
import os
import shutil
import warnings
from typing import TYPE_CHECKING, Any

from effcli.devices import activate, has_cuda, is_cpu_build, resolve_device
from effcli.errors import DeviceError, first_line
from effcli.optim import registry

if TYPE_CHECKING:
    import torch

_ROWS, _WIDTH, _LABELS = 8, 64, 2
_SAME_LOSS = 1e-2
"""Largest relative difference of a device's loss from the processor's: matrix products may round to 11 bits (TF32)."""


def torch_build() -> dict[str, Any]:
    """Return torch's versions, the devices that it sees, and why it sees none."""
    import torch

    with warnings.catch_warnings(record=True) as said:  # where CUDA does not start, torch warns and finds no device
        warnings.simplefilter("always")
        found = has_cuda()
        devices = [_device(index) for index in range(torch.cuda.device_count())] if found else []
    return {
        "version": torch.__version__,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "kernels": torch.cuda.get_arch_list() if found else [],
        "devices": devices,
        "why_none": "" if found else _why_none([str(warning.message) for warning in said]),
    }


def _why_none(said: list[str]) -> str:
    """Return the first line of what torch has against using CUDA; empty for a build without it."""
    import torch

    if is_cpu_build():
        return ""
    if said:
        return said[0].strip().splitlines()[0]
    try:
        torch.cuda.init()
    except Exception as error:  # torch raises several kinds
        return first_line(error)
    return "torch finds no device"


def _device(index: int) -> dict[str, Any]:
    """Return a device by torch's index, its identifier without the driver's prefix; what cannot be asked is None."""
    import torch

    try:
        facts = torch.cuda.get_device_properties(index)
    except Exception as error:  # torch raises several kinds
        return {"index": index, "failure": first_line(error)}
    return {
        "index": index,
        "name": facts.name,
        "uuid": str(getattr(facts, "uuid", "")) or None,
        "capability": f"{facts.major}.{facts.minor}",
        "bf16": torch.version.hip is not None or facts.major >= 8,  # is_bf16_supported would take memory of the card
        "unified": bool(getattr(facts, "is_integrated", False)),
        "total_bytes": int(facts.total_memory),
    }


def step_on_device(device: str) -> dict[str, Any]:
    """Return on which device a tiny classifier made a training step with AdamW, and the name of a card.

    Raises:
        DeviceError: the device is not there.
        RuntimeError: the step fails, changes nothing, or computes something else than a processor does.
    """
    import torch

    chosen = resolve_device(device)
    activate(chosen)
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(_WIDTH, _WIDTH), torch.nn.LayerNorm(_WIDTH), torch.nn.GELU(), torch.nn.Linear(_WIDTH, _LABELS)
    )
    rows, labels = torch.rand(_ROWS, _WIDTH), torch.arange(_ROWS) % _LABELS
    expected = float(torch.nn.functional.cross_entropy(model(rows), labels).detach())
    losses = losses_around_step(model.to(chosen), rows.to(chosen), labels.to(chosen))
    if not math.isclose(losses[0], expected, rel_tol=_SAME_LOSS):
        raise RuntimeError(f"its loss is {losses[0]:.6g}, where a processor computes {expected:.6g}")
    if not math.isfinite(losses[1]) or losses[1] == losses[0]:
        raise RuntimeError(f"its step trained nothing: the loss was {losses[0]:.6g}, then {losses[1]:.6g}")
    return {"device": str(chosen), "name": torch.cuda.get_device_name(chosen) if chosen.type == "cuda" else None}


def losses_around_step(model: torch.nn.Module, rows: torch.Tensor, labels: torch.Tensor) -> tuple[float, float]:
    """Return the loss before and after one step of AdamW."""
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    before = torch.nn.functional.cross_entropy(model(rows), labels)
    before.backward()
    optimizer.step()
    after = torch.nn.functional.cross_entropy(model(rows), labels)
    return float(before.detach()), float(after.detach())


def step_of_optimizer(name: str, device: str) -> dict[str, Any]:
    """Return on which device an optimizer made a step on 4,096 elements; on a CPU where `device` is not there.

    Nothing is compiled: on CUDA torchao's compiled step takes tens of seconds, and a C compiler, which is looked for.

    Raises:
        MissingExtraError: its package is not installed.
        DeviceError: it cannot make a step.
    """
    import torch

    entry, not_on = registry.find(name), ""
    try:
        chosen = resolve_device(device)
    except DeviceError:
        chosen, not_on = torch.device("cpu"), device
    activate(chosen)
    with torch.compiler.set_stance("force_eager"):
        registry.check_works(entry, str(chosen))
    return {"device": str(chosen), "not_on": not_on, "has_compiler": _has_compiler()}


def _has_compiler() -> bool:
    """Return whether there is a C compiler where Triton looks for one (triton/runtime/build.py, 3.x)."""
    return bool(os.environ.get("CC") or shutil.which("clang") or shutil.which("gcc"))
