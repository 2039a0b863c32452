"""Sizes in bytes that the laws of several devices' kernels share."""

from __future__ import annotations

import torch

FLOAT_BYTES = 4
INDEX_BYTES = 8


def nbytes(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor's elements."""
    return int(tensor.numel() * tensor.element_size())


def copies(*tensors: torch.Tensor) -> list[int]:
    """Return the sizes of contiguous copies of those that are not contiguous."""
    return [nbytes(tensor) for tensor in tensors if not tensor.is_contiguous()]


def has_leading_dimension(operand: torch.Tensor) -> bool:
    """Return whether the last two dimensions are a matrix that BLAS can take as it is, by rows or by columns."""
    rows, columns = operand.shape[-2:]
    row_stride, column_stride = operand.stride()[-2:]
    by_column = row_stride == 1 and column_stride >= max(1, rows)
    by_row = column_stride == 1 and row_stride >= max(1, columns)
    return bool(by_column or by_row)
