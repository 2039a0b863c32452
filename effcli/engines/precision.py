"""Mixed precision: which dtype autocast runs in, and whether fp16 is scaled."""

from __future__ import annotations

import torch

from effcli.devices import autocast_dtype
from effcli.engines.base import Loop
from effcli.errors import DeviceError


def autocast(device: torch.device, precision: str) -> torch.autocast:
    """Return the autocast context of `precision`; disabled for `fp32` and `bf16-pure`."""
    dtype = autocast_dtype(precision)
    return torch.autocast(device.type, dtype=dtype and getattr(torch, dtype), enabled=dtype is not None)


def check_scaler(loop: Loop, scaler: torch.amp.GradScaler | None) -> None:
    """Refuse fp16 that a library would leave out: on a CPU accelerate 1.15 takes it and neither casts nor scales.

    Raises:
        DeviceError: fp16 was asked for and there is no scaler.
    """
    if loop.precision == "fp16" and scaler is None:
        raise DeviceError(
            f"--precision fp16: accelerate computes in fp32 on {loop.device.type}; use --precision bf16 or fp32"
        )
