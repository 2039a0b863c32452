"""What oneDNN takes for a product of matrices in bfloat16: one storage, for the time of the call.

Sources are those of torch 2.13 and its oneDNN 3.12. Sums of sizes are exact to the byte where AMX isn't used; left out
are 4 bytes for a factor other than 1, and the copy of a single row whose elements lie apart.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from math import ceil
from typing import Any, TypeAlias

import numpy as np
import torch

from effcli.trace.cpu_processor import Bf16, bf16_products
from effcli.trace.sizes import FLOAT_BYTES, has_leading_dimension
from effcli.units import rounded_up

_Numbers: TypeAlias = Any
"""An array, or one number of it."""

_BF16_BYTES = 2
_ALIGNMENT = 128
"""Each buffer comes with as many bytes (`registry_t::book`, `src/common/memory_tracking.hpp`)."""
_SMALLEST = 16**3
"""Multiplications up to which torch doesn't ask oneDNN (`checksize` and `mkldnn_gemm`, `mkldnn/Matmul.cpp`)."""
_POINTERS = 16 * 40
"""Bytes of a thread's list of blocks: 16 of `brgemm_batch_element_t` (`src/cpu/x64/brgemm/brgemm_types.hpp`)."""
_COLUMNS, _DEPTH = 64, 32
"""Columns of a block of the right operand, and what its rows are rounded up to (`get_wei_k_blk`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """(batch, rows, depth) times (batch, depth, columns); `turned` says that the left operand is stored by columns."""

    rows: int
    depth: int
    columns: int
    turned: bool = False
    batch: int = 1

    @property
    def copies_left(self) -> bool:
        """Return whether blocks of the left operand are copied: it is turned, or its rows are a multiple of 8 KiB."""
        strided = self.depth >= 4096 and _is_power_of_two(self.depth) and self.rows >= 1024
        return self.rows > 1 and (self.turned or strided)


def product_of(left: torch.Tensor, right: torch.Tensor) -> Product:
    """Return the product of two operands as oneDNN is asked for it, (rows, depth) or (batch, rows, depth) the left one.

    A single column is asked for as a row (`addmm_impl_cpu_`, `LinearAlgebra.cpp`).
    """
    rows, depth = left.shape[-2:]
    columns = right.shape[-1]
    if left.ndim == 3:
        turned = rows == 1 or (not left.is_contiguous() and is_turned(left))
        return Product(rows=rows, depth=depth, columns=columns, turned=turned, batch=left.shape[0])
    if columns == 1:
        return Product(rows=1, depth=depth, columns=rows, turned=True)
    turned = rows == 1 or (has_leading_dimension(left) and left.stride(1) != 1)
    return Product(rows=rows, depth=depth, columns=columns, turned=turned)


def is_turned(matrices: torch.Tensor) -> bool:
    """Return whether matrices of a batch are stored by columns, one after another (`mkldnn_matmul`)."""
    _, rows, columns = matrices.shape
    return bool(matrices.stride() == (rows * columns, 1, rows))


def product_bytes(product: Product, num_threads: int) -> int:
    """Return the bytes that oneDNN takes for a product in bfloat16, 0 where it isn't asked."""
    kind = bf16_products()
    if kind is Bf16.NONE or product.batch * product.rows * product.depth * product.columns <= _SMALLEST:
        return 0
    return (_in_blocks if kind is Bf16.IN_BLOCKS else _in_float)(product, num_threads)


def _in_float(product: Product, num_threads: int) -> int:
    """Return the bytes of a product in float32 (`book_acc_scratchpad`, `src/cpu/matmul/gemm_based_common.hpp`).

    Each thread makes its share of whole rows, one matrix of a batch at a time.
    """

    def share(threads: int) -> int:
        work = ceil(product.batch * size / threads)
        whole_rows = work - work % product.columns if work >= product.columns else work
        return rounded_up(min(size, whole_rows), 64)

    size = product.rows * product.columns
    return max(share(1), num_threads * share(num_threads)) * FLOAT_BYTES + _ALIGNMENT


