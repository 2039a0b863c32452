"""`OptimizerEntry`: one record for everything the program knows about one optimizer. No torch at import."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from effcli.optim.ranges import Range
from effcli.units import Basis, ParamInfo, StateTensor

if TYPE_CHECKING:
    import torch

Hyper = Mapping[str, Any]
"""Resolved hyperparameters: every default of the entry, overlaid with what the user gave.

`overrides` holds what differs for some parameters (see `effcli.optim.overrides`). 8-bit entries also carry
`optim_bits` and `min_8bit_size`. `lr` is None only where the optimizer sets its own learning rate.
"""

Groups = Sequence[Mapping[str, Any]]
"""Parameter groups: `params` (tensors), `names` and `hidden` (in the same order), `weight_decay`.

`hidden` says which parameters belong to the body of the model rather than to an embedding or the output head.
"""

Schedule = Literal["any", "constant", "own"]
"""Learning-rate schedules that an optimizer bears: any; only a constant one; none, since it computes its own rate."""


def _as_given(hyper: dict[str, Any], given: frozenset[str]) -> dict[str, Any]:
    return hyper


def _any_schedule(hyper: Hyper) -> Schedule:
    return "any"


Fault = Callable[[Hyper], str | None]
"""Hyperparameters -> why an optimizer does not run so, as a clause; None where it does."""


def runs_on_shards(hyper: Hyper) -> str | None:
    """Return that nothing is wrong: the `shard_fault` and the `flat_fault` of most."""
    return None


def never_on_shards(reason: str) -> Fault:
    """Return the `shard_fault` or `flat_fault` of an optimizer that never runs so, whatever its hyperparameters."""
    return lambda hyper: reason


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerEntry:
    """Everything the program knows about one optimizer."""

    name: str
    aliases: tuple[str, ...] = ()
    """Other names, among them those of the `optim` argument of transformers' Trainer."""
    summary: str
    law: str
    """What state one parameter gets, in words."""
    formula: str
    """Bytes of one parameter's own state as an arithmetic expression, in hyperparameters and these names.

    `n`: elements; `w`: bytes of one element of the weight (4 or 2); `dims`: number of dimensions; `rows`: product of
    all dimensions but the last; `columns`: product of all but the last but one; `hidden`: see `Groups`;
    `ceil`, `min`, `max`. Tables shared by all parameters are left out. Tests evaluate it.
    """
    source: str
    """Paper, and the upstream file and version that the state law was read from."""
    package: str | None = None
    """Python module that must import; None when torch alone is enough."""
    pip: str | None = None
    """What to give to `pip install` when it does not import."""
    devices: tuple[str, ...] = ("cpu", "cuda")
    """Device types on which its step runs."""
    defaults: Hyper
    """Hyperparameters with their default; the only ones accepted. A default of None means "a number, or none"."""
    hyper_help: Mapping[str, str] = field(default_factory=dict)
    """What a hyperparameter does, where its name alone doesn't say it."""
    ranges: Mapping[str, Range] = field(default_factory=dict)
    """What a hyperparameter may be, beside what `FLAGGED` says of those with a flag; None is always in range."""
    override_notes: Mapping[str, str] = field(default_factory=dict)
    """What should be said aloud where a hyperparameter is overridden for some parameters."""
    not_overridable: frozenset[str] = frozenset()
    """Hyperparameters that upstream reads once for all parameters, so that an override would have no effect."""
    bits: Literal[8, 32] | None = None
    """What `--optim-bits` is when not given; None where the state has no 8-bit form that it could choose."""
    takes_weight_decay: bool = True
    settle: Callable[[dict[str, Any], frozenset[str]], dict[str, Any]] = _as_given
    """Hyperparameters and the names that the user gave -> final hyperparameters. Raises UsageError for conflicts."""
    schedule: Callable[[Hyper], Schedule] = _any_schedule
    """Which learning-rate schedules it bears with these hyperparameters."""
    rule_of_thumb_bytes: Callable[[int, Hyper], int] | None = None
    """Number of trained parameters, hyperparameters -> bytes by the rule people quote, where there is one."""
    build: Callable[[Groups, Hyper], torch.optim.Optimizer]
    """Parameter groups and hyperparameters -> optimizer. Leaves the groups alone; a repeated parameter counts once."""
    state_layout: Callable[[ParamInfo, Hyper], tuple[StateTensor, ...]]
    """One trainable parameter and its hyperparameters (overrides applied) -> its state after the first update, in
    upstream's order."""
    step_workspace: Callable[[ParamInfo, Hyper, str], tuple[int, ...]] | None = None
    """One trainable parameter, its hyperparameters with `weight_decay`, and cpu or cuda -> bytes of the storages that
    live together, beside gradient and state, at the highest moment of its update. None where a step can be traced."""
    basis: Basis = Basis.EXACT
    """Where the layout comes from: a law, or a probe of the class."""
    paged_from: int | None = None
    """Elements of a parameter from which its state is paged on CUDA; None where none ever is."""
    cpu_note: str | None = None
    """What differs on a CPU and should be said aloud."""
    shard_fault: Fault = runs_on_shards
    """Why it cannot train parameters that torch's `fully_shard` has cut up, as a clause; None where it can.

    Where it can, its state is `state_layout` of the shards. Each one was tried with torch 2.13.
    """
    flat_fault: Fault = runs_on_shards
    """Why it fails on the flat partitions of DeepSpeed's ZeRO, or is another there; see `effcli.optim.flat`."""

    @property
    def eight_bit(self) -> bool:
        """Return whether `--optim-bits`, `--min-8bit-size` and `--keep-32bit` mean something to it."""
        return self.bits is not None
