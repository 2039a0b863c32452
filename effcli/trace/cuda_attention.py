"""`F.scaled_dot_product_attention` as a CUDA device runs it: which kernel is chosen, and what it is given.

The rules are those of `aten/src/ATen/native/transformers/cuda/sdp_utils.cpp`, `.../sdp_utils_cpp.h` and
`.../attention.cpp` in torch 2.13. Flash and efficient kernels leave an output and the log of the sums behind, the math
kernel leaves the scores. The operators' own shape functions say which layout an output has.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch.nn import functional as F  # noqa: N812

Backend = Literal["cudnn", "flash", "efficient", "math"]
Capability = tuple[int, int]
"""Major and minor compute capability, such as (8, 0) for an A100."""

_HALF = (torch.float16, torch.bfloat16)
_FLASH_ALIGNMENT = 8
_MASK_ALIGNMENT = 8


def backend_for(
    capability: Capability,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    *,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    enable_gqa: bool = False,
) -> Backend:
    """Return the kernel for the inputs, each batch x heads x length x head size, by `select_sdp_backend`."""
    if query.ndim != 4 or query.shape[0] != key.shape[0] or not _strides_fit(query, key, value, attn_mask):
        return "math"
    same_heads = query.shape[1] == key.shape[1] == value.shape[1]
    size = query.shape[3]
    same_size = size == key.shape[3] == value.shape[3]
    half = query.dtype in (_HALF if capability >= (8, 0) else (torch.float16,))
    if same_heads or enable_gqa:
        # Datacenter Hopper and Blackwell alone prefer cuDNN's kernel.
        if half and capability in ((9, 0), (10, 0)) and _cudnn_takes(capability, query, key, value, attn_mask):
            return "cudnn"
        square = not is_causal or query.shape[2] == key.shape[2]
        fits = same_size and size <= 256 and not _too_wide_to_train(capability, query, key, value, dropout_p)
        if half and (8, 0) <= capability <= (12, 1) and attn_mask is None and fits and square:
            return "flash"
    types = (torch.float32, *_HALF) if capability >= (8, 0) else (torch.float32, torch.float16)
    alignment = _gemm_alignment(capability, query.dtype)
    sizes_fit = size == key.shape[3] and size % alignment == 0 and value.shape[3] % alignment == 0
    return "efficient" if same_heads and query.dtype in types and sizes_fit else "math"


def attention(
    capability: Capability,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Return attention by the kernel that CUDA would choose; arguments as in `F.scaled_dot_product_attention`."""
    backend = backend_for(
        capability, query, key, value, attn_mask, dropout_p=dropout_p, is_causal=is_causal, enable_gqa=enable_gqa
    )
    size = query.shape[-1]
    scale = 1 / math.sqrt(size) if scale is None else scale
    if attn_mask is not None and attn_mask.dtype is torch.bool:
        attn_mask = torch.where(attn_mask, 0.0, torch.tensor(-math.inf, dtype=query.dtype))
    saved = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (query, key, value))
    aten = torch.ops.aten
    if backend == "flash":
        padded = (_padded(tensor, _FLASH_ALIGNMENT) for tensor in (query, key, value))
        output = aten._scaled_dot_product_flash_attention(*padded, dropout_p, is_causal, False, scale=scale)[0]
        return output if output.shape[-1] == size else output[..., :size]
    if backend == "cudnn":
        return aten._scaled_dot_product_cudnn_attention(
            query, key, value, attn_mask, saved, dropout_p, is_causal, False, scale=scale
        )[0]
    if backend == "efficient":
        mask = None if attn_mask is None else _mask_for_efficient(attn_mask, query, key)
        return aten._scaled_dot_product_efficient_attention(
            query, key, value, mask, saved, dropout_p, is_causal, scale=scale
        )[0]
    return _math(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)


def _math(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float,
    enable_gqa: bool,
) -> torch.Tensor:
    """Return attention with all scores, in float32 throughout, by `_scaled_dot_product_attention_math`."""
    dtype = query.dtype
    if dtype in _HALF:
        query, key, value = query.float(), key.float(), value.float()
    if enable_gqa and key.shape[1] != query.shape[1]:
        key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
        value = value.repeat_interleave(query.shape[1] // value.shape[1], 1)
    root = math.sqrt(abs(scale))
    query = query * root
    if is_causal:
        triangle = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool).tril()
        mask = torch.where(triangle, 0.0, torch.tensor(-math.inf, dtype=query.dtype))
    scores = query @ (key.transpose(-2, -1) * root)
    if mask is not None:
        scores += mask
    weights = torch._safe_softmax(scores, -1)
    if dropout_p > 0.0:
        weights = torch.native_dropout(weights, dropout_p, True)[0]
    return (weights @ value).to(dtype)


def _strides_fit(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None) -> bool:
    given = (query, key, value) if mask is None else (query, key, value, mask)
    return all(tensor.stride(-1) == 1 for tensor in given)


def _cudnn_takes(
    capability: Capability, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
) -> bool:
    """Return what `can_use_cudnn_attention` says with cuDNN 9.15 or later, which torch 2.13 for CUDA 13 brings."""
    largest = 256 if capability == (9, 0) else 128
    sizes = (query.shape[3], value.shape[3])
    mask_fits = mask is None or (
        not mask.requires_grad
        and mask.ndim in (2, 4)
        and all(
            given in (1, wanted)
            for given, wanted in zip(reversed(mask.shape), (key.shape[2], *reversed(query.shape[:3])), strict=False)
        )
    )
    return mask_fits and max(sizes) <= largest and not any(size % 8 for size in sizes) and key.shape[2] > 1


def _too_wide_to_train(
    capability: Capability, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dropout_p: float
) -> bool:
    """Say whether flash cannot train a head this wide, as on consumer cards from Ampere on."""
    consumer = (8, 6) <= capability <= (8, 9) or capability >= (12, 0)
    size = query.shape[3]
    wide = 192 < size <= 224 or (size > 224 and dropout_p > 0.0)
    return consumer and wide and any(tensor.requires_grad for tensor in (query, key, value))


def _gemm_alignment(capability: Capability, dtype: torch.dtype) -> int:
    """Return what a head's size must be a multiple of for the efficient kernel (`minimum_gemm_alignment`)."""
    half = dtype in _HALF
    tensor_cores = capability >= (8, 0) or (capability >= (7, 0) and half)
    least = 4 if capability >= (8, 0) else 1
    return max(least, 8 if half else 4) if tensor_cores else least


def _padded(tensor: torch.Tensor, alignment: int) -> torch.Tensor:
    missing = -tensor.shape[-1] % alignment
    return F.pad(tensor, (0, missing)) if missing else tensor


def _mask_for_efficient(mask: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Return the mask with rows that start at multiples of 8 elements, as a view of the shape of the scores."""
    if any(stride % _MASK_ALIGNMENT for stride in mask.stride()[:-1]):
        length = mask.shape[-1]
        mask = F.pad(mask, (0, _MASK_ALIGNMENT - length % _MASK_ALIGNMENT))[..., :length]
    return mask.expand(*query.shape[:3], key.shape[2])
