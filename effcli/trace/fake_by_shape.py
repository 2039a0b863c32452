"""Operators on fake tensors, answered by shape: the fake mode takes four times as long over each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, in_kernel_invocation_manager
from torch.utils._mode_utils import no_dispatch

from effcli.trace.by_shape import ByShape, Shape

_aten = torch.ops.aten
VIEWS = frozenset(
    {
        _aten.alias.default,
        _aten.detach.default,
        _aten.expand.default,
        _aten.permute.default,
        _aten.select.int,
        _aten.slice.Tensor,
        _aten.squeeze.dim,
        _aten.t.default,
        _aten.transpose.int,
        _aten.unsqueeze.default,
        _aten.view.default,
        _aten._unsafe_view.default,  # of its schema a maker, but it returns its argument's storage
    }
)
"""Operators that return one tensor with the storage of their first argument."""


class FakeByShape(ByShape):
    """Runs an operator on fake tensors once for each combination of shapes; views by the meta kernel alone."""

    def answer(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Return what the operator would."""
        if func in VIEWS and isinstance(args[0], FakeTensor):
            fake = args[0]
            with in_kernel_invocation_manager(fake.fake_mode):
                view = func(*args, **kwargs)
            return FakeTensor(fake.fake_mode, view, fake.fake_device)
        if func is _aten._grouped_mm.default and args[0].dtype is not torch.bfloat16:
            return _grouped_mm(*args, **kwargs)
        return super().answer(func, args, kwargs)

    def takes(self, argument: Any) -> bool:
        """Return whether an operator with this first argument is answered by shape."""
        return isinstance(argument, FakeTensor)

    def made(self, shape: Shape, argument: FakeTensor) -> torch.Tensor:
        """Return a new fake tensor of a shape, stride and dtype, on the device of the argument."""
        with no_dispatch():
            empty = torch.empty_strided(shape[0], shape[1], dtype=shape[2], device="meta")
        return FakeTensor(argument.fake_mode, empty, argument.fake_device)


def _grouped_mm(first: torch.Tensor, second: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Return the product of experts' matrices in a dtype that kernels take and the meta one refuses (torch 2.13)."""
    halves = first.to(torch.bfloat16), second.to(torch.bfloat16)
    product: torch.Tensor = _aten._grouped_mm.default(*halves, *args, **kwargs)
    return product.to(first.dtype)
