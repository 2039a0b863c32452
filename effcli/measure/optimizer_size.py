"""What an optimizer's state really holds: true bytes of storage, and elements of its statistics. Needs torch.

The counting rules stand in `effcli.state_entries`.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from effcli.state_entries import named_parameters_of, states_of, tally
from effcli.units import MIB, StateAmount, format_bytes, format_count, listed

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSize:
    """Measured state of one optimizer.

    `by_parameter` and `shared_bytes` (code tables and storages that several parameters' states hold) add up to
    `state_bytes`, as do `tensors`. A storage met under several keys counts for the first. `dtypes` are the stored ones,
    `number` for a Python number. `without_state` names the parameters that the optimizer holds but has no state for,
    where it has one for others: as a rule they never received a gradient.
    """

    state_bytes: int
    state_elements: int
    num_tensors: int
    tensors: dict[str, StateAmount]
    dtypes: dict[str, tuple[str, ...]]
    by_parameter: dict[str, int]
    shared_bytes: int
    without_state: tuple[str, ...] = ()

    @property
    def allocated(self) -> bool:
        """Return whether there is any state; False before the first step, and always where none is kept."""
        return bool(self.tensors)

    def describe(self) -> str:
        """Return one line for people: the amounts, and whose state is missing."""
        if not self.allocated:
            return "not allocated yet (the first update does that), or the optimizer keeps none"
        line = (
            f"{format_bytes(self.state_bytes)} in {format_count(self.num_tensors)} tensors, "
            f"{format_count(self.state_elements)} elements"
        )
        return f"{line}; no state for {listed(self.without_state)}" if self.without_state else line


def state_notes(
    size: OptimizerSize, *, without_gradient: tuple[str, ...], predicted_bytes: int, in_buckets: bool = False
) -> tuple[str, ...]:
    """Return sentences on what an estimate of `predicted_bytes` of state counts, but a finished run does not hold.

    `without_gradient` names the trainable parameters that no update had a gradient for; where gradients lie
    `in_buckets` (DDP), there is a place for theirs all the same.
    """
    notes = []
    if without_gradient:
        stateless = size.allocated and set(without_gradient) <= set(size.without_state)
        notes.append(
            f"{len(without_gradient)} trainable {'tensor' if len(without_gradient) == 1 else 'tensors'} never got a "
            f"gradient, so they have none{' and no optimizer state' if stateless else ''}: {listed(without_gradient)}. "
            f"The estimate counts them{', and a bucket of DDP keeps a place for each gradient' if in_buckets else ''}."
        )
    if predicted_bytes and not size.allocated:
        notes.append(f"Optimizer state: {size.describe()}.")
    return tuple(notes)


def compute_optimizer_size(states: Iterable[Any]) -> tuple[float, int]:
    """Return `(total_size_megabytes, total_num_elements)` of `optimizer.state.values()`; a megabyte is 1024*1024 B."""
    values = states.values() if isinstance(states, Mapping) else states
    size = inspect_states((str(index), state) for index, state in enumerate(values))
    return size.state_bytes / MIB, size.state_elements


def inspect_optimizer(
    optimizer: torch.optim.Optimizer, names: Mapping[torch.Tensor, str] | None = None
) -> OptimizerSize:
    """Return what the optimizer's state holds, by state key and by parameter.

    `names` maps parameters to names; without it the groups' own `names` serve, then positions. Wrappers are looked
    through. A state that shares the storage of a parameter adds no bytes: they are the weights'.
    """
    given = {id(param): name for param, name in (names or {}).items()}
    named = [(given.get(id(param), name), param) for name, param in named_parameters_of(optimizer)]
    size = inspect_states(states_of(optimizer, named), weights=[param for _, param in named])
    if not size.allocated:
        return size
    return replace(size, without_state=tuple(name for name, _ in named if name not in size.by_parameter))


def inspect_states(states: Iterable[tuple[str, Any]], *, weights: Iterable[torch.Tensor] = ()) -> OptimizerSize:
    """Return what `(parameter name, state)` pairs hold; storages of the `weights` add no bytes.

    Takes live states as well as those of a loaded `state_dict`. A parameter whose state holds nothing is not in
    `by_parameter`.
    """
    counted = tally(states, weights)
    elements: Counter[str] = Counter()
    dtypes: defaultdict[str, set[str]] = defaultdict(set)
    by_parameter: dict[str, int] = {}
    for (owner, key), entry in counted.entries.items():
        elements[key] += entry.num_new_elements
        dtypes[key] |= entry.dtypes
        by_parameter.setdefault(owner, 0)
    key_bytes = dict.fromkeys(elements, 0)
    shared_bytes = 0
    for held in counted.held.values():
        key_bytes[held.key] += held.storage.num_bytes
        if held.is_shared:
            shared_bytes += held.storage.num_bytes
        else:
            by_parameter[next(iter(held.owners))] += held.storage.num_bytes
    return OptimizerSize(
        state_bytes=sum(key_bytes.values()),
        state_elements=elements.total(),
        num_tensors=len(counted.tensors),
        tensors={key: StateAmount(elements=count, bytes=key_bytes[key]) for key, count in elements.items()},
        dtypes={key: tuple(sorted(found)) for key, found in dtypes.items()},
        by_parameter=by_parameter,
        shared_bytes=shared_bytes,
    )
