"""Sizes of stand-ins for a large parameter, and the law through what they take. No torch."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction

Shape = tuple[int, ...]

_BLOCK = 256
"""Elements per block of the usual block-wise quantisation, which the blocks of 32, 64 and 128 divide."""
_SMALLEST = 2**17
"""Elements that a stand-in has if the shape allows it: above the 4,096 from which states are quantised and the 100,000
from which bitsandbytes pages them."""
LARGEST = 2**20
"""Elements up to which a parameter needs no stand-in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StandIns:
    """Small shapes in place of a large one: per axis two lengths to fit a law and a third to verify it.

    An axis that is short already keeps its length, thrice. The others keep their remainder modulo 256, so that for
    stand-ins and the real shape alike the number of elements has one remainder, a last block one size, and the number
    of blocks, as every product of some of the lengths, grows linearly with each length.
    """

    first: Shape
    second: Shape
    third: Shape

    def corners(self) -> list[Shape]:
        """Return all shapes that take for each axis its first or its second length."""
        return list(itertools.product(*(dict.fromkeys(pair) for pair in zip(self.first, self.second, strict=True))))


def stand_ins(shape: Shape) -> StandIns:
    """Return the stand-ins of a shape with more than `LARGEST` elements; the shape itself where no axis can shrink."""
    blocks = [1] * len(shape)
    while math.prod(_lengths(shape, blocks)) < _SMALLEST:
        room = {axis: shape[axis] / _cut(shape[axis], 2 * count) for axis, count in enumerate(blocks)}
        axis = max(room, key=lambda axis: room[axis])
        if (
            _lengths(shape, [2 * count if at == axis else count for at, count in enumerate(blocks)])[axis]
            == shape[axis]
        ):
            break
        blocks[axis] *= 2
    first = _lengths(shape, blocks)
    steps = [_BLOCK if length < whole else 0 for length, whole in zip(first, shape, strict=True)]
    first, steps = _shorten_leading(first, steps)
    second, third = (
        tuple(length + times * step for length, step in zip(first, steps, strict=True)) for times in (1, 2)
    )
    return StandIns(first=first, second=second, third=third)


def _cut(length: int, blocks: int) -> int:
    return blocks * _BLOCK + length % _BLOCK


def _lengths(shape: Shape, blocks: Sequence[int]) -> Shape:
    """Return each length cut to a number of blocks and its own remainder; one that leaves no room to grow is kept."""
    pairs = ((whole, _cut(whole, count)) for whole, count in zip(shape, blocks, strict=True))
    return tuple(short if short + 2 * _BLOCK < whole else whole for whole, short in pairs)


def _shorten_leading(first: Shape, steps: list[int]) -> tuple[Shape, list[int]]:
    """Return lengths and steps with short axes before the last two cut as well, while a stand-in is too large.

    Experts stacked in one tensor, filters of a convolution. Only where the rest is a multiple of a block, because then
    the number of elements stays one.
    """
    lengths, steps = list(first), list(steps)
    for axis in range(len(first) - 2):
        others = math.prod(lengths[:axis] + lengths[axis + 1 :])
        enough = max(2, math.ceil(_SMALLEST / others))
        if math.prod(lengths) > LARGEST and enough + 2 < lengths[axis] and others % _BLOCK == 0:
            lengths[axis], steps[axis] = enough, 1
    return tuple(lengths), steps


def multi_affine(lengths: StandIns, values: Callable[[Shape], int], shape: Shape) -> Fraction:
    """Return at `shape` the law that is affine in each axis and goes through the values at all corners."""
    total = Fraction(0)
    for corner in lengths.corners():
        weight = Fraction(1)
        for at, own, one, two in zip(shape, corner, lengths.first, lengths.second, strict=True):
            other = one + two - own
            weight *= Fraction(at - other, own - other) if own != other else 1
        total += weight * values(corner)
    return total
