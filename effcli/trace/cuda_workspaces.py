"""What CUDA kernels allocate for the time of their call, in bytes, by operator. Sources are those of torch 2.13."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from effcli.trace.cuda_attention import Capability
from effcli.trace.sizes import FLOAT_BYTES, INDEX_BYTES, copies, has_leading_dimension, nbytes
from effcli.units import rounded_up

Workspace = Callable[[Capability, Sequence[Any]], Sequence[int]]
"""The device's capability and the operator's arguments -> sizes of storages that live together during the call."""

_CHUNK = 65536
"""Elements that a block of a foreach kernel works on (`kChunkSize`, `native/cuda/MultiTensorApply.cuh`)."""
_UNSORTED_INDICES = 3072
"""Up to this many indices an embedding's gradient needs no sorting (`native/cuda/Embedding.cu`)."""


def _matrices(capability: Capability, args: Sequence[Any]) -> list[int]:
    """Return copies of operands that BLAS cannot take as they are, such as the expanded gradient of a sum.

    `prepare_matrix_for_cublas` and `prepare_batch_matrix_for_cublas` (`native/cuda/Blas.cpp`).
    """
    return [nbytes(operand) for operand in args[-2:] if not _fits_blas(operand)]


def _fits_blas(operand: torch.Tensor) -> bool:
    """Return whether BLAS takes the operand; what is contiguous passes too, such as a matrix of one column."""
    row_stride, column_stride = operand.stride()[-2:]
    dense = operand.is_contiguous() and row_stride != 0 and column_stride != 0
    return dense or has_leading_dimension(operand)


def _softmax_backward(capability: Capability, args: Sequence[Any]) -> list[int]:
    """Return the product of gradient and output (`softmax_backward_cuda_out`, `native/cuda/SoftMax.cu`)."""
    gradient, output = args[:2]
    return [gradient.numel() * max(gradient.element_size(), output.element_size())]


def _safe_softmax(capability: Capability, args: Sequence[Any]) -> list[int]:
    """Return the softmax before rows without a number are replaced, and a byte for each element that is infinite.

    `_safe_softmax` in `native/transformers/attention.cpp`.
    """
    return [nbytes(args[0]), args[0].numel()]


def _log_softmax_backward(capability: Capability, args: Sequence[Any]) -> list[int]:
    """Return the contiguous copy of an expanded gradient (`host_softmax_backward`, `native/cuda/SoftMax.cu`)."""
    return copies(args[0])


def _embedding_backward(capability: Capability, args: Sequence[Any]) -> list[int]:
    """Return what sorting the indices and adding up in float32 takes (`native/cuda/EmbeddingBackwardKernel.cu`).

    Six arrays of indices live together with the partial sums, one row for each index. Left out is what the sort itself
    takes before.
    """
    gradient, indices = args[:2]
    count = indices.numel()
    if count <= _UNSORTED_INDICES:
        return copies(gradient)
    width = max(gradient.element_size(), FLOAT_BYTES)
    return [*copies(gradient), *([count * INDEX_BYTES] * 6), gradient.numel() * width]


def _layer_norm(capability: Capability, args: Sequence[Any]) -> list[int]:
    """Return the contiguous copy of the input (`layer_norm_cuda`, `native/cuda/layer_norm_kernel.cu`)."""
    return copies(args[0])


def _layer_norm_backward(capability: Capability, args: Sequence[Any]) -> list[int]:
    return copies(*args[:2])


def _flash_backward(capability: Capability, args: Sequence[Any]) -> list[int]:
    """Return float32 sums of the queries' gradients, and gradients of each head where heads share keys and values.

    `mha_bwd` in `native/transformers/cuda/flash_attn/flash_api.cpp`; gradient and output are made contiguous before, in
    batch x length x heads x head size (`_flash_attention_backward`).
    """
    gradient, query, key, _, output = args[:5]
    batch, heads, length, size = query.shape
    padded = batch * heads * rounded_up(length, 128)
    sums = [padded * FLOAT_BYTES, padded * (rounded_up(size, 32) if size <= 192 else 256) * FLOAT_BYTES]
    shared = [batch * heads * key.shape[2] * size * key.element_size()] * 2 if key.shape[1] != heads else []
    return [*copies(gradient.transpose(1, 2), output.transpose(1, 2)), *sums, *shared]


