"""fp16 where there is no CUDA: torch casts and scales on a CPU too, and nobody but the check of the device minds."""

from __future__ import annotations

import functools
from typing import Any

import accelerate
import pytest
import torch


def scale_on_cpu(monkeypatch: pytest.MonkeyPatch, **settings: Any) -> None:
    """Let fp16 run on a CPU with torch's scaler, made with these settings; in accelerate too, which makes none."""
    scaler = functools.partial(torch.amp.GradScaler, **settings)
    monkeypatch.setattr(torch.amp, "GradScaler", scaler)
    monkeypatch.setattr("effcli.pipeline.settling.check_precision", lambda *_: None)
    init = accelerate.Accelerator.__init__

    def init_with_scaler(self, *args, **kwargs) -> None:
        init(self, *args, **kwargs)
        if self.mixed_precision == "fp16":
            self.native_amp, self.scaler = True, scaler("cpu")

    monkeypatch.setattr(accelerate.Accelerator, "__init__", init_with_scaler)
