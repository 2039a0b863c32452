"""Plain words for what a storage is, from the operator that made it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

DROPOUT = "dropout masks"
ATTENTION = "attention"
LOGITS = "logits and loss"
COPIES = "autocast copies of weights"
LAYERS = "layer activations"
RECOMPUTED = "recomputed activations"
UPSTREAM = "gradients of activations"
PASSING = "forward temporaries"
TIED = "parts of tied gradients"
GRADIENTS = "gradients"
COPIED = "copied gradients"
LIBRARY = "cuBLAS workspaces"

_ATTENTION = frozenset(
    {
        "_softmax",
        "_safe_softmax",
        "bmm",
        "baddbmm",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
    }
)


@dataclass(frozen=True, slots=True)
class Landmarks:
    """What of a model tells kinds apart: the modules that make logits, and the shapes of parameters with two places."""

    heads: frozenset[str] = frozenset({LOGITS})
    tied: frozenset[tuple[int, ...]] = frozenset()


def landmarks(model: torch.nn.Module) -> Landmarks:
    """Return the landmarks of a model."""
    output = getattr(model, "get_output_embeddings", lambda: None)()
    heads = {name for name, module in model.named_modules() if module is output}
    first = {id(parameter): name for name, parameter in reversed(list(model.named_parameters()))}
    again = (
        tuple(parameter.shape)
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if first[id(parameter)] != name
    )
    return Landmarks(frozenset({LOGITS, *heads}), frozenset(again))


def kind_of(
    func: Any, args: Sequence[Any], made: torch.Tensor, *, in_backward: bool, source: str, known: Landmarks
) -> str:
    """Return the kind of the storage behind `made`, which `func` returned."""
    name = func._opname if hasattr(func, "_opname") else str(func)
    if in_backward and not torch.is_grad_enabled():
        if name in ("clone", "new_empty_strided"):
            return COPIED
        return TIED if tuple(made.shape) in known.tied else UPSTREAM
    if name == "native_dropout" and made.dtype is torch.bool:
        return DROPOUT
    if name == "_to_copy" and isinstance(args[0], torch.nn.Parameter):
        return COPIES
    if source in known.heads:
        return LOGITS
    if in_backward:
        return RECOMPUTED
    return ATTENTION if name in _ATTENTION else LAYERS


def relabelled(func: Any) -> str | None:
    """Return the kind that an operator gives to the storage it writes into; None where it gives none."""
    return DROPOUT if func is torch.ops.aten.bernoulli_.float else None