def _cudnn_backward(capability: Capability, args: Sequence[Any]) -> list[int]:
    """Return float32 sums as flash has them; an assumption, since cuDNN's source is closed."""
    batch, heads, length, size = args[1].shape
    rows = batch * heads * length * FLOAT_BYTES
    return [rows, rows * size]


def _efficient_backward(capability: Capability, args: Sequence[Any]) -> list[int]:
    """Return the workspace of the memory-efficient kernel: float32 sums, a tile for each block of queries.

    `Params::workspace_size` in `native/transformers/cuda/mem_eff_attention/kernel_backward.h`, with the block sizes of
    `kernels/cutlassB.h`. In 16 bits and where a head is too wide for the registers, keys and values have sums too.
    """
    gradient, query, key, value = args[:4]
    batch, heads, length, size = query.shape
    half = query.element_size() == 2
    widest = max(size, value.shape[3])
    rows = 64 if widest <= 64 else 128
    sums = []
    if capability >= (7, 0) or half:
        tiles = rounded_up(length, rows) // rows * (rounded_up(size, 64) // 64)
        sums = [batch * heads * tiles * (16 + rows * 64 * FLOAT_BYTES)]
    if half and widest > _widest_in_registers(capability):
        splits = max(1, min(rounded_up(key.shape[2], 64) // 64, 200 // (batch * heads)))
        sums.append(
            batch * heads * splits * 64 * (rounded_up(size, rows) + rounded_up(value.shape[3], rows)) * FLOAT_BYTES
        )
    return [*copies(gradient.transpose(1, 2)), batch * heads * length * FLOAT_BYTES, *sums]


def _widest_in_registers(capability: Capability) -> int:
    """Return the widest head whose sums of keys and values stay in registers, which takes shared memory."""
    if capability in ((8, 6), (8, 9)):
        return 96
    return 128 if capability in ((8, 0), (9, 0), (10, 0), (7, 0)) else 64


def _index_put(capability: Capability, args: Sequence[Any]) -> list[int]:
    """Return what sorting takes where values are added (`index_put_with_sort_kernel`, `native/cuda/Indexing.cu`)."""
    _, indices, _, *flags = args
    if not flags or not flags[0]:
        return []
    shape = torch.broadcast_shapes(*(index.shape for index in indices if index is not None))
    return [shape.numel() * INDEX_BYTES] * 3


def _foreach_norm(capability: Capability, args: Sequence[Any]) -> list[int]:
    """Return partial norms, for each tensor as many as the longest has chunks (`native/cuda/ForeachReduceOp.cu`)."""
    tensors = args[0]
    chunks = max(-(-tensor.numel() // _CHUNK) for tensor in tensors)
    return [len(tensors) * chunks * max(FLOAT_BYTES, tensors[0].element_size())]


_aten = torch.ops.aten

WORKSPACES: Mapping[Any, Workspace] = {
    _aten.mm.default: _matrices,
    _aten.addmm.default: _matrices,
    _aten.bmm.default: _matrices,
    _aten.baddbmm.default: _matrices,
    _aten._softmax_backward_data.default: _softmax_backward,
    _aten._foreach_norm.Scalar: _foreach_norm,
    _aten._safe_softmax.default: _safe_softmax,
    _aten._log_softmax_backward_data.default: _log_softmax_backward,
    _aten.embedding_dense_backward.default: _embedding_backward,
    _aten.native_layer_norm.default: _layer_norm,
    _aten.native_layer_norm_backward.default: _layer_norm_backward,
    _aten._scaled_dot_product_flash_attention_backward.default: _flash_backward,
    _aten._scaled_dot_product_cudnn_attention_backward.default: _cudnn_backward,
    _aten._scaled_dot_product_efficient_attention_backward.default: _efficient_backward,
    _aten.index_put.default: _index_put,
    _aten.index_put_.default: _index_put,
    _aten._index_put_impl_.default: _index_put,
}
"""Operators without an entry take nothing beside their results."""
