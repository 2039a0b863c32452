"""Mixed precision: which dtype autocast runs in."""

from __future__ import annotations

import torch

AUTOCAST_DTYPE = {"bf16": torch.bfloat16, "fp16": torch.float16}


def autocast(device: torch.device, precision: str) -> torch.autocast:
    """Return the autocast context of `precision`; disabled for `fp32` and `bf16-pure`."""
    dtype = AUTOCAST_DTYPE.get(precision)
    return torch.autocast(device.type, dtype=dtype, enabled=dtype is not None)
