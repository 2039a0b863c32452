"""An optimizer by its laws, in place of one that cannot step without data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from effcli.optim.entry import Hyper, OptimizerEntry
from effcli.optim.overrides import hyper_for
from effcli.units import ParamInfo, Placement, StateTensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Laws:
    """What each parameter keeps on the device from its first step on, and the bytes a step takes for a while."""

    state: Mapping[str, tuple[StateTensor, ...]]
    workspace: Mapping[str, tuple[int, ...]]


def laws_of(
    entry: OptimizerEntry, params: Mapping[str, ParamInfo], decays: Mapping[str, float], hyper: Hyper, device: str
) -> Laws:
    """Return the entry's laws for the parameters by name; `decays` are their weight decays."""
    own = {name: hyper_for(name, hyper) for name in params}
    state = {name: entry.state_layout(param, own[name]) for name, param in params.items()}
    workspace: dict[str, tuple[int, ...]] = {}
    if entry.step_workspace is not None:
        for name, param in params.items():
            workspace[name] = entry.step_workspace(param, {"weight_decay": decays[name], **own[name]}, device)
    return Laws(
        state={
            name: tuple(tensor for tensor in layout if device == "cpu" or tensor.placement is Placement.DEVICE)
            for name, layout in state.items()
        },
        workspace=workspace,
    )


class StandIn(torch.optim.Optimizer):
    """Takes for each parameter in turn the state of its first step, and for the time of a step its workspace."""

    def __init__(self, groups: Sequence[Mapping[str, Any]], laws: Laws) -> None:
        super().__init__([dict(group) for group in groups], {})
        self._laws = laws
        self._shared: set[str] = set()

    def step(self, closure: None = None) -> None:
        """Make one step."""
        for group in self.param_groups:
            for name, parameter in zip(group["names"], group["params"], strict=True):
                if parameter not in self.state:
                    self.state[parameter] = self._new_state(name)
                self._use_workspace(name)

    def _use_workspace(self, name: str) -> None:
        together = [_taken(num_bytes) for num_bytes in self._laws.workspace.get(name, ())]
        del together

    def _new_state(self, name: str) -> dict[str, torch.Tensor]:
        state: dict[str, torch.Tensor] = {}
        for number, tensor in enumerate(self._laws.state[name]):
            if not tensor.num_bytes or (tensor.shared and tensor.key in self._shared):
                continue
            if tensor.shared:
                self._shared.add(tensor.key)
            state[f"{tensor.key}.{number}"] = _taken(tensor.num_bytes)
        return state


def _taken(num_bytes: int) -> torch.Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8, device="meta")
