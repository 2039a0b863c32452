"""The tape of any batch size, from the tapes of two. No torch."""

from __future__ import annotations

from dataclasses import replace
from itertools import zip_longest

from effcli.memory.tape import Alloc, Event, MicroTape


class NotAffineError(Exception):
    """The two tapes have other events, or sizes that don't grow in whole steps; this batch has to be traced."""


def scaled(smaller: MicroTape, larger: MicroTape, *, sizes: tuple[int, int], to: int) -> MicroTape:
    """Return the tape at batch size `to`, from the tapes at the two `sizes`.

    Every tensor of a step has a size that is a constant plus so much per row, so that two traces with the same events
    give the third exactly, as long as its kernels keep to the same rules: from a certain size on the workspaces of some
    follow another one. An answer that counts is traced itself.

    Raises:
        NotAffineError: they don't.
    """
    first, second = sizes
    events: list[Event] = []
    for one, other in zip_longest(smaller.events, larger.events):
        if isinstance(one, Alloc) and isinstance(other, Alloc) and one[2:] == other[2:] and one.block == other.block:
            per_row, rest = divmod(other.num_bytes - one.num_bytes, second - first)
            num_bytes = one.num_bytes + per_row * (to - first)
            if rest or num_bytes < 0:
                raise NotAffineError
            events.append(one._replace(num_bytes=num_bytes))
        elif one == other and one is not None:
            events.append(one)
        else:
            raise NotAffineError
    return replace(smaller, events=tuple(events))
