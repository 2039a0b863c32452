"""What a step of bitsandbytes' optimizers takes beside their state. No torch."""

from __future__ import annotations

from effcli.optim.entry import Hyper
from effcli.optim.families.bitsandbytes.state import BLOCK_SIZE, is_quantised
from effcli.optim.laws import width
from effcli.units import ParamInfo

_FLOAT = 4

_KERNELS = {"adamw": "adam", "lamb": "adam", "sgd": "momentum", "lars": "momentum", "adagrad": "rmsprop"}
"""Families whose CPU kernel takes what another one's takes."""

_COPIES_32BIT = {"adam": 3, "ademamix": 4, "momentum": 1, "lion": 3, "rmsprop": 3}
"""Float32 copies at the highest moment of the 32-bit kernel: the gradient's, and the terms of the update."""

_COPIES_8BIT = {"adam": 5, "ademamix": 9, "momentum": 2, "lion": 5, "rmsprop": 3}
"""The same of the 8-bit kernel, which also holds every state in float32; AdEMAMix's first one three times."""

_WHILE_QUANTISED = {"ademamix", "momentum"}
"""Kernels whose highest moment is the quantisation of a state: its new codes and scales come on top."""


def blockwise_workspace(param: ParamInfo, hyper: Hyper, device: str, *, family: str) -> tuple[int, ...]:
    """Return the bytes that the update of one parameter takes beside its state.

    On CUDA the kernels work in place (bitsandbytes/backends/cuda/ops.py, 0.50.2); only the norm of the weight, for a
    limit on an update's norm, takes a float32 copy of a narrower one (`optimizer_update_32bit` in functional.py). On a
    CPU they are written in torch: `_optimizer_update_32bit_cpu` and `_optimizer_update_8bit_blockwise_cpu` in
    backends/cpu/ops.py. There a copy of the weight comes on top where it is narrower than float32, and in 32 bit the
    decayed gradient of those that add the decay to it.
    """
    copy_bytes = _FLOAT * param.num_elements
    narrow = width(param) < _FLOAT
    quantised = is_quantised(param, hyper)
    if device == "cuda":
        limited = hyper.get("max_unorm", 0.0) > 0 and not quantised
        return (copy_bytes,) if limited and narrow else ()
    kernel = _KERNELS.get(family, family)
    copies = (_COPIES_8BIT if quantised else _COPIES_32BIT)[kernel] + narrow
    if not quantised:
        decayed = kernel in ("momentum", "rmsprop") and hyper["weight_decay"] > 0
        return (copy_bytes,) * (copies + decayed)
    codes = (param.num_elements, _FLOAT * -(-param.num_elements // BLOCK_SIZE)) if kernel in _WHILE_QUANTISED else ()
    return (*(copy_bytes,) * copies, *codes)
