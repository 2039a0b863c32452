"""The order of an epoch's rows, and the longest first for a run that is to fail at once if it cannot fit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from datasets import Dataset


def epoch_order(num_rows: int, seed: int, epoch: int) -> torch.Tensor:
    """Return the row numbers in the order of an epoch, int64 of shape (num_rows,)."""
    # torch's CPU generator uses the low 32 bits of its seed only, so both numbers are mixed into 32 bits first.
    mixed = int(np.random.SeedSequence([seed, epoch]).generate_state(1)[0])
    return torch.randperm(num_rows, generator=torch.Generator().manual_seed(mixed))


def longest_rows(rows: Dataset, count: int) -> torch.Tensor:
    """Return the numbers of the `count` longest rows, int64 of shape (count,), the longest first.

    A row is as long as its tokens, those of a target text included. Of rows of one length the earlier comes first.
    """
    longest = np.argsort(-sum(row_lengths(rows)), kind="stable")[:count]
    return torch.from_numpy(longest.astype(np.int64))


def row_lengths(rows: Dataset) -> list[Any]:
    """Return the tokens of each row, and those of its target where that is a text; int64 arrays of shape (rows,)."""
    import pyarrow.compute as pc
    import pyarrow.types

    texts = [rows.data.column(name) for name in ("input_ids", "labels") if name in rows.column_names]
    lengths = [pc.list_value_length(text).to_numpy() for text in texts if pyarrow.types.is_list(text.type)]
    return [length.astype(np.int64) for length in lengths]


def beginning_with(first: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """Return the row numbers of `order`, those of `first` moved to the front in the order that they have there."""
    is_rest = torch.ones(len(order), dtype=torch.bool)
    is_rest[first] = False
    return torch.cat([first, order[is_rest[order]]])
