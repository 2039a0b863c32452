"""Mixed precision: which dtype autocast runs in."""

from __future__ import annotations

import torch

from effcli.devices import autocast_dtype


def autocast(device: torch.device, precision: str) -> torch.autocast:
    """Return the autocast context of `precision`; disabled for `fp32` and `bf16-pure`."""
    dtype = autocast_dtype(precision)
    return torch.autocast(device.type, dtype=dtype and getattr(torch, dtype), enabled=dtype is not None)
