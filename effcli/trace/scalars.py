"""Answers to code that reads a number out of a tensor, which fake tensors don't have."""

from __future__ import annotations

import weakref
from typing import Any

import torch

_MADE_BY: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()


def scalar_answer(tensor: torch.Tensor, *, padded: bool) -> bool | int | float:
    """Return the number that a batch in an ordinary update would give.

    Of a mask without padding `all` holds; `any` and comparisons, such as the one that draws dropped layers, do not.
    Other numbers are 1, so that norms and step counts can be divided by.
    """
    if tensor.dtype is torch.bool:
        return not padded and _MADE_BY.get(tensor.untyped_storage()) == "all"
    return 1.0 if tensor.is_floating_point() else 1


def note_truth(operator: Any, result: Any) -> None:
    """Remember which operator made a truth value."""
    if isinstance(result, torch.Tensor) and result.dtype is torch.bool and result.ndim == 0:
        _MADE_BY[result.untyped_storage()] = operator._opname
