"""What an optimizer's state really holds: true bytes of storage, and elements of its statistics. Needs torch.

Counting rules. Bytes are those of the underlying storages, each once per optimizer, seen through tensor subclasses and
views. Elements are those of statistics; a `step` is one element even where it is a plain Python number (0 bytes);
quantisation constants (`qmap*`, `absmax*`, scales, zero points, code books) have bytes but no elements; a tensor
subclass has the elements of its outer shape; None is nothing.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from effcli.storage import Storage, leaves, storages
from effcli.units import MIB, StateAmount

if TYPE_CHECKING:
    import torch

_CONSTANT = re.compile(r"(qmap|absmax|max|new_max)\d*|quant_?map|scales?|zero_?points?|code|code_?book")
_CODE_TABLE = re.compile(r"qmap\d*")
_WRAPPED_BY_BITSANDBYTES = "__bnb_optimizer_quant_state__"
"""Key under which `Optimizer8bit.state_dict` nests its tensors (bitsandbytes/optim/optimizer.py, 0.50.2)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSize:
    """Measured state of one optimizer.

    `by_parameter` and `shared_bytes` (code tables and storages that several parameters' states hold) add up to
    `state_bytes`, as do `tensors`. A storage met under several keys counts for the first. `dtypes` are the stored ones,
    `number` for a Python number.
    """

    state_bytes: int
    state_elements: int
    num_tensors: int
    tensors: dict[str, StateAmount]
    dtypes: dict[str, tuple[str, ...]]
    by_parameter: dict[str, int]
    shared_bytes: int


def compute_optimizer_size(states: Iterable[Any]) -> tuple[float, int]:
    """Return `(total_size_megabytes, total_num_elements)` of `optimizer.state.values()`; a megabyte is 1024*1024 B."""
    values = states.values() if isinstance(states, Mapping) else states
    size = inspect_states((str(index), state) for index, state in enumerate(values))
    return size.state_bytes / MIB, size.state_elements


def inspect_optimizer(
    optimizer: torch.optim.Optimizer, names: Mapping[torch.Tensor, str] | None = None
) -> OptimizerSize:
    """Return what the optimizer's state holds, by state key and by parameter.

    `names` maps parameters to names; without it the groups' own `names` serve, then positions. A wrapper that keeps the
    real optimizer under `.optimizer`, as accelerate's does, is looked through. A state that shares the storage of a
    parameter adds no bytes: they are the weights'.
    """
    inner: Any = optimizer
    while getattr(inner, "optimizer", None) is not None:
        inner = inner.optimizer
    params = [param for group in inner.param_groups for param in group["params"]]
    known = {id(param): str(index) for index, param in enumerate(params)}
    for group in inner.param_groups:
        known |= {id(param): name for param, name in zip(group["params"], group.get("names", ()), strict=False)}
    known |= {id(param): name for param, name in (names or {}).items()}
    unknown = "other"
    named = ((key if isinstance(key, str) else known.get(id(key), unknown), s) for key, s in inner.state.items())
    return inspect_states(named, weights=params)


def inspect_states(states: Iterable[tuple[str, Any]], *, weights: Iterable[torch.Tensor] = ()) -> OptimizerSize:
    """Return what `(parameter name, state)` pairs hold; storages of the `weights` add no bytes.

    Takes live states as well as those of a loaded `state_dict`.
    """
    weight_storages = [storage for weight in weights for storage in storages(weight)]
    tally = _Tally(excluded={storage.identity for storage in weight_storages})
    for name, state in states:
        tally.names.append(name)
        for key, value in _entries(state):
            for part, leaf in leaves(value, key):
                tally.add(name, key, part, leaf)
    key_bytes = dict.fromkeys(tally.elements, 0)
    by_parameter = dict.fromkeys(tally.names, 0)
    shared_bytes = 0
    for held in tally.held.values():
        key_bytes[held.key] += held.storage.num_bytes
        if len(held.owners) > 1 or _CODE_TABLE.fullmatch(held.key):
            shared_bytes += held.storage.num_bytes
        else:
            by_parameter[held.owners.pop()] += held.storage.num_bytes
    return OptimizerSize(
        state_bytes=sum(key_bytes.values()),
        state_elements=sum(tally.elements.values()),
        num_tensors=len(tally.tensor_ids),
        tensors={key: StateAmount(elements=count, bytes=key_bytes[key]) for key, count in tally.elements.items()},
        dtypes={key: tuple(sorted(found)) for key, found in tally.dtypes.items()},
        by_parameter=by_parameter,
        shared_bytes=shared_bytes,
    )


@dataclass(slots=True)
class _Held:
    """One storage with the key that it was first met under and the parameters whose states hold it."""

    key: str
    storage: Storage
    owners: set[str]


@dataclass(slots=True)
class _Tally:
    """Elements and dtypes by state key, and storages by identity."""

    excluded: set[Hashable]
    names: list[str] = field(default_factory=list)
    elements: Counter[str] = field(default_factory=Counter)
    dtypes: defaultdict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    held: dict[Hashable, _Held] = field(default_factory=dict)
    tensor_ids: set[int] = field(default_factory=set)

    def add(self, name: str, key: str, part: str, leaf: torch.Tensor | int | float) -> None:
        """Count a tensor or number called `part`, found under `key` in the state of parameter `name`."""
        if isinstance(leaf, int | float):
            if part == "step":
                self.elements[key] += 1
                self.dtypes[key].add("number")
            return
        self.tensor_ids.add(id(leaf))
        self.elements[key] += 0 if _CONSTANT.fullmatch(part) else leaf.numel()
        for storage in storages(leaf):
            self.dtypes[key].add(storage.dtype)
            if storage.identity not in self.excluded:
                self.held.setdefault(storage.identity, _Held(key, storage, set())).owners.add(name)


def _entries(state: Any) -> Iterator[tuple[str, Any]]:
    """Yield the top-level entries of one parameter's state; a state that is no mapping is one entry."""
    if not isinstance(state, Mapping):
        yield "state", state
        return
    for key, value in state.items():
        if key == _WRAPPED_BY_BITSANDBYTES:
            yield from _entries(value)
        else:
            yield str(key), value
