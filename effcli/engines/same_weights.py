"""Whether all processes of a run hold the same weights."""

from __future__ import annotations

import torch

from effcli.ranks.group import gathered

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers that are as wide as an element."""


def first_that_differs(model: torch.nn.Module) -> tuple[int, str] | None:
    """Return the first rank that has not the weights of rank 0, and a parameter's name; None where all are the same.

    Collective.
    """
    of_all = gathered(sums_of_bits(model))
    for rank, sums in enumerate(of_all):
        for name, number in of_all[0].items():
            if sums.get(name) != number:
                return rank, name
    return None


def sums_of_bits(model: torch.nn.Module) -> dict[str, int]:
    """Return for each parameter of this process the sum of its elements' bits, taken for integers."""
    names, sums = [], []
    for name, parameter in model.named_parameters():
        bits = parameter.detach().contiguous().flatten().view(_INTEGERS[parameter.element_size()])
        names.append(name)
        sums.append(bits.sum(dtype=torch.int64))
    return dict(zip(names, torch.stack(sums).tolist() if sums else [], strict=True))
