"""Vocabulary of memory shared by plan, record and report: bytes, dtypes, parameters, state tensors. No torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB

DTYPE_BYTES = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}
"""Bytes of one element, by the dtype's name as torch prints it after `torch.`."""


class Category(StrEnum):
    """What a byte is held for."""

    WEIGHTS = "weights"
    GRADIENTS = "gradients"
    OPTIMIZER_STATE = "optimizer_state"
    ACTIVATIONS = "activations"
    TEMPORARIES = "temporaries"
    COMMUNICATION = "communication"


class Phase(StrEnum):
    """Part of one update during which memory is counted."""

    FORWARD = "forward"
    BACKWARD = "backward"
    STEP = "step"


class Basis(StrEnum):
    """Where a number comes from."""

    EXACT = "exact"
    TRACED = "traced"
    PROBED = "probed"
    LEARNT = "learnt"
    ASSUMED = "assumed"


class Role(StrEnum):
    """What a tensor of optimizer state is for. Only statistics and steps count as elements."""

    STATISTIC = "statistic"
    STEP = "step"
    QUANTISATION = "quantisation"


class Placement(StrEnum):
    """Where a tensor of optimizer state lives."""

    DEVICE = "device"
    HOST = "host"
    PAGED = "paged"


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamInfo:
    """One parameter as the state laws see it; `dtype` is a key of `DTYPE_BYTES`.

    `hidden` says that it belongs to the body of the model, neither to an embedding nor to the output head.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"
    trainable: bool = True
    hidden: bool = True

    @property
    def num_elements(self) -> int:
        """Return the number of elements; 1 for a scalar."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Return the bytes of the parameter itself, which are also the bytes of its gradient."""
        return self.num_elements * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class StateTensor:
    """One tensor of the optimizer's state for one parameter, in a storage of its own; several may have one key.

    `key` is the upstream name (`exp_avg`, `state1`, ...). `num_elements` follows the counting rule of
    `effcli.state_entries`: quantisation constants count 0, a Python number under `step` counts 1.
    `num_bytes` is true storage. `shared` marks a table that all parameters of the optimizer point to: it counts
    once per optimizer.
    """

    key: str
    num_elements: int
    num_bytes: int
    role: Role = Role.STATISTIC
    placement: Placement = Placement.DEVICE
    shared: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StateAmount:
    """Elements and true bytes of one state key, summed over all parameters; predicted and measured alike."""

    elements: int
    bytes: int


def rounded_up(value: int, multiple: int) -> int:
    """Return the smallest multiple that is not below `value`."""
    return -(-value // multiple) * multiple


def format_bytes(num_bytes: int) -> str:
    """Return `num_bytes` with a binary unit and two decimals from KiB upwards, such as `501.89 MiB`."""
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if abs(num_bytes) >= unit:
            return f"{num_bytes / unit:,.2f} {name}"
    return f"{num_bytes:,} B"


def format_count(count: int) -> str:
    """Return an integer with thousands separators."""
    return f"{count:,}"


def count(number: int, noun: str) -> str:
    """Return a number with its noun, such as `1 tensor` or `1,204 tensors`."""
    return f"{format_count(number)} {noun}{'' if number == 1 else 's'}"


def cut(text: str, length: int = 60) -> str:
    """Return a text that a message shows, at most so many characters of it."""
    return text if len(text) <= length else f"{text[: length - 3]}..."


def listed(names: Sequence[str], shown: int | None = 3, *, last: str = "") -> str:
    """Return the first few names in words, and how many more there are; None shows all of them.

    `last` is the word before the last name where all are shown: `and`, `or`.
    """
    if shown is not None and len(names) > shown:
        return f"{', '.join(names[:shown])} and {len(names) - shown} more"
    if last and len(names) > 1:
        return f"{', '.join(names[:-1])} {last} {names[-1]}"
    return ", ".join(names)
