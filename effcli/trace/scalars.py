"""Answers to code that reads a number out of a tensor, which fake tensors don't have."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch

_MADE_BY: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
_SUM_OF: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


def scalar_answer(tensor: torch.Tensor, *, padded: bool) -> bool | int | float:
    """Return the number that a batch in an ordinary update would give.

    Of a mask without padding `all` holds; `any` and comparisons, such as the one that draws dropped layers, do not.
    Other numbers are 1, so that norms and step counts can be divided by.
    """
    if tensor.dtype is torch.bool:
        return not padded and _MADE_BY.get(tensor.untyped_storage()) == "all"
    return 1.0 if tensor.is_floating_point() else 1


def note_truth(operator: Any, args: Sequence[Any], result: Any) -> None:
    """Remember which operator made a truth value. A sum of truths that is compared with their number says `all`."""
    if not isinstance(result, torch.Tensor) or result.ndim:
        return
    name = operator._opname
    if name == "sum" and args[0].dtype is torch.bool:
        _SUM_OF[result.untyped_storage()] = args[0].numel()
    elif result.dtype is torch.bool:
        compared = name == "eq" and _SUM_OF.get(args[0].untyped_storage()) == args[1]
        _MADE_BY[result.untyped_storage()] = "all" if compared else name
