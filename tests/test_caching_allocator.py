"""The simulated CUDA allocator: sequences worked out by hand from upstream's rules, and a slow simulation beside it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from effcli.memory.caching_allocator import CachingAllocator, CapacityError

KIB, MIB = 1024, 1024 * 1024


@pytest.mark.parametrize(
    ("num_bytes", "allocated", "reserved"),
    [
        (0, 0, 0),  # an empty tensor has no pointer
        (1, 512, 2 * MIB),  # round_size: at least 512, then multiples of 512; small pool: segments of 2 MiB
        (512, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),  # size <= kSmallSize is small
        (MIB + 1, MIB + 512, 20 * MIB),  # large, below kMinLargeAlloc: 20 MiB; more than 1 MiB remains, so it is split
        (10 * MIB - 1, 10 * MIB, 10 * MIB),  # rounded first: 10 MiB is not below kMinLargeAlloc
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        (11 * MIB, 12 * MIB, 12 * MIB),  # a multiple of 2 MiB; exactly 1 MiB remains, which is not more than 1 MiB
        (11 * MIB - 512, 11 * MIB - 512, 12 * MIB),  # 1 MiB and 512 B remain: split
        (30522 * 768 * 4, 94_371_840, 94_371_840),  # BERT's embedding in 90 MiB: the 608,256 B that remain count
    ],
)
def test_one_block_counts_with_its_rounded_size_and_what_is_not_worth_splitting_off(
    num_bytes: int, allocated: int, reserved: int
) -> None:
    allocator = CachingAllocator()
    assert allocator.allocate(0, num_bytes) == allocated
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (allocated, reserved)
    allocator.free(0)
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (0, reserved)


def test_small_blocks_share_a_segment_until_it_is_full() -> None:
    allocator = CachingAllocator()
    for block in range(4):
        allocator.allocate(block, 512 * KIB)  # four times 512 KiB fill 2 MiB
    assert allocator.reserved_bytes == 2 * MIB
    allocator.allocate(4, 1)
    assert allocator.reserved_bytes == 4 * MIB


def test_requests_below_10_mib_share_segments_of_20_mib() -> None:
    allocator = CachingAllocator()
    assert allocator.allocate(0, 9 * MIB) == 9 * MIB
    assert allocator.allocate(1, 9 * MIB) == 9 * MIB  # 11 MiB were left, 2 remain
    assert allocator.reserved_bytes == 20 * MIB
    assert allocator.allocate(2, 1536 * KIB) == 2 * MIB  # half a MiB would remain: not split
    assert allocator.reserved_bytes == 20 * MIB
    assert allocator.allocated_bytes == 20 * MIB


def test_the_smallest_free_block_that_is_large_enough_is_taken() -> None:
    allocator = CachingAllocator()
    for block, size in enumerate((40 * MIB, 16 * MIB, 30 * MIB)):  # a segment each
        allocator.allocate(block, size)
    for block in range(3):
        allocator.free(block)
    allocator.allocate(3, 29 * MIB)  # from the 30 MiB, of which 1 MiB more counts
    assert allocator.allocated_bytes == 30 * MIB
    allocator.allocate(4, 30 * MIB)  # only the 40 MiB are left for it
    allocator.allocate(5, 16 * MIB)
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (76 * MIB, 86 * MIB)
    allocator.allocate(6, 10 * MIB)  # what was split from the 40 MiB
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (86 * MIB, 86 * MIB)


def test_of_equal_free_blocks_the_lower_address_is_taken() -> None:
    allocator = CachingAllocator()
    for block in range(4):
        allocator.allocate(block, 5 * MIB)  # one segment of 20 MiB: blocks at 0, 5, 10, 15
    allocator.free(2)
    allocator.free(0)
    allocator.allocate(4, 5 * MIB)  # at 0, so that the block at 10 can join the one at 5 or 15
    allocator.free(3)
    allocator.allocate(5, 10 * MIB)
    assert allocator.reserved_bytes == 20 * MIB


def test_a_freed_block_joins_the_free_blocks_on_both_sides() -> None:
    allocator = CachingAllocator()
    for block in range(5):
        allocator.allocate(block, 4 * MIB)
    for block in (1, 3, 2):  # the last one lies between the others
        allocator.free(block)
    assert allocator.allocate(5, 12 * MIB) == 12 * MIB
    assert allocator.reserved_bytes == 20 * MIB


def test_free_blocks_with_a_live_one_between_them_do_not_join() -> None:
    allocator = CachingAllocator()
    for block in range(5):
        allocator.allocate(block, 4 * MIB)
    for block in (0, 2, 4):
        allocator.free(block)
    allocator.allocate(5, 8 * MIB)  # 12 MiB are free, but never 8 in one place; below 10 MiB: 20 MiB more
    assert allocator.reserved_bytes == 40 * MIB


def test_small_and_large_requests_never_share_a_segment() -> None:
    allocator = CachingAllocator()
    allocator.allocate(0, 2 * MIB)
    allocator.free(0)
    allocator.allocate(1, MIB)
    assert allocator.reserved_bytes == 22 * MIB


def test_segments_that_are_wholly_free_make_room_when_the_capacity_is_reached() -> None:
    allocator = CachingAllocator(capacity_bytes=64 * MIB)
    allocator.allocate(0, 30 * MIB)
    allocator.allocate(1, 20 * MIB)
    allocator.allocate(2, MIB)
    allocator.free(0)
    allocator.free(2)
    allocator.allocate(3, 40 * MIB)  # 52 + 40 do not fit; 30 and 2 are given back
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (60 * MIB, 60 * MIB)


def test_a_segment_that_is_partly_live_stays_when_the_capacity_is_reached() -> None:
    allocator = CachingAllocator(capacity_bytes=40 * MIB)
    allocator.allocate(0, 10 * MIB + 512)  # 12 MiB, split
    allocator.allocate(1, 1280 * KIB)  # its rest, which is 2 MiB less 512 B
    allocator.free(0)
    with pytest.raises(CapacityError) as raised:
        allocator.allocate(2, 30 * MIB)  # 12 + 30 do not fit
    error = raised.value
    assert (error.segment_bytes, error.reserved_bytes, error.capacity_bytes) == (30 * MIB, 12 * MIB, 40 * MIB)
    assert allocator.allocate(3, 28 * MIB) == 28 * MIB  # which fills it to the last byte


class Slow:
    """The same rules as lists of segments that are searched through: neither links nor sorted keys."""

    def __init__(self) -> None:
        self.segments: list[tuple[bool, list[list[int | None]]]] = []  # small; blocks of size and owner

    def allocate(self, owner: int, num_bytes: int) -> None:
        size = max(512, (num_bytes + 511) // 512 * 512)
        small = size <= MIB
        fitting = [
            (block[0], place, index)
            for place, (kind, blocks) in enumerate(self.segments)
            for index, block in enumerate(blocks)
            if kind == small and block[1] is None and block[0] >= size
        ]
        if not fitting:
            new = 2 * MIB if small else 20 * MIB if size < 10 * MIB else (size + 2 * MIB - 1) // (2 * MIB) * (2 * MIB)
            self.segments.append((small, [[new, None]]))
            fitting = [(new, len(self.segments) - 1, 0)]
        whole, place, index = min(fitting)
        blocks = self.segments[place][1]
        if whole - size >= (512 if small else MIB + 1):
            blocks[index : index + 1] = [[size, owner], [whole - size, None]]
        else:
            blocks[index][1] = owner

    def free(self, owner: int) -> None:
        for _, blocks in self.segments:
            for block in blocks:
                if block[1] == owner:
                    block[1] = None
            joined: list[list[int | None]] = []
            for size, holder in blocks:
                if joined and holder is None and joined[-1][1] is None:
                    joined[-1][0] += size
                else:
                    joined.append([size, holder])
            blocks[:] = joined

    def allocated_bytes(self) -> int:
        return sum(size for _, blocks in self.segments for size, owner in blocks if owner is not None)

    def reserved_bytes(self) -> int:
        return sum(size for _, blocks in self.segments for size, _ in blocks)


SIZES = st.one_of(
    st.integers(1, 4096), st.integers(1, 2 * MIB), st.integers(MIB, 40 * MIB), st.sampled_from([MIB, 4 * MIB, 10 * MIB])
)


@given(st.lists(st.one_of(SIZES, st.integers(-30, -1)), max_size=60))
def test_any_sequence_counts_as_in_the_slow_simulation_and_joins_again_to_whole_segments(steps: list[int]) -> None:
    """A positive step allocates as many bytes; a negative one frees one of the live blocks."""
    allocator, slow = CachingAllocator(), Slow()
    live: list[int] = []
    for number, step in enumerate(steps):
        if step > 0:
            allocator.allocate(number, step)
            slow.allocate(number, step)
            live.append(number)
        elif live:
            gone = live.pop(step % len(live))
            allocator.free(gone)
            slow.free(gone)
        assert (allocator.allocated_bytes, allocator.reserved_bytes) == (slow.allocated_bytes(), slow.reserved_bytes())
    for number in live:
        allocator.free(number)
        slow.free(number)
    assert allocator.allocated_bytes == 0
    reserved = allocator.reserved_bytes
    whole = [blocks[0][0] for _, blocks in slow.segments]
    for number, size in enumerate(sorted(whole, reverse=True)):
        allocator.allocate(-1 - number, MIB if size == 2 * MIB else size)
    assert allocator.reserved_bytes == reserved


@given(st.lists(SIZES, max_size=40), st.integers(1, 100))
def test_a_capacity_is_never_passed(sizes: list[int], capacity: int) -> None:
    allocator = CachingAllocator(capacity_bytes=capacity * MIB)
    for number, size in enumerate(sizes):
        if number >= 3:
            allocator.free(number - 3)
        try:
            allocator.allocate(number, size)
        except CapacityError:
            break
        assert allocator.allocated_bytes <= allocator.reserved_bytes <= capacity * MIB
