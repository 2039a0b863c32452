"""What CPU kernels allocate for the time of their call, in bytes, by operator. Sources are those of torch 2.13.

Left out are buffers of one small matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import reduce
from math import prod
from typing import Any

import torch

from effcli.trace.cpu_convolution import convolution, convolution_backward
from effcli.trace.cpu_products import Product, is_turned, product_bytes, product_of
from effcli.trace.sizes import FLOAT_BYTES, INDEX_BYTES, copies, has_leading_dimension, nbytes

Workspace = Callable[[int, Any, Sequence[Any]], Sequence[int]]
"""Number of threads, operator and its arguments -> sizes of storages that live together during the call."""


def _promoted(num_threads: int, operator: Any, args: Sequence[Any]) -> list[int]:
    """Return copies of operands in their common dtype, and a second output where it is in another one.

    On the CPU alone operands are cast before the loop (`TensorIteratorBase::compute_types`, `TensorIterator.cpp`).
    """
    operands = args[1:] if operator.overloadpacket is _aten.where else args
    tensors = [arg for arg in operands if isinstance(arg, torch.Tensor)]
    common = torch.result_type(*operands[:2]) if len(operands) > 1 else tensors[0].dtype
    common = reduce(torch.promote_types, (tensor.dtype for tensor in tensors[2:] if tensor.ndim), common)
    copies = [tensor.numel() * common.itemsize for tensor in tensors if tensor.ndim and tensor.dtype is not common]
    if operator._schema.name.endswith("_") and args[0].dtype is not common:
        copies.append(args[0].numel() * common.itemsize)
    return copies


def _promoted_each(num_threads: int, operator: Any, args: Sequence[Any]) -> list[int]:
    """Return what the largest step of a loop over lists takes: no foreach kernel works on all at once here."""
    steps = (
        _promoted(num_threads, operator, [arg[place] if isinstance(arg, list) else arg for arg in args])
        for place in range(len(args[0]))
    )
    return max(steps, key=sum)


def _safe_softmax(num_threads: int, operator: Any, args: Sequence[Any]) -> list[int]:
    """Return the marks of masked scores and of rows without others (`_safe_softmax`, `transformers/attention.cpp`)."""
    scores, dim = args[:2]
    return [scores.numel(), scores.numel() // max(1, scores.shape[dim])]


def _softmax(num_threads: int, operator: Any, args: Sequence[Any]) -> list[int]:
    """Return contiguous copies of what goes in (`softmax_cpu_out` and its backward, `SoftMax.cpp`)."""
    return copies(*(arg for arg in args[:2] if isinstance(arg, torch.Tensor)))


def _layer_norm(num_threads: int, operator: Any, args: Sequence[Any]) -> list[int]:
    """Return the contiguous copy of the input (`layer_norm_cpu`, `layer_norm.cpp`)."""
    return copies(args[0])


def _layer_norm_backward(num_threads: int, operator: Any, args: Sequence[Any]) -> list[int]:
    """Return copies of gradient and input, and each thread's sums of two gradients (`cpu/layer_norm_kernel.cpp`)."""
    gradient, values, shape = args[:3]
    return [*copies(gradient, values), 2 * num_threads * prod(shape) * values.element_size()]


def _embedding(num_threads: int, operator: Any, args: Sequence[Any]) -> list[int]:
    """Return contiguous copies of indices and, backward, of the gradient (`Embedding.cpp`)."""
    return copies(*args[:2])


def _attention(num_threads: int, operator: Any, args: Sequence[Any]) -> list[int]:
    """Return each thread's block of scores and output (`cpu_flash_attention`, `cpu/FlashAttentionKernel.cpp`)."""
    query, key = args[:2]
    rows, columns = _block(query, key)
    scores = num_threads * rows * columns
    buffers = [FLOAT_BYTES * (scores + num_threads * rows * (2 + query.shape[3]))]
    return [*buffers, scores * query.element_size()] if query.element_size() < FLOAT_BYTES else buffers


