"""Muon and AdamW as one optimizer object. Needs torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class MuonWithAdamW(torch.optim.Optimizer):  # type: ignore[misc, unused-ignore]
    """Steps groups with `use_muon` by `torch.optim.Muon`, the others by `torch.optim.AdamW`.

    The two inner optimizers work on the very group dicts and the very state of this object, so that a schedule, a
    `state_dict` and whatever wraps an optimizer need to know this one only; its step hooks run once per step. A group
    brings its options with it.
    """

    def __init__(self, groups: list[dict[str, Any]], *, lr: float) -> None:
        super().__init__(groups, {"lr": lr, "use_muon": False})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; without `use_muon` it is AdamW's."""
        super().add_param_group(param_group)
        self._share()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take over loaded groups and state: `load_state_dict` puts new objects in the place of the old ones."""
        super().__setstate__(state)
        self._share()

    def _share(self) -> None:
        """Make inner optimizers that hold this object's groups and state; they fill in options that a group lacks."""
        self._inner: list[torch.optim.Optimizer] = []
        for use_muon, inner_class in ((True, torch.optim.Muon), (False, torch.optim.AdamW)):
            groups = [group for group in self.param_groups if group["use_muon"] is use_muon]
            if groups:
                inner = inner_class(groups)
                inner.state = self.state
                self._inner.append(inner)

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Make one update of every group; `closure` computes the loss and gradients anew."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for inner in self._inner:
            inner.step()
        return loss
