"""An optimizer by its laws, in place of one that cannot step without data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from effcli.optim.entry import Hyper, OptimizerEntry
from effcli.optim.overrides import hyper_for
from effcli.units import ParamInfo, Placement


class StandIn(torch.optim.Optimizer):
    """Takes for each parameter in turn the state of its first step, and for the time of a step its workspace."""

    def __init__(
        self,
        groups: Sequence[Mapping[str, Any]],
        entry: OptimizerEntry,
        params: Mapping[str, ParamInfo],
        hyper: Hyper,
        device: str,
    ) -> None:
        super().__init__([dict(group) for group in groups], {})
        self._entry, self._params, self._hyper, self._device = entry, params, hyper, device
        self._shared: set[str] = set()

    def step(self, closure: None = None) -> None:
        """Make one step."""
        for group in self.param_groups:
            for name, parameter in zip(group["names"], group["params"], strict=True):
                own = {"weight_decay": group["weight_decay"], **hyper_for(name, self._hyper)}
                if parameter not in self.state:
                    self.state[parameter] = self._new_state(self._params[name], own)
                self._use_workspace(self._params[name], own)

    def _use_workspace(self, param: ParamInfo, hyper: Hyper) -> None:
        if self._entry.step_workspace is not None:
            sizes = self._entry.step_workspace(param, hyper, self._device)
            together = [_taken(num_bytes) for num_bytes in sizes]
            del together

    def _new_state(self, param: ParamInfo, hyper: Hyper) -> dict[str, torch.Tensor]:
        state: dict[str, torch.Tensor] = {}
        for number, tensor in enumerate(self._entry.state_layout(param, hyper)):
            here = self._device == "cpu" or tensor.placement is Placement.DEVICE
            if not here or not tensor.num_bytes or (tensor.shared and tensor.key in self._shared):
                continue
            if tensor.shared:
                self._shared.add(tensor.key)
            state[f"{tensor.key}.{number}"] = _taken(tensor.num_bytes)
        return state


def _taken(num_bytes: int) -> torch.Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8, device="meta")
