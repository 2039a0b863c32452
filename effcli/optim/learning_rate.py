"""The learning rate that an optimizer really uses, also where it sets its own. Needs torch."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler


def current_lr(optimizer: torch.optim.Optimizer) -> float:
    """Return the learning rate of the last update (before the first: of the first), read before any schedule advances.

    With relative steps each parameter of transformers' Adafactor has its own rate; like its `AdafactorSchedule` this
    reads the first parameter that has a state, in the first group.
    """
    inner = getattr(optimizer, "optimizer", optimizer)
    return _group_lr(inner, inner.param_groups[0])


def _group_lr(optimizer: Any, group: dict[str, Any]) -> float:
    if not group.get("relative_step"):
        # Schedule-free optimizers warm up by themselves and note what they used; 0.0 means no update yet.
        return float(group.get("scheduled_lr") or group["lr"])
    param = next((p for p in group["params"] if optimizer.state.get(p)), group["params"][0])
    state = optimizer.state.get(param) or {"step": 1, "RMS": _rms(param)}
    return float(optimizer._get_lr(group, state))  # the function that `Adafactor.step` calls, transformers 5.24


def _rms(param: torch.Tensor) -> float:
    return float(param.detach().float().square().mean().sqrt())


class OwnRateSchedule(LRScheduler):  # type: ignore[misc, unused-ignore]
    """Stands in for a schedule where the optimizer sets its own rate: `get_last_lr` is what the last update used."""

    def get_lr(self) -> list[float | torch.Tensor]:
        """Return one rate per group; none of them influences the optimizer."""
        return [_group_lr(self.optimizer, group) for group in self.optimizer.param_groups]