def _attention_backward(num_threads: int, operator: Any, args: Sequence[Any]) -> list[int]:
    """Return each thread's block of scores and their gradient, and a row of sums, beside its products of matrices.

    `cpu_flash_attention_backward`, the same file. Threads beside the first are taken to have theirs at the same time;
    the profiler doesn't see them.
    """
    gradient, query, key = args[:3]
    rows, columns = _block(query, key)
    scores = 2 * num_threads * rows * columns
    num_working = min(num_threads, query.shape[0] * query.shape[1])
    buffers = [*copies(gradient.transpose(1, 2)), (scores + num_working * rows) * FLOAT_BYTES]
    if query.element_size() >= FLOAT_BYTES:
        return buffers
    products = _attention_products(query, key, causal=args[7]) if query.dtype is torch.bfloat16 else ()
    own = max((product_bytes(product, num_threads) for product in products), default=0)
    return [*buffers, scores * query.element_size(), num_working * own]


def _attention_products(query: torch.Tensor, key: torch.Tensor, *, causal: bool) -> Iterator[Product]:
    """Yield the products of blocks that make the gradients of values and keys, and that of queries.

    Blocks are whole but for the last queries and the last keys, which a causal mask may leave out.
    """
    width, length, keys = query.shape[3], query.shape[2], key.shape[2]
    rows, columns = _block(query, key)
    last_rows, last_columns = length % rows, keys % columns
    for num_rows, end in ((rows, length - last_rows), (last_rows, length)):
        reaches_last = not causal or end > keys - last_columns
        for num_columns in (columns, last_columns if reaches_last else 0):
            yield Product(rows=num_columns, depth=num_rows, columns=width, turned=True)
            yield Product(rows=num_rows, depth=num_columns, columns=width)


def _block(query: torch.Tensor, key: torch.Tensor) -> tuple[int, int]:
    """Return how many queries and keys, both (batch, heads, tokens, width), a thread works on at a time."""
    length = query.shape[2]
    return min(length, 256 if length >= 768 else 64 if length >= 192 else 32), min(key.shape[2], 512)


def _reduced(num_threads: int, operator: Any, args: Sequence[Any]) -> list[int]:
    """Return the copy of booleans as numbers that are summed (`sum_out`, `ReduceOps.cpp`)."""
    return [args[0].numel() * INDEX_BYTES] if args[0].dtype is torch.bool else []


def _mean(num_threads: int, operator: Any, args: Sequence[Any]) -> list[int]:
    """Return float32 copies of half-precision numbers and of their sums (`mean_out`, `ReduceOps.cpp`)."""
    values, dims = args[0], args[1] if len(args) > 1 and args[1] else range(args[0].ndim)
    if values.dtype not in (torch.bfloat16, torch.float16):
        return []
    num_sums = values.numel() // max(1, prod(values.shape[dim] for dim in dims))
    return [values.numel() * FLOAT_BYTES, num_sums * FLOAT_BYTES]


def _singular_values(num_threads: int, operator: Any, args: Sequence[Any]) -> list[int]:
    """Return the copy that LAPACK overwrites (`linalg_svd_out`, `BatchLinearAlgebra.cpp`), without its work array."""
    return [nbytes(args[0])]


def _gathered(num_threads: int, operator: Any, args: Sequence[Any]) -> list[int]:
    """Return the copy in float32 that half precision works on: of what is made or, of sums, of what they start from.

    `cpu_scatter_gather_base_kernel` in `cpu/ScatterGatherKernel.cpp`.
    """
    values, _, index = args[:3]
    if not values.is_floating_point() or values.element_size() >= FLOAT_BYTES:
        return []
    return [FLOAT_BYTES * (index if operator is _aten.gather.default else values).numel()]


def _rolled(num_threads: int, operator: Any, args: Sequence[Any]) -> list[int]:
    """Return what is rolled along all dimensions but one (`roll_common`, `TensorTransformations.h`)."""
    values, shifts = args[:2]
    return [nbytes(values)] if len(shifts) > 1 else []


