"""The numbers in saved states: the first of each tensor, its ends, and how many are not finite, in bounded memory."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from effcli.measure.inspection_record import SavedValues
from effcli.optim.patterns import matches
from effcli.saved.optimizer import SavedOptimizer
from effcli.saved.tensors import SavedTensor
from effcli.state_entries import entries_of
from effcli.storage import leaves

CHUNK_BYTES = 8 << 20
"""Read at a time; after each chunk the pages of the files are let go."""
NUM_FIRST = 6
_NAMES = re.compile(r"torch\.(bool|(u?int|float)(8|16|32|64)|float8_.*|bfloat16|complex\d+)")
_COMPARED = frozenset(
    dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype) and _NAMES.fullmatch(str(dtype))
)


def values_of(saved: SavedOptimizer, pattern: str, names: Mapping[str, str] | None = None) -> Iterator[SavedValues]:
    """Yield the tensors whose `parameter` or `parameter.key` fits a pattern (`effcli.optim.patterns`), in order.

    `names` are the parameters' names by label, where something else than the file knows them.

    Raises:
        DataError: a part of a sharded checkpoint is missing or damaged.
    """
    for label, key, leaf in _leaves(saved):
        name = (names or {}).get(label, label)
        if not matches(name, (pattern,)) and not matches(f"{name}.{key}", (pattern,)):
            continue
        if isinstance(leaf, torch.Tensor):
            yield _read(saved, name, key, leaf, saved.pieces.get((label, key)))
        else:
            first = (float(leaf),)
            yield SavedValues(
                parameter=name, key=key, shape=(), dtype="number", first=first, minimum=first[0], maximum=first[0]
            )


def _leaves(saved: SavedOptimizer) -> Iterator[tuple[str, str, torch.Tensor | int | float]]:
    """Yield label, key with part, and value of every number and plain tensor, also of those inside others."""
    for label, state in saved.states.items():
        for key, value in entries_of(state):
            for part, leaf in leaves(value, key):
                text = key if part == key else f"{key}.{part}"
                if isinstance(leaf, SavedTensor):
                    for inner in leaf.__tensor_flatten__()[0]:
                        yield label, f"{text}.{inner}", getattr(leaf, inner)
                else:
                    yield label, text, leaf


@dataclass(slots=True)
class _Ends:
    """Smallest and largest value so far, and how many were no numbers or infinite."""

    low: float = math.inf
    high: float = -math.inf
    num_nan: int = 0
    num_infinite: int = 0

    def add(self, values: torch.Tensor) -> None:
        """Take in values, which are not empty."""
        ends = values.aminmax()
        if not math.isfinite(ends.min.item()) or not math.isfinite(ends.max.item()):
            numbers = values[~values.isnan()]
            self.num_nan += values.numel() - numbers.numel()
            self.num_infinite += int(numbers.isinf().sum())
            if not numbers.numel():
                return
            ends = numbers.aminmax()
        self.low, self.high = min(self.low, ends.min.item()), max(self.high, ends.max.item())


def _read(
    saved: SavedOptimizer,
    name: str,
    key: str,
    tensor: torch.Tensor,
    pieces: Callable[[], Iterator[torch.Tensor]] | None,
) -> SavedValues:
    """Return the values of a mapped tensor, or of one that lies in pieces, in the order of the pieces."""
    first: list[float] = []
    ends = _Ends()
    held = pieces() if pieces is not None else () if tensor.is_meta else (tensor,)
    for piece in held:
        if len(first) < NUM_FIRST:
            first += _first(piece, NUM_FIRST - len(first))
        for chunk in _chunks(piece):
            ends.add(chunk)
            saved.forget()
    return SavedValues(
        parameter=name,
        key=key,
        shape=tuple(tensor.shape),
        dtype=str(tensor.dtype).removeprefix("torch."),
        first=tuple(first),
        minimum=None if ends.low > ends.high else ends.low,
        maximum=None if ends.low > ends.high else ends.high,
        num_nan=ends.num_nan,
        num_infinite=ends.num_infinite,
    )


def _first(tensor: torch.Tensor, count: int) -> list[float]:
    """Return the first few values in the order of their indices."""
    places = _unravelled(tuple(tensor.shape), min(count, tensor.numel()))
    return [float(_numbers(tensor[place].reshape(1)).item()) for place in places]


def _unravelled(shape: tuple[int, ...], count: int) -> Iterator[tuple[int, ...]]:
    for flat in range(count):
        place: list[int] = []
        for side in reversed(shape):
            flat, index = divmod(flat, side)
            place.insert(0, index)
        yield tuple(place)


def _chunks(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield copies of a tensor's values, flat and as numbers that torch compares, a few megabytes at a time.

    An expanded dimension has the same values at every index, so one is read. Values under several other indices may be
    read once or more: what is asked for does not depend on it.
    """
    for dimension, (side, step) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if step == 0 and side > 1:
            tensor = tensor.narrow(dimension, 0, 1)
    by_step = sorted(range(tensor.dim()), key=lambda dimension: -tensor.stride(dimension))
    tensor = tensor.permute(by_step)
    limit = max(CHUNK_BYTES // tensor.element_size(), 1)
    if tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():  # windows that overlap
        reach = 1 + sum((side - 1) * step for side, step in zip(tensor.shape, tensor.stride(), strict=True))
        tensor = tensor.as_strided((reach,), (1,))
    yield from (_numbers(part) for part in _split(tensor, limit) if part.numel())


def _split(tensor: torch.Tensor, limit: int) -> Iterator[torch.Tensor]:
    """Yield all of a tensor in flat parts of up to `limit` elements."""
    if tensor.is_contiguous():
        yield from tensor.view(-1).split(limit)
        return
    for part in tensor.split(max(limit // tensor[0].numel(), 1)):
        if part.numel() <= limit:
            yield part.flatten()
        else:  # one row, which is larger
            yield from _split(part[0], limit)


def _numbers(values: torch.Tensor) -> torch.Tensor:
    """Return a copy in a dtype whose values torch can compare and whose numbers are the same."""
    if values.dtype not in _COMPARED:  # packed bits, which torch has no numbers for
        values = values.view(torch.uint8 if values.element_size() == 1 else torch.int16)
    if values.dtype.is_complex:
        return values.to(torch.complex128).abs()
    if values.dtype.is_floating_point:
        return values.to(torch.float64 if values.dtype == torch.float64 else torch.float32, copy=True)
    wide: Any = torch.float64 if values.dtype == torch.uint64 else torch.int64
    return values.to(wide, copy=True)
