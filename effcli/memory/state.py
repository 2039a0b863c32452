"""Predicted optimizer state of a whole model, from shapes alone. No torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable
from dataclasses import dataclass

from effcli.errors import UsageError
from effcli.memory.caching_allocator import BLOCK_BYTES
from effcli.optim.entry import Hyper, OptimizerEntry
from effcli.optim.overrides import check_overrides, values_for
from effcli.units import (
    Basis,
    ParamInfo,
    Placement,
    Role,
    StateAmount,
    StateTensor,
    format_bytes,
    format_count,
    rounded_up,
)

PAGED_MEMORY = "paged (managed) memory, outside torch's allocator"
"""Memory whose pages the driver moves between host and device as they are used; it counts those on the device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSummary:
    """State of one optimizer after its first update; `basis` says where the layouts come from.

    `by_parameter` and `shared_bytes` (tables that all parameters point to) add up to `state_bytes`, as do `tensors`
    and `placements`, those of training on CUDA; a parameter without state is not in `by_parameter`.
    `allocator_state_bytes` is what torch's CUDA allocator counts for the state on the device: each tensor in blocks of
    512 bytes, host and paged ones left out; None where only a probe says what there is. Above 1 MiB the allocator may
    hand out a block that is up to 1 MiB larger, which depends on what was free. `num_quantised` of `num_parameters`
    trainable parameters, with `quantised_elements` of `parameter_elements`, hold their state in fewer bits.
    """

    basis: Basis
    state_bytes: int
    state_elements: int
    tensors: dict[str, StateAmount]
    by_parameter: dict[str, int]
    shared_bytes: int
    placements: dict[Placement, int]
    allocator_state_bytes: int | None
    num_parameters: int
    num_quantised: int
    parameter_elements: int
    quantised_elements: int


def predict_state(entry: OptimizerEntry, params: Iterable[ParamInfo], hyper: Hyper) -> StateSummary:
    """Return the state that `entry` allocates for the trainable ones of `params`.

    `params` lists a shared parameter once, as `named_parameters` does. Leaves out that a parameter which never gets a
    gradient gets no state either.

    Raises:
        UsageError: two parameters have one name, or an override fits none.
    """
    trainable = [param for param in params if param.trainable]
    repeated = [name for name, count in Counter(param.name for param in trainable).items() if count > 1]
    if repeated:
        raise UsageError(f"parameter '{repeated[0]}' is listed more than once")
    check_overrides(hyper, [param.name for param in trainable])

    elements: Counter[str] = Counter()
    key_bytes: Counter[str] = Counter()
    placements: Counter[Placement] = Counter()
    allocated_bytes = 0
    by_parameter: dict[str, int] = {}
    shared: dict[str, int] = {}
    quantised: list[int] = []
    layouts: dict[Hashable, tuple[StateTensor, ...]] = {}  # a large model repeats its layers a hundred times
    for param in trainable:
        own = values_for(param.name, hyper)
        kind = (param.shape, param.dtype, param.hidden, tuple(own.items()))
        if kind not in layouts:
            layouts[kind] = entry.state_layout(param, {**hyper, **own})
        layout = layouts[kind]
        if any(tensor.role is Role.QUANTISATION for tensor in layout):
            quantised.append(param.num_elements)
        if layout:
            by_parameter[param.name] = sum(tensor.num_bytes for tensor in layout if not tensor.shared)
        for tensor in layout:
            if tensor.shared and tensor.key in shared:
                continue
            if tensor.shared:
                shared[tensor.key] = tensor.num_bytes
            elements[tensor.key] += tensor.num_elements
            key_bytes[tensor.key] += tensor.num_bytes
            placements[tensor.placement] += tensor.num_bytes
            if tensor.placement is Placement.DEVICE:
                allocated_bytes += rounded_up(tensor.num_bytes, BLOCK_BYTES)
    return StateSummary(
        basis=entry.basis,
        state_bytes=key_bytes.total(),
        state_elements=elements.total(),
        tensors={key: StateAmount(elements=elements[key], bytes=key_bytes[key]) for key in elements},
        by_parameter=by_parameter,
        shared_bytes=sum(shared.values()),
        placements={placement: num_bytes for placement, num_bytes in placements.items() if num_bytes},
        allocator_state_bytes=None if entry.basis is Basis.PROBED else allocated_bytes,
        num_parameters=len(trainable),
        num_quantised=len(quantised),
        parameter_elements=sum(param.num_elements for param in trainable),
        quantised_elements=sum(quantised),
    )


def paged_notes(entry: OptimizerEntry, state: StateSummary, *, device: str) -> tuple[str, ...]:
    """Return how much of a paged optimizer's state is paged, and where that lies; nothing for others, and on a CPU."""
    if entry.paged_from is None or device != "cuda":
        return ()
    if paged_bytes := state.placements.get(Placement.PAGED, 0):
        return (f"{entry.name}: {format_bytes(paged_bytes)} of its state lie in {PAGED_MEMORY}.",)
    return (
        f"{entry.name}: none of its state lies in {PAGED_MEMORY}: no trained parameter has "
        f"{format_count(entry.paged_from)} elements.",
    )
