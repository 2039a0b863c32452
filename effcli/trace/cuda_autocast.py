"""Which functions CUDA's autocast runs in float32, where the CPU's does not.

The lists are `AT_FORALL_FP32`, `AT_FORALL_FP32_SET_OPT_DTYPE`, `AT_FORALL_PROMOTE` and `AT_FORALL_LOWER_PRECISION_FP`
of `aten/src/ATen/autocast_mode.h` in torch 2.13. A trace runs under the CPU's autocast, whose list of functions in
lower precision has those that matter (`linear`, `matmul`, convolutions, attention); the few that it lacks are added
here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch.nn import functional as F  # noqa: N812

Policy = Literal["float32", "float32_result", "widest", "lower"]

_NAMES: Mapping[Policy, str] = {
    "float32": (
        "acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow __pow__ __rpow__ softplus "
        "layer_norm native_layer_norm rms_norm group_norm frobenius_norm nuclear_norm cosine_similarity "
        "poisson_nll_loss cosine_embedding_loss nll_loss nll_loss2d hinge_embedding_loss kl_div l1_loss smooth_l1_loss "
        "huber_loss mse_loss margin_ranking_loss multilabel_margin_loss soft_margin_loss triplet_margin_loss "
        "multi_margin_loss binary_cross_entropy_with_logits dist pdist cdist renorm logsumexp interpolate"
    ),
    "float32_result": "prod softmax log_softmax cumprod cumsum sum norm vector_norm matrix_norm",
    "widest": "addcdiv addcmul atan2 bilinear cross dot vdot grid_sample index_put tensordot scatter_add",
    "lower": "addmv addr mv chain_matmul prelu",
}
_PLACES = (torch, torch.Tensor, F, torch._C._nn, torch.linalg, torch.special)

_CASTABLE = (torch.float16, torch.bfloat16, torch.float32)


def _listed() -> Iterator[tuple[Callable[..., Any], Policy]]:
    for policy, names in _NAMES.items():
        for name in names.split():
            for place in _PLACES:
                if hasattr(place, name):
                    yield getattr(place, name), policy


POLICIES: Mapping[Callable[..., Any], Policy] = dict(_listed())
"""By the function that Python code calls."""


def under_policy(
    policy: Policy, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], dtype: torch.dtype
) -> Any:
    """Call a function with its inputs as CUDA's autocast to `dtype` would hand them to it."""
    if policy == "float32_result":
        castable = isinstance(args[0], torch.Tensor) and args[0].dtype in _CASTABLE
        if castable and kwargs.get("dtype") is None and not any(isinstance(value, torch.dtype) for value in args):
            return func(*args, **{**kwargs, "dtype": torch.float32})
        return func(*args, **kwargs)
    if policy == "widest":
        wide = any(tensor.dtype is torch.float32 for tensor in _floating([*args, *kwargs.values()]))
        dtype = torch.float32 if wide else dtype
    elif policy == "float32":
        dtype = torch.float32
    cast = cast_to(dtype, [args, kwargs])
    return func(*cast[0], **cast[1])


def cast_to(dtype: torch.dtype, value: Any) -> Any:
    """Return `value` with every tensor in it that autocast would touch in the given dtype."""
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.dtype in _CASTABLE else value
    if isinstance(value, list):
        return [cast_to(dtype, item) for item in value]
    if type(value) is tuple:
        return tuple(cast_to(dtype, item) for item in value)
    if isinstance(value, dict):
        return {name: cast_to(dtype, item) for name, item in value.items()}
    return value


def _floating(values: Sequence[Any]) -> Iterator[torch.Tensor]:
    return (value for value in values if isinstance(value, torch.Tensor) and value.is_floating_point())
