"""How optimizer state is counted, key by key: one rule for probing and for measuring. Needs torch.

Bytes are those of the underlying storages, each once per optimizer, seen through tensor subclasses and views. Elements
are those of statistics; a `step` is one element even where it is a plain Python number (0 bytes); quantisation
constants (`qmap*`, `absmax*`, scales, zero points, code books) have bytes but no elements; a tensor subclass has the
elements of its outer shape, one that is divided among processes (DTensor) those of the shard that lies here; None is
nothing. A tensor that several states hold has its elements once.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from effcli.storage import Storage, label, leaves, local, storages
from effcli.units import Role

if TYPE_CHECKING:
    import torch

_CONSTANT = re.compile(r"(qmap|absmax|max|new_max)\d*|quant_?map|scales?|zero_?points?|code|code_?book")
_CODE_TABLE = re.compile(r"qmap\d*")
_WRAPPED_BY_BITSANDBYTES = "__bnb_optimizer_quant_state__"
"""Key under which `Optimizer8bit.state_dict` nests its tensors (bitsandbytes/optim/optimizer.py, 0.50.2)."""


@dataclass(slots=True)
class Entry:
    """One key of one owner's state.

    `num_elements` are all it holds, `num_new_elements` those of tensors that no state counted before holds too.
    `dtypes` are the stored ones, `number` for a Python number.
    """

    num_elements: int = 0
    num_new_elements: int = 0
    dtypes: set[str] = field(default_factory=set)


@dataclass(slots=True)
class Held:
    """One storage, the key and the role that it was first met under, and the owners of the states that hold it."""

    key: str
    role: Role
    storage: Storage
    owners: set[str]

    @property
    def is_shared(self) -> bool:
        """Return whether it serves all parameters; a code table does, even where only one parameter has it so far."""
        return len(self.owners) > 1 or _CODE_TABLE.fullmatch(self.key) is not None


@dataclass(slots=True)
class Tally:
    """Entries by owner and key in the order in which they were met, and storages by identity."""

    entries: dict[tuple[str, str], Entry] = field(default_factory=dict)
    held: dict[Hashable, Held] = field(default_factory=dict)
    tensors: dict[int, torch.Tensor] = field(default_factory=dict)

    def add(self, owner: str, key: str, part: str, leaf: torch.Tensor | int | float) -> None:
        """Count a tensor or number called `part`, found under `key` in the state of `owner`."""
        role = _role(part)
        if isinstance(leaf, int | float):
            if role is Role.STEP:
                entry = self.entries.setdefault((owner, key), Entry())
                entry.num_elements += 1
                entry.num_new_elements += 1
                entry.dtypes.add("number")
            return
        entry = self.entries.setdefault((owner, key), Entry())
        if role is not Role.QUANTISATION:
            num_elements = local(leaf).numel()
            entry.num_elements += num_elements
            entry.num_new_elements += 0 if id(leaf) in self.tensors else num_elements
        self.tensors[id(leaf)] = leaf
        for storage in storages(leaf):
            entry.dtypes.add(storage.dtype)
            held_as = _role(storage.part) if role is Role.STATISTIC and storage.part else role
            self.held.setdefault(storage.identity, Held(key, held_as, storage, set())).owners.add(owner)


def _role(part: str) -> Role:
    return Role.STEP if part == "step" else Role.QUANTISATION if _CONSTANT.fullmatch(part) else Role.STATISTIC


def tally(states: Iterable[tuple[str, Any]], weights: Iterable[torch.Tensor] = ()) -> Tally:
    """Return what `(owner, state)` pairs hold; storages of the `weights` are left out of `held`.

    Takes live states as well as those of a loaded `state_dict`.
    """
    counted = Tally()
    for owner, state in states:
        for key, value in entries_of(state):
            for part, leaf in leaves(value, key):
                counted.add(owner, key, part, leaf)
    for weight in weights:
        for storage in storages(weight):
            counted.held.pop(storage.identity, None)
    return counted


def entries_of(state: Any) -> Iterator[tuple[str, Any]]:
    """Yield the entries of one state, those that bitsandbytes nests among the others; one that is no mapping is one."""
    if not isinstance(state, Mapping):
        yield "state", state
        return
    for key, value in state.items():
        if key == _WRAPPED_BY_BITSANDBYTES:
            yield from entries_of(value)
        else:
            yield label(key, "state"), value


def levels(optimizer: Any) -> list[Any]:
    """Return an optimizer and what it wraps under `.optimizer`, as accelerate's wrapper and Lookahead do, outermost
    first."""
    found: list[Any] = []
    level = optimizer
    while level is not None and all(level is not outer for outer in found):
        found.append(level)
        level = getattr(level, "optimizer", None)
    return found


def named_parameters_of(optimizer: Any) -> list[tuple[str, torch.Tensor]]:
    """Return the parameters that an optimizer, wrapped or not, updates, each once, with the names in its groups.

    A parameter without a name gets its position.
    """
    groups: list[dict[str, Any]] = next(
        (level.param_groups for level in levels(optimizer) if hasattr(level, "param_groups")), []
    )
    found: dict[int, tuple[str, torch.Tensor]] = {}
    for group in groups:
        names = list(group.get("names", ()))
        for index, param in enumerate(group["params"]):
            found.setdefault(id(param), (str(names[index]) if index < len(names) else str(len(found)), param))
    return list(found.values())


def states_of(optimizer: Any, names: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, Any]]:
    """Yield the states of an optimizer with the name of their owner, without making an entry.

    Wrappers are looked through; where both levels have a state of their own (Lookahead keeps slow weights), both count.
    A state that belongs to the whole optimizer is owned by its own key.
    """
    known = {id(param): name for name, param in names}
    seen: list[Any] = []
    for level in levels(optimizer):
        state = getattr(level, "state", None)
        if not isinstance(state, Mapping) or any(state is other for other in seen):
            continue
        seen.append(state)
        for key, own in state.items():
            if id(key) in known:
                yield known[id(key)], own
            else:
                yield label(key, "other"), own if isinstance(own, Mapping) else {key: own}
