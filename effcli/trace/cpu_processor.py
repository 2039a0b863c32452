"""What oneDNN makes of this processor: its kernels, and with them their workspaces, follow the instruction set."""

from __future__ import annotations

import os
from enum import Enum, auto

import torch

_WITHOUT_BF16 = ("AVX512_CORE", "AVX512_CORE_VNNI")
"""Values of `ONEDNN_MAX_CPU_ISA` that leave AVX-512 and take its bfloat16 instructions away."""


class Bf16(Enum):
    """How oneDNN multiplies matrices in bfloat16."""

    NONE = auto()
    """Not at all: torch's own loops do it, as on processors with AVX2 alone."""
    IN_FLOAT = auto()
    """With AVX-512, into a float32 copy of the product."""
    IN_BLOCKS = auto()
    """With AVX-512's instructions for bfloat16, block by block."""


def bf16_products() -> Bf16:
    """Return how oneDNN multiplies matrices in bfloat16 here and now.

    torch asks oneDNN only if `_is_mkldnn_bf16_supported` (`use_mkldnn_bf16_matmul`, `mkldnn/Matmul.cpp`, 2.13), which
    knows of oneDNN's own limit `ONEDNN_MAX_CPU_ISA`; among its kernels oneDNN takes the first that the processor and
    the limit allow (`src/cpu/matmul/cpu_matmul_list.cpp`, 3.12). Those for AMX are taken for `IN_BLOCKS`, those for
    AVX2 with bfloat16 (AVX-NE-CONVERT) and for Arm for `NONE`, all of them untried.
    """
    if not torch.backends.mkldnn.enabled or not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return Bf16.NONE
    if not torch.cpu._is_avx512_supported():
        return Bf16.NONE
    limited = _limit() in _WITHOUT_BF16 or not torch.cpu._is_avx512_bf16_supported()
    return Bf16.IN_FLOAT if limited else Bf16.IN_BLOCKS


def _limit() -> str:
    """Return the name of the best instruction set that oneDNN may use, empty without a limit (`getenv_user`)."""
    return (os.environ.get("ONEDNN_MAX_CPU_ISA") or os.environ.get("DNNL_MAX_CPU_ISA") or "").upper()
