"""Which of several optimizers each setting is for. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from effcli.optim.entry import OptimizerEntry
from effcli.recipes import overlay
from effcli.units import listed

_EIGHT_BIT = ("keep_32bit", "min_8bit_size", "optim_bits", "is_sparse")


def shared_settings(
    optim: Mapping[str, Any], entries: Sequence[OptimizerEntry]
) -> tuple[tuple[dict[str, Any], ...], tuple[str, ...]]:
    """Return the settings of a section that each optimizer has, in their order, and what should be said about it.

    A setting goes to each of them that has it; which ones have not is said. One that none of them has stays with the
    first, whose hyperparameters are then refused.
    """
    taken: list[dict[str, Any]] = [{} for _ in entries]
    notes: list[str] = []
    for flag, key, setting in _settings(optim):
        having = [index for index, entry in enumerate(entries) if _has(entry, key)]
        for index in having or [0]:
            taken[index] = overlay(taken[index], setting)
        if having and len(having) < len(entries):
            without = [entry.name for index, entry in enumerate(entries) if index not in having]
            notes.append(f"{flag} is not for {listed(list(dict.fromkeys(without)))}.")
    return tuple(taken), tuple(notes)


def _settings(optim: Mapping[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield each setting as the user wrote it, its key, and the section that holds it alone."""
    for name, value in optim.items():
        if name == "args":
            for key, given in value.items():
                yield f"--optim-arg {key}={given}", key, {"args": {key: given}}
        elif name == "overrides":
            for pattern, pairs in value.items():
                for key, given in pairs.items():
                    yield f"--override {pattern}:{key}={given}", key, {"overrides": {pattern: {key: given}}}
        else:
            shown = " ".join(value) if isinstance(value, list | tuple) else value
            yield f"--{name.replace('_', '-')} {shown}", name, {name: value}


def _has(entry: OptimizerEntry, key: str) -> bool:
    if key == "weight_decay":
        return entry.takes_weight_decay
    return key in entry.defaults or (entry.eight_bit and key in _EIGHT_BIT)
