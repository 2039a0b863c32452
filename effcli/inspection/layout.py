"""What each parameter's saved state holds, key by key, and the parameter's shape as its state tells it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from effcli.state_entries import entries_of, tally
from effcli.units import DTYPE_BYTES, Role, StateAmount

Shape = tuple[int, ...]

_NUMBERS = ("step", "RMS", "mu_product", "eta", "mu", "unorm_vec")
"""Keys of single numbers beside statistics that have the parameter's shape."""
_FACTORS = (("exp_avg_sq_row", "exp_avg_sq_col", False), ("row_var", "col_var", True))
"""Keys of row and column factors, and whether the other side stays with length 1: transformers' Adafactor and CAME drop
it, torch's Adafactor keeps it (transformers/optimization.py, 5.24; torch/optim/_adafactor.py, 2.13)."""
_FEW_BITS = ("float8", "float4", "int4", "uint4", "int2", "uint2")


@dataclass(slots=True, kw_only=True)
class SavedState:
    """The state of one parameter.

    `own` has elements and bytes of each key, without the bytes of tables that all parameters share: those are in
    `shared`. `dtypes` are those of statistics, `quantised` says that one of them has fewer than 16 bits, `block_sizes`
    are the elements that share a scale. `shape` is the parameter's, None where the state does not tell it.
    """

    label: str
    shape: Shape | None
    own: dict[str, StateAmount]
    shared: dict[str, int] = field(default_factory=dict)
    dtypes: frozenset[str] = frozenset()
    quantised: bool = False
    block_sizes: frozenset[int] = frozenset()

    @property
    def num_elements(self) -> int:
        """Return the elements of all its statistics."""
        return sum(amount.elements for amount in self.own.values())


def saved_states(states: Mapping[str, Any], *, whole: bool = True) -> dict[str, SavedState]:
    """Return what each state holds, by label; those that hold nothing are left out.

    Without `whole` the tensors are parts of parameters, which tell no shapes.
    """
    counted = tally(states.items())
    found: dict[str, SavedState] = {}
    for (owner, key), entry in counted.entries.items():
        if owner not in found:
            flat = dict(entries_of(states[owner]))
            found[owner] = SavedState(
                label=owner,
                shape=parameter_shape(flat) if whole else None,
                own={},
                block_sizes=frozenset(_block_sizes(flat.values())),
            )
        found[owner].own[key] = StateAmount(elements=entry.num_elements, bytes=0)
    for held in counted.held.values():
        for owner in held.owners:
            state = found[owner]
            if held.role is Role.STATISTIC:
                state.dtypes |= {held.storage.dtype}
                state.quantised |= _is_quantised(held.storage.dtype)
            if held.is_shared:
                state.shared[held.key] = held.storage.num_bytes
            else:
                before = state.own[held.key]
                state.own[held.key] = StateAmount(elements=before.elements, bytes=before.bytes + held.storage.num_bytes)
    return found


def parameter_shape(state: Mapping[str, Any]) -> Shape | None:
    """Return the shape of the parameter that a state with these entries belongs to; None where it does not tell it.

    Statistics of one shape, and no others, have the parameter's; else the statistic that has it is known by its key.
    """
    shapes: dict[str, Shape] = {key: tuple(value.shape) for key, value in state.items() if hasattr(value, "shape")}
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
    moment = tuple(getattr(state.get("exp_avg"), "shape", ()))
    if isinstance(projector, list | tuple):
        sides = [tuple(getattr(part, "shape", ())) for part in projector]
        whole = len(sides) == 2 and all(len(side) == 2 for side in sides)
        return (sides[0][0], sides[1][1]) if whole else None
    vectors = tuple(getattr(projector, "shape", ()))
    if len(vectors) != 2 or len(moment) != 2:
        return None
    left, right = vectors[1] == moment[0], vectors[0] == moment[1]
    if left and right:  # each fits, and only one of them has fewer vectors than sides
        left, right = vectors[1] < vectors[0], vectors[0] < vectors[1]
    if left == right:
        return None
    return (int(vectors[0]), int(moment[1])) if left else (int(moment[0]), int(vectors[1]))


def _block_sizes(values: Iterable[Any]) -> Iterable[int]:
    """Yield the elements per scale of tensor subclasses that hold scales, as torchao's do."""
    for value in values:
        scales = getattr(value, "scale", None) if hasattr(value, "__tensor_flatten__") else None
        if scales is not None and scales.numel() and value.numel() % scales.numel() == 0:
            yield value.numel() // scales.numel()


def _is_quantised(dtype: str) -> bool:
    return DTYPE_BYTES.get(dtype, 2) < 2 or dtype.startswith(_FEW_BITS)
