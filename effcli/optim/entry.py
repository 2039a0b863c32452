"""`OptimizerEntry`: one record for everything the program knows about one optimizer. No torch at import."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from effcli.units import ParamInfo, StateTensor

if TYPE_CHECKING:
    import torch

Hyper = Mapping[str, Any]
"""Resolved hyperparameters: every default of the entry, overlaid with what the user gave.

8-bit entries also carry `min_8bit_size: int` and `keep_32bit: tuple[str, ...]`. `lr` is None only where the optimizer
sets its own learning rate.
"""

Groups = Sequence[Mapping[str, Any]]
"""Parameter groups: `params` (tensors), `names` (in the same order) and `weight_decay`."""


def _as_given(hyper: dict[str, Any], given: frozenset[str]) -> dict[str, Any]:
    return hyper


def _never(hyper: Hyper) -> bool:
    return False


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerEntry:
    """Everything the program knows about one optimizer."""

    name: str
    aliases: tuple[str, ...] = ()
    """Other names, among them those of the `optim` argument of transformers' Trainer."""
    summary: str
    source: str
    """Paper, and the upstream file and version that the state law was read from."""
    package: str | None = None
    """Python module that must import; None when torch alone is enough."""
    pip: str | None = None
    """What to give to `pip install` when it does not import."""
    defaults: Hyper
    """Hyperparameters with their default; the only ones accepted. A default of None means "a number, or none"."""
    hyper_help: Mapping[str, str] = field(default_factory=dict)
    """What a hyperparameter does, where its name alone doesn't say it."""
    eight_bit: bool = False
    """Whether `--min-8bit-size` and `--keep-32bit` mean something to it."""
    settle: Callable[[dict[str, Any], frozenset[str]], dict[str, Any]] = _as_given
    """Hyperparameters and the names that the user gave -> final hyperparameters. Raises UsageError for conflicts."""
    drives_own_lr: Callable[[Hyper], bool] = _never
    """Whether the optimizer computes its own learning rate, so that no schedule may be added."""
    rule_of_thumb_bytes: Callable[[int], int] | None = None
    """Number of parameters -> bytes by the rule people quote, where there is one."""
    build: Callable[[Groups, Hyper], torch.optim.Optimizer]
    """Parameter groups and hyperparameters -> optimizer. Leaves the groups alone; a repeated parameter counts once."""
    state_layout: Callable[[ParamInfo, Hyper], tuple[StateTensor, ...]]
    """One trainable parameter and hyperparameters -> its state after the first update, in upstream's order."""
    probe: Callable[[str], None] | None = None
    """Device name -> one tiny real step on that device, where a backend can be missing."""
    cpu_note: str | None = None
    """What differs on a CPU and should be said aloud."""
