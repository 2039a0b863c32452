"""Allocators that a program of events is played to. No torch."""

from __future__ import annotations

from typing import Protocol


class Allocator(Protocol):
    """Counts bytes as a device's allocator does.

    `allocate` returns the bytes that count as allocated for the block, which may be more than was asked for; `free`
    gives exactly those back. `allocated_bytes` is their sum now, `reserved_bytes` what the device has handed out.
    """

    allocated_bytes: int
    reserved_bytes: int

    def allocate(self, block: int, num_bytes: int) -> int:
        """Take `num_bytes` for the block; return what counts."""

    def free(self, block: int) -> None:
        """Give the block back."""


class PlainAllocator:
    """The CPU's: every storage is asked from the system as it is, and nothing is kept."""

    def __init__(self) -> None:
        self.allocated_bytes = 0
        self.reserved_bytes = 0
        self._blocks: dict[int, int] = {}

    def allocate(self, block: int, num_bytes: int) -> int:
        """Take `num_bytes` for the block; return what counts."""
        self._blocks[block] = num_bytes
        self.allocated_bytes += num_bytes
        self.reserved_bytes = self.allocated_bytes
        return num_bytes

    def free(self, block: int) -> None:
        """Give the block back."""
        self.allocated_bytes -= self._blocks.pop(block)
        self.reserved_bytes = self.allocated_bytes
