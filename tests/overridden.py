"""Two equal matrices, one of which gets overrides, and what becomes of them."""

from __future__ import annotations

import torch

from effcli.measure.optimizer_size import inspect_optimizer
from effcli.memory.state import predict_state
from effcli.models.build import parameter_infos
from effcli.optim.groups import decay_groups
from effcli.optim.registry import find
from tests.tiny_models import set_gradients


def two_matrices() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.ModuleDict({name: torch.nn.Linear(64, 65, bias=False) for name in ("plain", "special")})


def updated(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    gradients = [torch.randn_like(param) for param in model.parameters()]
    for step in range(steps):
        for param, gradient in zip(model.parameters(), gradients, strict=True):
            param.grad = gradient * (-0.5) ** step
        optimizer.step()
    return {name: param.detach().clone() for name, param in model.named_parameters()}


def state_bytes(name: str, model: torch.nn.Module, hyper) -> tuple[int, int]:
    """Return predicted and measured bytes."""
    optimizer = find(name).build(decay_groups(model, 0.01), hyper)
    set_gradients(model)
    optimizer.step()
    return predict_state(find(name), parameter_infos(model), hyper).state_bytes, inspect_optimizer(
        optimizer
    ).state_bytes
