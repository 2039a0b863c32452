"""What each parameter's saved state holds, key by key, and the parameter's shape as its state tells it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from effcli.state_entries import entries_of, tally
from effcli.units import DTYPE_BYTES, Role, StateAmount

Shape = tuple[int, ...]

_NUMBERS = ("step", "RMS", "mu_product", "eta", "mu", "unorm_vec")
"""Keys of single numbers beside statistics that have the parameter's shape."""
_FACTORS = (("exp_avg_sq_row", "exp_avg_sq_col", False), ("row_var", "col_var", True))
"""Keys of row and column factors, and whether the other side stays with length 1: transformers' Adafactor and CAME drop
it, torch's Adafactor keeps it (transformers/optimization.py, 5.24; torch/optim/_adafactor.py, 2.13)."""
_FEW_BITS = ("float8", "float4", "int4", "uint4", "int2", "uint2")


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedState:
    """The state of one parameter.

    `own` has elements and bytes of each key, without the bytes of tables that all parameters share: those are in
    `shared`. `dtypes` are those of statistics, `block_sizes` the elements that share a scale. `shape` is the
    parameter's, None where the state does not tell it.
    """

    shape: Shape | None
    own: Mapping[str, StateAmount]
    shared: Mapping[str, int]
    dtypes: frozenset[str]
    block_sizes: frozenset[int]

    @property
    def num_elements(self) -> int:
        """Return the elements of all its statistics."""
        return sum(amount.elements for amount in self.own.values())

    @property
    def quantised(self) -> bool:
        """Return whether one of its statistics has fewer than 16 bits."""
        return any(DTYPE_BYTES.get(dtype, 2) < 2 or dtype.startswith(_FEW_BITS) for dtype in self.dtypes)


def saved_states(states: Mapping[str, Any], *, whole: bool = True) -> dict[str, SavedState]:
    """Return what each state holds, by label; those that hold nothing are left out.

    Without `whole` the tensors are parts of parameters, which tell no shapes.
    """
    counted = tally(states.items())
    own: dict[str, dict[str, StateAmount]] = {}
    for (owner, key), entry in counted.entries.items():
        own.setdefault(owner, {})[key] = StateAmount(elements=entry.num_elements, bytes=0)
    shared: dict[str, dict[str, int]] = {owner: {} for owner in own}
    dtypes: dict[str, set[str]] = {owner: set() for owner in own}
    for held in counted.held.values():
        for owner in held.owners:
            if held.role is Role.STATISTIC:
                dtypes[owner].add(held.storage.dtype)
            if held.is_shared:
                shared[owner][held.key] = held.storage.num_bytes
            else:
                before = own[owner][held.key]
                own[owner][held.key] = StateAmount(
                    elements=before.elements, bytes=before.bytes + held.storage.num_bytes
                )
    entries = {owner: dict(entries_of(states[owner])) for owner in own}
    return {
        owner: SavedState(
            shape=parameter_shape(entries[owner]) if whole else None,
            own=amounts,
            shared=shared[owner],
            dtypes=frozenset(dtypes[owner]),
            block_sizes=frozenset(_block_sizes(entries[owner].values())),
        )
        for owner, amounts in own.items()
    }


def parameter_shape(state: Mapping[str, Any]) -> Shape | None:
    """Return the shape of the parameter that a state with these entries belongs to; None where it does not tell it.

    Statistics of one shape, and no others, have the parameter's; else the statistic that has it is known by its key.
    """
    shapes: dict[str, Shape] = {key: _shape(value) for key, value in state.items() if isinstance(value, torch.Tensor)}
    for row, column, keeps_sides in _FACTORS:
        if row in shapes and column in shapes:
            return _of_factors(shapes[row], shapes[column], keeps_sides)
    if "projector" in state:
        return _of_projection(state)
    if "state1" in shapes:  # bitsandbytes; AdEMAMix stacks two of them
        return shapes.get("state2", shapes["state1"])
    sized = {key: shape for key, shape in shapes.items() if shape} or {
        key: shape for key, shape in shapes.items() if key not in _NUMBERS
    }
    counts = Counter(sized.values())
    return next(iter(counts)) if len(counts) == 1 else None


def _of_factors(rows: Shape, columns: Shape, keeps_sides: bool) -> Shape | None:
    if not rows or len(rows) != len(columns):
        return None
    if keeps_sides:
        return (*rows[:-1], columns[-1])
    return (*rows, columns[-1]) if rows[:-1] == columns[:-1] else None


def _of_projection(state: Mapping[str, Any]) -> Shape | None:
    """Return the shape of a matrix that GaLore projects: one side is the projector's, one the projected moment's.

    The projector's vectors are columns of `rows x rank`, or rows of `rank x columns`, or both.
    """
    projector = getattr(state["projector"], "ortho_matrix", state["projector"])
    moment = _shape(state.get("exp_avg"))
    if isinstance(projector, list | tuple):
        sides = [_shape(part) for part in projector]
        whole = len(sides) == 2 and all(len(side) == 2 for side in sides)
        return (sides[0][0], sides[1][1]) if whole else None
    vectors = _shape(projector)
    if len(vectors) != 2 or len(moment) != 2:
        return None
    left, right = vectors[1] == moment[0], vectors[0] == moment[1]
    if left and right and vectors[0] != vectors[1]:  # each fits, and only one of them has fewer vectors than sides
        left, right = vectors[1] < vectors[0], vectors[0] < vectors[1]
    of_left: Shape = (vectors[0], moment[1])
    of_right: Shape = (moment[0], vectors[1])
    if left and right:
        return of_left if of_left == of_right else None
    return of_left if left else of_right if right else None


def _shape(value: Any) -> Shape:
    return tuple(value.shape) if isinstance(value, torch.Tensor) else ()


def _block_sizes(values: Iterable[Any]) -> Iterable[int]:
    """Yield the elements per scale of tensor subclasses that hold scales, as torchao's do."""
    for value in values:
        scales = getattr(value, "scale", None) if isinstance(value, torch.Tensor) else None
        if isinstance(scales, torch.Tensor) and scales.numel() and value.numel() % scales.numel() == 0:
            yield value.numel() // scales.numel()
