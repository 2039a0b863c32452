"""CUDA's allocator as PyTorch builds it: what a block counts with, and what the process holds. No torch.

The rules are those of `c10/cuda/CUDACachingAllocator.cpp` (`malloc`, `get_free_block`, `should_split`,
`get_allocation_size`, `free_block`, `release_cached_blocks`), the same at commits eb42ad6 and 001074d, with the sizes
and default settings of `c10/core/AllocatorConfig.h` in 2.13. One stream is simulated, as training uses one. Left out
are `expandable_segments` and the other settings of `PYTORCH_ALLOC_CONF`.
"""

from __future__ import annotations

import sys
from bisect import bisect_left, insort
from dataclasses import dataclass

from effcli.units import MIB, format_bytes, rounded_up

BLOCK_BYTES = 512
"""Sizes are rounded up to a multiple of this."""
SMALL_BYTES = 1 * MIB
"""The largest request that the small pool serves; what a large block may waste before it is split."""
SMALL_SEGMENT_BYTES = 2 * MIB
"""What the small pool asks of the device at a time."""
LARGE_SEGMENT_BYTES = 20 * MIB
"""What the large pool asks of the device for requests below `OWN_SEGMENT_BYTES`."""
OWN_SEGMENT_BYTES = 10 * MIB
"""From this size a request gets a segment of its own size, in multiples of `PAGE_BYTES`."""
PAGE_BYTES = 2 * MIB


class CapacityError(Exception):
    """A segment does not fit into the capacity, even with everything given back that is wholly free."""

    def __init__(self, segment_bytes: int, reserved_bytes: int, capacity_bytes: int) -> None:
        super().__init__(
            f"{format_bytes(segment_bytes)} do not fit beside {format_bytes(reserved_bytes)} "
            f"in {format_bytes(capacity_bytes)}"
        )
        self.segment_bytes = segment_bytes
        self.reserved_bytes = reserved_bytes
        self.capacity_bytes = capacity_bytes


@dataclass(slots=True, eq=False)
class _Block:
    """A stretch of a segment, linked to its neighbours in the same segment."""

    pool: _Pool
    address: int
    size: int
    before: _Block | None = None
    after: _Block | None = None
    free: bool = False


class CachingAllocator:
    """Counts as the CUDA allocator does; see `effcli.memory.allocator.Allocator`.

    Where a segment would pass `capacity_bytes`, all segments that are wholly free are given back first, as on a card
    that is full.
    """

    def __init__(self, capacity_bytes: int | None = None) -> None:
        self.allocated_bytes = 0
        self.reserved_bytes = 0
        self._capacity_bytes = sys.maxsize if capacity_bytes is None else capacity_bytes
        self._small, self._large = _Pool(least_remainder=BLOCK_BYTES), _Pool(least_remainder=SMALL_BYTES + 1)
        self._live: dict[int, _Block | None] = {}
        self._next_address = 0

    def allocate(self, block: int, num_bytes: int) -> int:
        """Take `num_bytes` for the block; return the whole size of what it got.

        Raises:
            CapacityError: it cannot be had within `capacity_bytes`.
        """
        if not num_bytes:  # an empty tensor has no memory (`NativeCachingAllocator::allocate`)
            self._live[block] = None
            return 0
        size = rounded_up(num_bytes, BLOCK_BYTES)
        pool = self._small if size <= SMALL_BYTES else self._large
        taken = pool.take(size) or self._new_segment(pool, size)
        pool.split(taken, size)
        self._live[block] = taken
        self.allocated_bytes += taken.size
        return taken.size

    def free(self, block: int) -> None:
        """Give the block back, joined with its free neighbours."""
        given = self._live.pop(block)
        if given is not None:
            self.allocated_bytes -= given.size
            given.pool.give(given)

    def _new_segment(self, pool: _Pool, size: int) -> _Block:
        segment_bytes = _segment_bytes(size)
        if self.reserved_bytes + segment_bytes > self._capacity_bytes:
            self.reserved_bytes -= self._large.release() + self._small.release()
            if self.reserved_bytes + segment_bytes > self._capacity_bytes:
                raise CapacityError(segment_bytes, self.reserved_bytes, self._capacity_bytes)
        # The driver chooses addresses; that later segments lie higher is an assumption. It matters between free
        # blocks of one size alone.
        segment = _Block(pool, self._next_address, segment_bytes)
        self._next_address += segment_bytes
        self.reserved_bytes += segment_bytes
        return segment


class _Pool:
    """Free blocks in the order in which they are tried: the smallest first, the lowest address among equals.

    A block is split where at least `least_remainder` bytes would remain.
    """

    def __init__(self, *, least_remainder: int) -> None:
        self._least_remainder = least_remainder
        self._keys: list[int] = []
        self._blocks: dict[int, _Block] = {}

    def take(self, size: int) -> _Block | None:
        """Return the smallest free block of at least `size`, which is no longer free; None if there is none."""
        index = bisect_left(self._keys, size << 64)
        if index == len(self._keys):
            return None
        block = self._blocks.pop(self._keys.pop(index))
        block.free = False
        return block

    def split(self, block: _Block, size: int) -> None:
        """Cut the block to `size` and keep the rest as free, unless the rest is too small to be worth it."""
        if block.size - size < self._least_remainder:
            return
        rest = _Block(block.pool, block.address + size, block.size - size, block, block.after)
        if rest.after is not None:
            rest.after.before = rest
        block.after = rest
        block.size = size
        self._add(rest)

    def give(self, block: _Block) -> None:
        """Take the block back as free, as one with the free blocks beside it."""
        before, after = block.before, block.after
        if before is not None and before.free:
            self._remove(before)
            block.address = before.address
            block.size += before.size
            block.before = before.before
            if block.before is not None:
                block.before.after = block
        if after is not None and after.free:
            self._remove(after)
            block.size += after.size
            block.after = after.after
            if block.after is not None:
                block.after.before = block
        self._add(block)

    def release(self) -> int:
        """Forget all segments that are wholly free; return their bytes."""
        whole = [block for block in self._blocks.values() if block.before is None and block.after is None]
        for block in whole:
            self._remove(block)
        return sum(block.size for block in whole)

    def _add(self, block: _Block) -> None:
        block.free = True
        key = _key(block)
        insort(self._keys, key)
        self._blocks[key] = block

    def _remove(self, block: _Block) -> None:
        key = _key(block)
        del self._keys[bisect_left(self._keys, key)]
        del self._blocks[key]


def _key(block: _Block) -> int:
    """Return size and address in one number, which sorts faster than a pair."""
    return block.size << 64 | block.address


def _segment_bytes(size: int) -> int:
    """Return what is asked of the device for a block of `size` bytes."""
    if size <= SMALL_BYTES:
        return SMALL_SEGMENT_BYTES
    if size < OWN_SEGMENT_BYTES:
        return LARGE_SEGMENT_BYTES
    return rounded_up(size, PAGE_BYTES)