@cache
def _in_blocks(product: Product, num_threads: int) -> int:
    """Return the bytes of each thread's block of the operands and of the product in float32.

    `init_aux_values` and `init_scratchpad` in `src/cpu/x64/matmul/brgemm_matmul_utils.cpp`. Of the left operand a block
    is copied where needed, of the right one always; the product's is always there, as whether it is needed
    (`is_buffer_c_required`) is asked before the depth of a block is known.
    """
    depth = _block_depth(product)
    rows, groups, parts = _blocks(product, num_threads)
    columns = min(_COLUMNS, product.columns)
    buffers = [_POINTERS, _BF16_BYTES * _COLUMNS * rounded_up(depth, _DEPTH)]
    if product.copies_left:
        buffers.append(_BF16_BYTES * rows * _row_length(depth))
    if parts > 1:
        buffers.append(FLOAT_BYTES * product.rows * product.columns)
    else:
        buffers.append(FLOAT_BYTES * rows * columns * (groups if depth < product.depth else 1))
    return sum(num_threads * buffer + _ALIGNMENT for buffer in buffers)


def _block_depth(product: Product) -> int:
    """Return the depth of a block."""
    return min(product.depth, 1024 if product.depth > 1024 and not product.turned else 512)


def _row_length(depth: int) -> int:
    """Return the elements of a copied row: whole cache lines, but no large power of two (`get_actual_lda`)."""
    length = rounded_up(depth, 32)
    return length + 32 if length >= 512 and _is_power_of_two(length) else length


def _blocks(product: Product, num_threads: int) -> tuple[int, int, int]:
    """Return a block's rows, how many blocks of columns follow one another, and into how many parts the depth is split.

    The choice is the first that leaves the least work over (`compute_blocking_heuristic_avx512`).
    """
    num_blocks = ceil(product.columns / _COLUMNS)
    least, most = min(product.rows, 32), min(product.rows, 256)
    max_parts = 1
    if num_threads > product.batch * num_blocks:
        least = min(product.rows, 16)
        if product.batch == 1 and product.turned and product.depth >= 2048 and _is_power_of_two(product.depth):
            max_parts = min(num_threads, 4)
    rows = np.arange(most, least - 1, -1)[None]
    groups = np.arange(min(16 if product.copies_left else 1, num_blocks), 0, -1)[:, None]
    best, chosen = np.float32(1), (1, 1, 1)
    for parts in range(max_parts, 0, -1):
        scores = _left_over(product, rows, groups, parts, num_threads)
        if max_parts == 1:
            work = _work(product, rows, groups)
            scores = np.where((work < 3 * num_threads) & (work % num_threads != 0), np.float32(1), scores)
        group, row = np.unravel_index(np.argmin(scores), scores.shape)
        score, found = scores[group, row], (int(rows[0, row]), int(groups[group, 0]), parts)
        if not score < best:
            smallest = np.array([[least]]), np.array([[1]])
            score, found = _left_over(product, *smallest, parts, num_threads)[0, 0], (least, 1, parts)
        if score < best:
            best, chosen = score, found
    return chosen


def _left_over(product: Product, rows: _Numbers, groups: _Numbers, parts: int, num_threads: int) -> _Numbers:
    """Return the mean share of work that is left over, in float32 as `get_imbalance` has it, where ties decide."""
    num_blocks, at_once = ceil(product.columns / _COLUMNS), num_threads // parts
    num_groups = -(-num_blocks // groups)
    shares = (
        _uneven(_work(product, rows, groups), at_once),
        _share(rows * -(-product.rows // rows) % product.rows, product.rows),
        _share(num_groups * groups - num_blocks, num_blocks),
        _share(np.array(num_threads - at_once * parts), num_threads),
        _uneven(np.array(product.depth), parts * _block_depth(product)),
    )
    return sum(shares, np.float32(0)) / np.float32(len(shares))


def _work(product: Product, rows: _Numbers, groups: _Numbers) -> _Numbers:
    """Return the number of pieces that threads work on."""
    block_columns = min(_COLUMNS, product.columns)
    return -(-product.rows // rows) * -(-product.columns // (block_columns * groups)) * product.batch


def _uneven(work: _Numbers, size: int) -> _Numbers:
    """Return how far the work is from a multiple of a size, as a share of it (`calculate_spatial_disbalance`)."""
    rest = work % size
    return _share(np.where(work < size, size - rest, np.minimum(size - rest, rest)), size)


def _share(count: _Numbers, whole: int) -> _Numbers:
    return count.astype(np.float32) / np.float32(whole)


def _is_power_of_two(number: int) -> bool:
    return number & (number - 1) == 0
