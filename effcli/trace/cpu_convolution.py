"""What convolutions take on the CPU for the time of their call. Sources are those of torch 2.13 and oneDNN.

Without channels-last inputs, oneDNN works on copies in blocks of channels, and its outputs are copied back
(`mkldnn_convolution` and its backward, `aten/src/ATen/native/mkldnn/Conv.cpp`). Checked on AVX2 alone; with AVX-512
oneDNN may choose other kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from effcli.trace.sizes import FLOAT_BYTES
from effcli.units import rounded_up

_BLOCK = 8
"""Channels of a block; an input with fewer is taken as it is."""
_WIDEST_FILTER = 14
"""oneDNN's own kernels for the gradient of weights stop short of it (`x64/jit_avx2_conv_kernel_f32.cpp`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shapes:
    """A convolution: its input, its weight, its output (all as shapes) and the bytes of an element."""

    values: Sequence[int]
    weight: Sequence[int]
    output: Sequence[int]
    groups: int
    stride: Sequence[int]
    padding: Sequence[int]
    element_bytes: int

    def bytes_of(self, shape: Sequence[int]) -> int:
        """Return the bytes of a tensor."""
        return prod(shape) * self.element_bytes

    @property
    def places(self) -> int:
        """Return the number of places of the output."""
        return prod(self.output[2:])

    @property
    def depthwise(self) -> bool:
        """Return whether each channel has a filter of its own."""
        return self.groups == self.values[1] > 1

    @property
    def columns_bytes(self) -> int:
        """Return the bytes of a group's input as one column for each place of the output, for all rows."""
        pointwise = prod(self.weight[2:]) == 1 and set(self.stride) == {1} and set(self.padding) == {0}
        if pointwise:
            return 0
        return self.values[0] * prod(self.weight[1:]) * self.places * self.element_bytes

    def by_onednn(self, num_threads: int) -> bool:
        """Return whether oneDNN does it (`use_mkldnn`, `Convolution.cpp`)."""
        if self.element_bytes != FLOAT_BYTES:
            return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
        plain = prod(self.weight[2:]) == 1 and set(self.stride) == {1} and self.values[0] < 16 and self.groups == 1
        return num_threads > 1 or not plain


def convolution(num_threads: int, operator: Any, args: Sequence[Any]) -> list[int]:
    """Return what the forward takes beside its output."""
    values, weight, _, stride, padding, dilation, transposed, _, groups = args
    if transposed:
        return []
    places = [
        (size + 2 * pad - wide * (filter_size - 1) - 1) // step + 1
        for size, pad, wide, filter_size, step in zip(
            values.shape[2:], padding, dilation, weight.shape[2:], stride, strict=True
        )
    ]
    shapes = _shapes(values, weight, (values.shape[0], weight.shape[0], *places), stride, padding, groups)
    if not shapes.by_onednn(num_threads):
        return [shapes.columns_bytes]
    filters = shapes.bytes_of(weight.shape)
    if _channels_last(values, weight):
        return [filters if shapes.depthwise else 2 * filters]
    copied = _blocked(shapes, values.shape) if values.shape[1] >= _BLOCK else 0
    return [max(copied + filters, _blocked(shapes, shapes.output))]


def convolution_backward(num_threads: int, operator: Any, args: Sequence[Any]) -> list[int]:
    """Return what the backward takes beside the gradients."""
    gradient, values, weight, _, stride, padding, _, transposed, _, groups, wanted = args
    if transposed:
        return []
    shapes = _shapes(values, weight, gradient.shape, stride, padding, groups)
    filters, output = shapes.bytes_of(weight.shape), shapes.bytes_of(gradient.shape)
    if shapes.by_onednn(num_threads) and _channels_last(values, weight):
        return [3 * filters] if _channels_last(gradient) else [3 * filters, output]
    own = [] if gradient.is_contiguous() else [output]
    if not shapes.by_onednn(num_threads):
        in_float = prod(gradient.shape) * FLOAT_BYTES if wanted[2] and shapes.element_bytes != FLOAT_BYTES else 0
        return [max(shapes.columns_bytes + sum(own), in_float)]
    if shapes.depthwise:
        return [*own, _blocked(shapes, values.shape)]
    # The gradient of a strided convolution's input is copied twice.
    strided = 2 * _blocked(shapes, values.shape) if wanted[0] and set(stride) != {1} else 0
    return [*own, max(_for_weights(shapes, num_threads), strided - filters, filters)]


def _shapes(
    values: torch.Tensor,
    weight: torch.Tensor,
    output: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    groups: int,
) -> _Shapes:
    return _Shapes(
        values=values.shape,
        weight=weight.shape,
        output=output,
        groups=groups,
        stride=stride,
        padding=padding,
        element_bytes=values.element_size(),
    )


def _channels_last(*tensors: torch.Tensor) -> bool:
    """Return whether one of them is a batch of images with the channels innermost (`mkldnn_conv_use_channels_last`)."""
    return any(
        tensor.ndim == 4 and not tensor.is_contiguous() and tensor.is_contiguous(memory_format=torch.channels_last)
        for tensor in tensors
    )


def _for_weights(shapes: _Shapes, num_threads: int) -> int:
    """Return copies of the gradient and the input in blocks, or what a product of matrices takes instead.

    That has a column for each place and four times the weights for each thread, of which it takes as many as there are
    if the places are few (`init_conf` in `src/cpu/gemm_convolution_utils.cpp`: bytes are booked as floats).
    """
    if shapes.values[1] >= _BLOCK:
        return _blocked(shapes, shapes.output) + _blocked(shapes, shapes.values)
    if shapes.weight[-1] < _WIDEST_FILTER:
        return _blocked(shapes, shapes.output)
    threads = num_threads if shapes.values[0] > 1 and shapes.places < 256 * num_threads else 1
    column_bytes = shapes.columns_bytes // shapes.values[0]
    return threads * (column_bytes + 4 * shapes.bytes_of(shapes.weight))


def _blocked(shapes: _Shapes, shape: Sequence[int]) -> int:
    """Return the bytes of a tensor whose channels fill whole blocks."""
    return shapes.bytes_of((shape[0], rounded_up(shape[1], _BLOCK), *shape[2:]))
