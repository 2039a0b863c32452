"""Registry of optimizers: one record each, holding how it is built and what state it will allocate. No torch at import."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from effcli.units import ParamInfo, StateTensor

if TYPE_CHECKING:
    import torch

Scalar = bool | int | float | str
Hyper = Mapping[str, Any]
"""Resolved hyperparameters: every default of the entry, overlaid with what the user gave. Always holds `lr`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerEntry:
    """Everything the program knows about one optimizer."""

    name: str
    aliases: tuple[str, ...] = ()
    summary: str
    source: str
    """Paper, and the upstream file and version that the state law was read from."""
    package: str | None = None
    """Python module that must import; None when torch alone is enough."""
    pip: str | None = None
    """What to type when it does not import."""
    defaults: Hyper
    """Hyperparameters with their default; the only ones accepted."""
    rule_of_thumb_bytes: Callable[[int], int] | None = None
    """Number of parameters -> bytes by the rule people quote, where there is one."""
    build: Callable[[Sequence[dict[str, Any]], Hyper], torch.optim.Optimizer]
    """Parameter groups (`params`, `weight_decay`, `names`) and hyperparameters -> optimizer."""
    state_layout: Callable[[ParamInfo, Hyper], tuple[StateTensor, ...]]
    """One trainable parameter and hyperparameters -> its state after the first update."""
