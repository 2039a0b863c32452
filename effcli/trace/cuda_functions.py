"""Functions that choose other operators on a CUDA device than on the CPU, imitated above autograd."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch.nn import functional as F  # noqa: N812
from torch.overrides import TorchFunctionMode

from effcli.trace.cuda_attention import Capability, attention
from effcli.trace.cuda_autocast import POLICIES, cast_to, under_policy


class CudaFunctions(TorchFunctionMode):
    """While entered, functions of torch make the choices that they make for tensors on a CUDA device.

    It holds for the thread that enters it, which on the CPU also runs the backward pass and what is recomputed there.
    """

    def __init__(self, capability: Capability) -> None:
        super().__init__()
        self._handlers: Mapping[Callable[..., Any], Callable[..., Any]] = {
            F.scaled_dot_product_attention: partial(_attention, capability),
            F.dropout: _dropout,
            torch.dropout: _dropout,
            F.softmax: partial(_softmax, torch.softmax, torch._softmax),
            torch.softmax: partial(_softmax, torch.softmax, torch._softmax),
            torch.Tensor.softmax: partial(_softmax, torch.softmax, torch._softmax),
            F.log_softmax: partial(_softmax, torch.log_softmax, torch._log_softmax),
            torch.log_softmax: partial(_softmax, torch.log_softmax, torch._log_softmax),
            torch.Tensor.log_softmax: partial(_softmax, torch.log_softmax, torch._log_softmax),
            F.cross_entropy: _cross_entropy,
            F.rms_norm: _rms_norm,
            torch.Tensor.backward: self._backward,
        }

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call the function, or what stands for it; this mode is off meanwhile, as torch has it."""
        kwargs = kwargs or {}
        handler = self._handlers.get(func)
        if handler is not None:
            return handler(*args, **kwargs)
        if func in POLICIES and torch.is_autocast_enabled("cpu"):
            return under_policy(POLICIES[func], func, args, kwargs, torch.get_autocast_dtype("cpu"))
        return func(*args, **kwargs)

    def _backward(self, tensor: torch.Tensor, gradient: torch.Tensor | None = None, **kwargs: Any) -> None:
        """Run the backward pass with this mode on again, for what is recomputed in it.

        The engine is asked itself: `torch.autograd.backward` is a function of torch, in which modes are off.
        """
        if gradient is None:
            gradient = torch.ones_like(tensor, memory_format=torch.preserve_format)
        with self:
            torch.autograd.Variable._execution_engine.run_backward(
                (tensor,), (gradient,), False, False, (), allow_unreachable=True, accumulate_grad=True
            )


def _attention(capability: Capability, query: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Return attention; autocast has it in lower precision."""
    if torch.is_autocast_enabled("cpu"):
        dtype = torch.get_autocast_dtype("cpu")
        query, args, kwargs = cast_to(dtype, query), cast_to(dtype, args), cast_to(dtype, kwargs)
    with torch.autocast("cpu", enabled=False):
        return attention(capability, query, *args, **kwargs)


def _dropout(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:  # noqa: A002
    """Return dropout that keeps a mask of one byte an element (`dropout` in `native/Dropout.cpp`, torch 2.13)."""
    if not training or p == 0.0 or inplace or p == 1.0:
        return F.dropout(input, p, training, inplace)
    return torch.native_dropout(input, p, True)[0]


def _softmax(
    plain: Callable[..., torch.Tensor],
    kernel: Callable[..., torch.Tensor],
    input: torch.Tensor,  # noqa: A002
    dim: int | None = None,
    *args: Any,
    dtype: torch.dtype | None = None,
    **kwargs: Any,
) -> torch.Tensor:
    """Return `softmax` or `log_softmax`; from float16 to float32 in one kernel (`native/SoftMax.cpp`, torch 2.13).

    Python's functions have the dtype last, after an argument for warnings that the others lack.
    """
    dtype = next((value for value in args if isinstance(value, torch.dtype)), dtype)
    if dtype is None and torch.is_autocast_enabled("cpu") and input.is_floating_point():
        dtype = None if input.dtype is torch.float64 else torch.float32
    if dim is None:
        dim = 0 if input.ndim in (0, 1, 3) else 1
    if input.dtype is torch.float16 and dtype is torch.float32:
        return kernel(input, dim, True)
    return plain(input, dim, dtype=dtype)


def _cross_entropy(input: torch.Tensor, target: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:  # noqa: A002
    """Return the loss; under autocast its log-probabilities keep the input's dtype and are then made float32.

    `cross_entropy_loss` (`native/LossNLL.cpp`, torch 2.13) asks for that dtype, which autocast leaves alone, and
    `nll_loss` is a function of its float32 list.
    """
    if not torch.is_autocast_enabled("cpu"):
        return F.cross_entropy(input, target, *args, **kwargs)
    with torch.autocast("cpu", enabled=False):
        if target.is_floating_point() or kwargs.get("label_smoothing") or len(args) > 5:
            return F.cross_entropy(input.float(), target, *args, **kwargs)
        logarithms = torch.log_softmax(input, 0 if input.ndim == 1 else 1, dtype=input.dtype)
        kwargs.pop("label_smoothing", None)
        return F.nll_loss(logarithms.float(), target, *args, **kwargs)


def _rms_norm(
    input: torch.Tensor,  # noqa: A002
    normalized_shape: Any,
    weight: torch.Tensor | None = None,
    eps: float | None = None,
) -> torch.Tensor:
    """Return the norm by one kernel that keeps its input and a number a row (`_fused_rms_norm`, torch 2.13)."""
    if torch.is_autocast_enabled("cpu"):
        input, weight = cast_to(torch.float32, input), cast_to(torch.float32, weight)  # noqa: A001
    return _FusedRmsNorm.apply(input, tuple(normalized_shape), weight)


class _FusedRmsNorm(torch.autograd.Function):
    """Allocates what the kernel allocates; the values mean nothing."""

    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,  # noqa: A002
        shape: tuple[int, ...],
        weight: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return an output like the input."""
        rows = input.new_empty((*input.shape[: -len(shape)], *(1 for _ in shape)), dtype=torch.float32)
        ctx.save_for_backward(input, rows, weight)
        return torch.empty_like(input, memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, torch.Tensor | None]:
        """Return the gradients of input and weight."""
        input, _, weight = ctx.saved_tensors  # noqa: A001
        of_weight = None if weight is None or not ctx.needs_input_grad[2] else torch.empty_like(weight)
        return torch.empty_like(input), None, of_weight
