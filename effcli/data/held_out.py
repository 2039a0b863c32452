"""Rows of the training data that are kept for evaluation, where that was asked for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from effcli.errors import DataError

if TYPE_CHECKING:
    from datasets import Dataset


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOut:
    """The rows that train and the rows kept from them, each in the order of the data; no row is in both."""

    train: Dataset
    eval: Dataset


def hold_out(rows: Dataset, fraction: float, *, seed: int, name: str) -> HeldOut:
    """Return the rows in two parts: `fraction` of them, at least one, for evaluation, and at least one for training.

    Raises:
        DataError: there is one row only.
    """
    if len(rows) < 2:
        raise DataError(f"--eval-fraction: '{name}' has 1 row, of which none can be kept for evaluation")
    is_kept = held_out_rows(len(rows), fraction, seed=seed)
    return HeldOut(train=rows.select(np.flatnonzero(~is_kept)), eval=rows.select(np.flatnonzero(is_kept)))


def held_out_rows(num_rows: int, fraction: float, *, seed: int) -> npt.NDArray[np.bool_]:
    """Return which rows are kept for evaluation, bool of shape (num_rows,).

    Each row draws a number and those with the smallest are kept. The numbers are the raw stream of a bit generator,
    which numpy promises to leave as it is in all versions (NEP 19), unlike what `Generator.permutation` makes of it.
    """
    draws = np.random.PCG64(np.random.SeedSequence([seed, num_rows])).random_raw(num_rows)
    num_kept = min(max(round(num_rows * fraction), 1), num_rows - 1)
    is_kept: npt.NDArray[np.bool_] = np.zeros(num_rows, dtype=bool)
    is_kept[np.argsort(draws, kind="stable")[:num_kept]] = True
    return is_kept
