"""Stands in for the package flash-attn, so that models can be built and traced that ask for it."""

from __future__ import annotations

import sys
from importlib import metadata
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch
from torch.nn import functional as F  # noqa: N812

VERSION = "2.6.3"


def stand_in() -> None:
    """Let transformers find the package, before anything of it that asks is imported.

    The package keeps what torch's flash kernel keeps: queries, keys, values, output and logsumexp, in the layout
    batch x length x heads x head size.
    """
    package, padding = ModuleType("flash_attn"), ModuleType("flash_attn.bert_padding")
    for module in (package, padding):
        module.__spec__ = ModuleSpec(module.__name__, None)
    package.__version__ = VERSION  # type: ignore[attr-defined]
    package.flash_attn_func = package.flash_attn_varlen_func = _flash  # type: ignore[attr-defined]
    package.flash_attn_with_kvcache = None  # type: ignore[attr-defined]
    for name in ("index_first_axis", "pad_input", "unpad_input"):
        setattr(padding, name, None)  # full batches need no padding
    sys.modules |= {"flash_attn": package, "flash_attn.bert_padding": padding}
    real = metadata.version
    metadata.version = lambda name: VERSION if name == "flash_attn" else real(name)

    import transformers.utils
    from transformers.utils import import_utils

    for module in (import_utils, transformers.utils):
        module.is_flash_attn_2_available = lambda: True


def _flash(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    deterministic: bool = False,
    **kwargs: Any,
) -> torch.Tensor:
    return F.scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        dropout_p=dropout_p,
        scale=softmax_scale,
        is_causal=causal,
        enable_gqa=True,
    ).transpose(1, 2)
