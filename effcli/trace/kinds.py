"""Plain words for what a storage is, from the operator that made it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

DROPOUT = "dropout masks"
ATTENTION = "attention"
LOGITS = "logits and loss"
COPIES = "autocast copies of weights"
LAYERS = "layer activations"
RECOMPUTED = "recomputed activations"
UPSTREAM = "gradients of activations"
GRADIENTS = "gradients"
COPIED = "copied gradients"
BATCH = "batch"
LIBRARY = "cuBLAS workspaces"

_ATTENTION = frozenset(
    {
        "_softmax",
        "_safe_softmax",
        "bmm",
        "baddbmm",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
    }
)


def kind_of(func: Any, args: Sequence[Any], made: torch.Tensor, *, in_backward: bool, source: str) -> str:
    """Return the kind of the storage behind `made`, which `func` returned."""
    name = func._opname if hasattr(func, "_opname") else str(func)
    if in_backward and not torch.is_grad_enabled():
        return COPIED if name in ("clone", "new_empty_strided") else UPSTREAM
    if name == "native_dropout" and made.dtype is torch.bool:
        return DROPOUT
    if name == "_to_copy" and isinstance(args[0], torch.nn.Parameter):
        return COPIES
    if source == LOGITS:
        return LOGITS
    if in_backward:
        return RECOMPUTED
    return ATTENTION if name in _ATTENTION else LAYERS


def relabelled(func: Any) -> str | None:
    """Return the kind that an operator gives to the storage it writes into; None where it gives none."""
    return DROPOUT if func is torch.ops.aten.bernoulli_.float else None