def _matrices(num_threads: int, operator: Any, args: Sequence[Any]) -> list[int]:
    """Return copies of operands that BLAS cannot take as they are (`addmm_impl_cpu_`, `LinearAlgebra.cpp`)."""
    copied = [nbytes(operand) for operand in args[-2:] if not has_leading_dimension(operand)]
    return [*copied, *_product(num_threads, *args[-2:])]


def _batches(num_threads: int, operator: Any, args: Sequence[Any]) -> list[int]:
    """Return what oneDNN takes, with copies of operands that it can't take as they are; else those of one matrix.

    `mkldnn_matmul` in `mkldnn/Matmul.cpp`, `bmm_out_or_baddbmm_` in `LinearAlgebra.cpp`.
    """
    left, right = args[-2:]
    own = _product(num_threads, left, right)
    if own:
        return [*(nbytes(each) for each in (left, right) if not (each.is_contiguous() or is_turned(each))), *own]
    if left.shape[1] * left.shape[2] * right.shape[2] < _SMALL_MATRICES:
        return []
    return [nbytes(each[0]) for each in (left, right) if not has_leading_dimension(each)]


def _product(num_threads: int, left: torch.Tensor, right: torch.Tensor) -> list[int]:
    """Return what oneDNN takes for a product in bfloat16, and nothing for others, which BLAS makes."""
    if left.dtype is not torch.bfloat16:
        return []
    num_bytes = product_bytes(product_of(left, right), num_threads)
    return [num_bytes] if num_bytes else []


_aten = torch.ops.aten

_SMALL_MATRICES = 400
"""Multiplications below which the matrices of a batch are multiplied as they are (`LinearAlgebra.cpp`)."""

_PROMOTING = (
    *(_aten.add, _aten.add_, _aten.sub, _aten.sub_, _aten.rsub, _aten.mul, _aten.mul_, _aten.div, _aten.div_),
    *(_aten.eq, _aten.ne, _aten.lt, _aten.le, _aten.gt, _aten.ge),
)
"""Operators of two operands, each with the overloads `Tensor` and `Scalar`."""

_PROMOTING_EACH = (
    *((packet, "List") for packet in (_aten._foreach_add_, _aten._foreach_sub_, _aten._foreach_mul_)),
    *((_aten._foreach_div_, "List"), (_aten._foreach_addcmul_, "Scalar"), (_aten._foreach_addcdiv_, "Scalar")),
)

WORKSPACES: Mapping[Any, Workspace] = {
    **{getattr(packet, overload): _promoted for packet in _PROMOTING for overload in ("Tensor", "Scalar")},
    _aten.where.self: _promoted,
    _aten.maximum.default: _promoted,
    _aten.minimum.default: _promoted,
    _aten.addcmul.default: _promoted,
    _aten.addcmul_.default: _promoted,
    _aten.addcdiv.default: _promoted,
    _aten.addcdiv_.default: _promoted,
    **{getattr(packet, overload): _promoted_each for packet, overload in _PROMOTING_EACH},
    _aten._safe_softmax.default: _safe_softmax,
    _aten._softmax.default: _softmax,
    _aten._log_softmax.default: _softmax,
    _aten._softmax_backward_data.default: _softmax,
    _aten._log_softmax_backward_data.default: _softmax,
    _aten.native_layer_norm.default: _layer_norm,
    _aten.native_layer_norm_backward.default: _layer_norm_backward,
    _aten.embedding.default: _embedding,
    _aten.embedding_dense_backward.default: _embedding,
    _aten._scaled_dot_product_flash_attention_for_cpu.default: _attention,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _attention_backward,
    _aten.sum.default: _reduced,
    _aten.sum.dim_IntList: _reduced,
    _aten.mean.default: _mean,
    _aten.mean.dim: _mean,
    _aten._linalg_svd.default: _singular_values,
    _aten.gather.default: _gathered,
    _aten.scatter_add.default: _gathered,
    _aten.roll.default: _rolled,
    _aten.convolution.default: convolution,
    _aten.convolution_backward.default: convolution_backward,
    _aten.mm.default: _matrices,
    _aten.addmm.default: _matrices,
    _aten.bmm.default: _batches,
    _aten.baddbmm.default: _batches,
}
"""Operators without an entry take nothing beside their results."""
