"""How upstream's constructors are called: parameter groups and keyword arguments from hyperparameters. No torch."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from effcli.optim.entry import Groups, Hyper
from effcli.optim.groups import upstream_groups

if TYPE_CHECKING:
    import torch

Arguments = Callable[[Hyper], Mapping[str, Any]]
"""Hyperparameters -> keyword arguments of upstream's constructor."""


def builder(
    module: str,
    class_name: str,
    arguments: Arguments,
    *,
    for_all: Arguments | None = None,
    finish: Callable[[Any, Hyper], None] | None = None,
) -> Callable[[Groups, Hyper], torch.optim.Optimizer]:
    """Return the `build` of a class of `module`, which is imported by the call.

    `arguments` are options of a parameter group too, so that overrides can change them; `for_all` are the
    constructor's alone. `finish` prepares the new optimizer.
    """

    def build(groups: Groups, hyper: Hyper) -> torch.optim.Optimizer:
        upstream = getattr(importlib.import_module(module), class_name)
        fixed = for_all(hyper) if for_all is not None else {}
        optimizer: torch.optim.Optimizer = upstream(
            upstream_groups(groups, hyper, arguments), **arguments(hyper), **fixed
        )
        if finish is not None:
            finish(optimizer, hyper)
        return optimizer

    return build


def named(*names: str) -> Callable[[Hyper], dict[str, Any]]:
    """Return the function that takes the hyperparameters `names` as they are for upstream's keyword arguments."""
    return lambda hyper: {name: hyper[name] for name in names}


def with_betas(*names: str, count: int = 2) -> Callable[[Hyper], dict[str, Any]]:
    """Return the function that takes `lr`, `count` betas as a tuple and the further hyperparameters `names`."""
    return lambda hyper: {
        "betas": tuple(hyper[f"beta{number}"] for number in range(1, count + 1)),
        **named("lr", *names)(hyper),
    }
