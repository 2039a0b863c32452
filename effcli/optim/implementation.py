"""Which of its implementations an optimizer of torch steps with, since they differ in memory. No torch at import.

A for-loop updates one parameter after another. foreach updates all at once by horizontally fused operators, and holds
lists of temporaries as large as the model; a fused kernel does without them. By default torch takes foreach on CUDA and
the loop on a CPU (`_default_to_fused_or_foreach` in torch/optim/optimizer.py, 2.13).
"""

from __future__ import annotations

from effcli.errors import UsageError
from effcli.optim.entry import Hyper, OptimizerEntry
from effcli.optim.ranges import Range, one_of

NAME = "implementation"
DEFAULT = {NAME: "auto"}
HELP = {NAME: "foreach holds temporaries as large as the weights; auto is foreach on CUDA and for-loop on a CPU"}
WITH_FUSED: dict[str, Range] = {NAME: one_of("auto", "foreach", "for-loop", "fused")}
WITHOUT_FUSED: dict[str, Range] = {NAME: one_of("auto", "foreach", "for-loop")}

_KEYWORDS = {
    "auto": {},
    "foreach": {"foreach": True},
    "for-loop": {"foreach": False},
    "fused": {"fused": True},
}


def keywords(hyper: Hyper) -> dict[str, bool]:
    """Return upstream's keyword arguments for the implementation that was asked for."""
    return _KEYWORDS[hyper[NAME]]


def fused_fault(hyper: Hyper) -> str | None:
    """Return why the fused kernel does not run on shards, where torch 2.13 has that of Adam alone; else None."""
    return "its fused kernel takes plain tensors; its other implementations run" if hyper[NAME] == "fused" else None


def has_implementation(entry: OptimizerEntry, implementation: str) -> bool:
    """Return whether the optimizer can be told to step with `implementation`."""
    return NAME in entry.defaults and entry.ranges[NAME].accepts(implementation)


def with_implementation(entry: OptimizerEntry, hyper: Hyper, implementation: str) -> Hyper:
    """Return the hyperparameters with another implementation.

    Raises:
        UsageError: the optimizer cannot be told to step with it.
    """
    if not has_implementation(entry, implementation):
        allowed = entry.ranges[NAME].text if NAME in entry.defaults else "none that could be chosen"
        raise UsageError(f"optimizer '{entry.name}' has no {implementation} implementation; it has {allowed}")
    return {**hyper, NAME: implementation}
