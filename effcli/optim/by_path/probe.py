"""State of an optimizer class whose law nobody wrote down, found by stepping the class itself. No torch at import.

A parameter of up to about a million elements is stepped at its own size: two equal ones at once, with random weights
and gradients, so that storages which both states hold are known as shared. For a larger one

1. the step is made without data, on torch's meta device, where size costs nothing. It counts only if on a small
   stand-in it gives what the real step gives there, key by key. A step that fails because it reads a value counts as
   far as it came, under the same condition;
2. else real steps on small stand-ins give a law that is affine in each length of the shape, verified on one more;
3. else the step is made at the real size, up to 67 million elements.

A parameter whose state takes more than 1 GiB in a complete step without data is not tried for real, nor its stand-in.

Left out: what depends on the values of weights or gradients (refused where two equal parameters differ), on other
parameters, on a group's weight decay unless it is overridden, on further options of a group, or on CUDA; and what is
first allocated after the first update. In the second way a threshold between stand-in and real size goes unnoticed.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import replace
from functools import cache
from typing import Any

from effcli.errors import EffcliError, first_line
from effcli.optim.by_path.stand_ins import LARGEST, Shape, StandIns, multi_affine, stand_ins
from effcli.optim.by_path.step import Builder, Kept, Layout, Probe, Stepped, step
from effcli.units import Placement, StateTensor

_LARGEST_REAL = 2**26
"""Elements: with state, weight and gradient of a few bytes each about 1 GiB and seconds on a CPU."""
_LARGEST_STATE = 2**30
"""Bytes: what an estimate may take beside a desktop without being noticed."""


@cache
def probe_layout(
    build: Builder, hyper: tuple[tuple[str, Any], ...], shape: Shape, dtype: str, hidden: bool
) -> tuple[StateTensor, ...]:
    """Return what one step of the optimizer allocates for one parameter.

    Raises:
        UsageError: the class cannot make a step on it, or its state cannot be sized by probing.
    """
    probe = Probe(build=build, hyper=hyper, shape=shape, dtype=dtype, hidden=hidden)
    small = stand_ins(shape) if math.prod(shape) > LARGEST else None
    tried = small.first if small else shape
    free = step(probe, tried, without_data=True)
    if _is_too_much(free):
        return _tensors(_layouts(probe, step(probe, shape, without_data=True))[0])
    real = _real(probe, tried)
    layout = _without_data(probe, tried, real, free)
    if layout is None and small is not None:
        layout = _by_law(probe, small)
        layout = _at_real_size(probe, real) if layout is None else layout
    return _tensors(real if layout is None else layout)


def _is_too_much(free: Stepped) -> bool:
    """Return whether a step without data that came to its end keeps more than there should be memory for."""
    return free.error is None and sum(kept.num_bytes for kept in free.layouts[0]) > _LARGEST_STATE


def _real(probe: Probe, shape: Shape) -> Layout:
    """Return the layout that a real step gives each of two equal parameters, which must be the same."""
    first, second = _layouts(probe, step(probe, shape, copies=2))
    if first != second:
        raise probe.refusal("its state differs between two parameters of this shape")
    if not any(kept.shared for kept in first):
        return first
    alone = _layouts(probe, step(probe, shape))[0]
    return tuple(_shared_or_split(probe, kept, first, alone) if kept.shared else kept for kept in first)


def _shared_or_split(probe: Probe, kept: Kept, both: Layout, alone: Layout) -> Kept:
    """Return what two states share as a constant of the optimizer, or, where it is a part for each, as the own part.

    The second are views of one tensor with a number for each parameter, as `torch._foreach_norm` is followed by.
    """
    kind = (kept.key, kept.role)
    own = sum(other.num_bytes for other in both if (other.key, other.role) == kind and not other.shared)
    share = sum(other.num_bytes for other in alone if (other.key, other.role) == kind) - own
    if share == kept.num_bytes:
        return kept
    if 2 * share == kept.num_bytes:
        return replace(kept, shared=False, num_bytes=share)
    raise probe.refusal("what its states share grows unevenly with the number of parameters")


def _layouts(probe: Probe, stepped: Stepped) -> tuple[Layout, ...]:
    if isinstance(stepped.error, EffcliError):
        raise stepped.error
    if stepped.error is not None:
        raise probe.refusal(f"its step fails, {first_line(stepped.error)}") from stepped.error
    return stepped.layouts


def _totals(layout: Layout) -> dict[str, tuple[int, int]]:
    """Return elements and bytes of each key."""
    totals: defaultdict[str, tuple[int, int]] = defaultdict(lambda: (0, 0))
    for kept in layout:
        elements, num_bytes = totals[kept.key]
        totals[kept.key] = (elements + kept.num_elements, num_bytes + kept.num_bytes)
    return dict(totals)


def _without_data(probe: Probe, small: Shape, real: Layout, free: Stepped) -> Layout | None:
    """Return the layout of a step on the meta device; None where that does not agree with the real step on `small`."""
    if not free.layouts or _totals(free.layouts[0]) != _totals(real):
        return None
    whole = free if probe.shape == small else step(probe, probe.shape, without_data=True)
    if not whole.layouts or type(whole.error) is not type(free.error):
        return None
    return _shared_as(real, whole.layouts[0])


def _shared_as(real: Layout, layout: Layout) -> Layout | None:
    """Return a layout of one parameter with shared what is shared in `real`; None where a key is so only in part."""
    shared, own = ({(kept.key, kept.role) for kept in real if kept.shared is said} for said in (True, False))
    if shared & own:
        return None
    return tuple(replace(kept, shared=kept.shared or (kept.key, kept.role) in shared) for kept in layout)


def _by_law(probe: Probe, small: StandIns) -> Layout | None:
    """Return the layout by the law through real steps on stand-ins; None where they follow none."""
    layouts = {at: _real(probe, at) for at in (*small.corners(), small.third)}
    kinds = [(kept.key, kept.role, kept.shared) for kept in layouts[small.first]]
    if any([(kept.key, kept.role, kept.shared) for kept in layout] != kinds for layout in layouts.values()):
        return None

    def amount(field: str, index: int) -> int | None:
        def stepped(at: Shape) -> int:
            return int(getattr(layouts[at][index], field))

        if multi_affine(small, stepped, small.third) != stepped(small.third):
            return None
        value = multi_affine(small, stepped, probe.shape)
        return int(value) if value.denominator == 1 and value >= 0 else None

    scaled: list[Kept] = []
    for index, kept in enumerate(layouts[small.first]):
        elements, num_bytes = amount("num_elements", index), amount("num_bytes", index)
        if elements is None or num_bytes is None:
            return None
        scaled.append(replace(kept, num_elements=elements, num_bytes=num_bytes))
    return tuple(scaled)


def _at_real_size(probe: Probe, real: Layout) -> Layout:
    if math.prod(probe.shape) > _LARGEST_REAL:
        raise probe.refusal("its state does not grow evenly with the shape, which is too large to try")
    layout = _shared_as(real, _layouts(probe, step(probe, probe.shape))[0])
    if layout is None:
        raise probe.refusal("its states share part of a key")
    return layout


def _tensors(layout: Layout) -> tuple[StateTensor, ...]:
    return tuple(
        StateTensor(
            key=kept.key,
            num_elements=kept.num_elements,
            num_bytes=kept.num_bytes,
            role=kept.role,
            placement=Placement.HOST if kept.on_host else Placement.DEVICE,
            shared=kept.shared,
        )
        for kept in layout
    )
