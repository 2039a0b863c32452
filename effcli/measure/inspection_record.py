"""`InspectionRecord`: what a saved optimizer state holds. Bytes are integers. No torch."""

from __future__ import annotations

from effcli.facts import Fact
from effcli.measure.record import SCHEMA_VERSION


class SavedAmount(Fact):
    """All tensors of one state name; `dtype` are the stored ones, joined by `+` where there are several."""

    elements: int
    bytes: int
    dtype: str


class SavedParameter(Fact):
    """The state of one parameter; `shape` is the parameter's own, None where the state does not tell it.

    `quantised` says whether statistics are held in fewer than 16 bits, `reason` why not, where the optimizer holds
    others so or would.
    """

    name: str
    shape: tuple[int, ...] | None
    elements: int
    bytes: int
    quantised: bool
    reason: str | None = None


class Alternative(Fact):
    """What another optimizer, by its defaults, would take for the same parameters."""

    name: str
    state_bytes: int


class SavedValues(Fact):
    """One tensor of a state as it is stored: its first values, its ends, and how many are not finite.

    `key` is the state name, with the part of what it holds where it holds several (`exp_avg.codes`); codes of a
    quantised state are shown as codes. `minimum` and `maximum` are those of the values that are numbers, infinite ones
    too; None where there is none. A complex number counts by its magnitude. `dtype` is `number` for a plain number.
    """

    parameter: str
    key: str
    shape: tuple[int, ...]
    dtype: str
    first: tuple[float, ...]
    minimum: float | None
    maximum: float | None
    num_nan: int = 0
    num_infinite: int = 0


class InspectionRecord(Fact):
    """A saved optimizer state by state name and by parameter.

    `optimizer` is the one that it looks like, None where nothing known fits; `also_fits` are others of the same layout,
    `resemblance` says in a sentence what the guess rests on. `names_known` says that parameters were saved with their
    names; else a number for a name is a position. `by_parameter` and `shared_bytes` add up to `state_bytes`.
    """

    schema_version: int = SCHEMA_VERSION
    command: str = "inspect"
    path: str
    format: str
    optimizer: str | None
    also_fits: tuple[str, ...] = ()
    resemblance: str
    names_known: bool = False
    state_bytes: int
    state_elements: int
    num_tensors: int
    tensors: dict[str, SavedAmount]
    by_parameter: dict[str, int]
    shared_bytes: int = 0
    parameters: tuple[SavedParameter, ...] = ()
    alternatives: tuple[Alternative, ...] = ()
    values: tuple[SavedValues, ...] = ()
    notes: tuple[str, ...] = ()
