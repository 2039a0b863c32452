"""What the program knows about its optimizers, as plain records for tables and JSON. No torch, no upstream import."""

from __future__ import annotations

import ast
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from effcli.optim.entry import OptimizerEntry, Schedule
from effcli.optim.hyper import DEFAULT_MIN_8BIT_SIZE, default_hyper, flag_of
from effcli.packages import is_installed
from effcli.units import Basis, ParamInfo, Placement, Role, StateTensor

REFERENCE_SHAPE = (4096, 4096)
"""Matrix on which optimizers are compared: a projection of a 7-billion-parameter model. Square, so that it makes no
difference which side is factored or projected."""
EXAMPLE_SHAPES = ((768, 768), (768,))
"""Tensors worked out on an optimizer's page: a projection of a base-size model and its bias."""
WEIGHT_DTYPES = ("float32", "bfloat16")

_NOMINAL_BITS = (4, 8, 16, 32, 64)
_MEANING = {
    "n": "elements of the parameter",
    "w": "bytes of one element of the weight, 4 for fp32 and 2 for bf16",
    "dims": "number of its dimensions",
    "rows": "product of all dimensions but the last",
    "columns": "product of all dimensions but the last but one",
    "hidden": "whether it belongs to the model's body, not to an embedding or the output head",
}
"""Names that `OptimizerEntry.formula` may use beside hyperparameters and functions."""
_HYPER_HELP = {
    "lr": "learning rate",
    "beta1": "decay of the first moment",
    "beta2": "decay of the second moment",
    "eps": "term added to the denominator",
    "weight_decay": "decay of weights, never of biases and norms",
    "optim_bits": "8 or 32: bits of the state",
    "min_8bit_size": "parameters with fewer elements keep 32-bit state",
    "keep_32bit": "patterns of parameters whose state stays in 32 bit",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Statistic:
    """`count` equal statistics of the reference matrix.

    `per_side` is None for one of the weight's shape, else how many elements each row or each column has in it: 1 for a
    factor, the rank for a low-rank state, 0 for a single number. `bits` of one element are nominal: scales that lie
    inside a quantised tensor don't raise them. None means that the statistic is a part of a larger tensor.
    """

    count: int
    bits: int | None
    per_side: int | None
    placement: Placement


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerOverview:
    """One line of the table. Mappings go by the weight's dtype; bytes are those of the reference matrix."""

    name: str
    aliases: tuple[str, ...]
    summary: str
    package: str
    pip: str | None
    installed: bool
    devices: tuple[str, ...]
    statistics: dict[str, tuple[Statistic, ...]]
    state_bytes: dict[str, int]
    bytes_per_parameter: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyAmount:
    """One key of a parameter's state: elements and bytes by the weight's dtype."""

    key: str
    elements: dict[str, int]
    bytes: dict[str, int]
    shared: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """State of one parameter, key by key; `own_bytes`, by the weight's dtype, leave out what is shared by all."""

    shape: tuple[int, ...]
    tensors: tuple[KeyAmount, ...]
    own_bytes: dict[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One hyperparameter and the flag that sets it."""

    name: str
    default: Any
    flag: str
    help: str


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerPage(OptimizerOverview):
    """All about one optimizer; `legend` explains the names in `formula`."""

    basis: Basis
    law: str
    formula: str
    legend: dict[str, str]
    shared_bytes: int
    examples: tuple[Example, ...]
    rule_of_thumb_bytes_per_parameter: float | None
    source: str
    schedule: Schedule
    cpu_note: str | None
    settings: tuple[Setting, ...]


def overview(entry: OptimizerEntry, shape: tuple[int, int] = REFERENCE_SHAPE) -> OptimizerOverview:
    """Return the entry's line, with the state that it gives a matrix of `shape` when nothing is configured.

    Raises:
        UsageError: for a class by its path that has an argument without default, or that cannot be probed.
    """
    layouts = {dtype: _layout(entry, shape, dtype) for dtype in WEIGHT_DTYPES}
    state_bytes = {dtype: sum(tensor.num_bytes for tensor in layout) for dtype, layout in layouts.items()}
    package = entry.package or "torch"
    return OptimizerOverview(
        name=entry.name,
        aliases=entry.aliases,
        summary=entry.summary,
        package=package,
        pip=entry.pip,
        installed=is_installed(package),
        devices=entry.devices,
        statistics={dtype: _statistics(layout, shape) for dtype, layout in layouts.items()},
        state_bytes=state_bytes,
        bytes_per_parameter={dtype: num_bytes / math.prod(shape) for dtype, num_bytes in state_bytes.items()},
    )


def page(entry: OptimizerEntry) -> OptimizerPage:
    """Return everything about one entry.

    Raises:
        UsageError: see `overview`.
    """
    line = overview(entry)
    examples = tuple(_example(entry, shape) for shape in EXAMPLE_SHAPES)
    shared = {tensor.key: max(tensor.bytes.values()) for e in examples for tensor in e.tensors if tensor.shared}
    rule, million = entry.rule_of_thumb_bytes, 10**6
    return OptimizerPage(
        **{own.name: getattr(line, own.name) for own in fields(line)},
        basis=entry.basis,
        law=entry.law,
        formula=entry.formula,
        legend=_legend(entry.formula),
        shared_bytes=sum(shared.values()),
        examples=examples,
        rule_of_thumb_bytes_per_parameter=None if rule is None else rule(million, default_hyper(entry)) / million,
        source=entry.source,
        schedule=entry.schedule(default_hyper(entry)),
        cpu_note=entry.cpu_note,
        settings=_settings(entry),
    )


def _layout(entry: OptimizerEntry, shape: tuple[int, ...], dtype: str) -> tuple[StateTensor, ...]:
    return entry.state_layout(ParamInfo(name="weight", shape=shape, dtype=dtype), default_hyper(entry))


def _statistics(layout: tuple[StateTensor, ...], shape: tuple[int, int]) -> tuple[Statistic, ...]:
    """Return the statistics of a layout, equal ones counted together, the large ones first."""
    size, side = math.prod(shape), max(shape)
    counts: dict[tuple[int | None, int | None, Placement], int] = {}
    for tensor in layout:
        if tensor.role is not Role.STATISTIC or not tensor.num_elements:
            continue
        # ademamix8bit keeps two moments in one tensor of twice the weight's size
        whole = tensor.num_elements // size
        per_side = None if whole else tensor.num_elements // side
        kind = (_bits(tensor), per_side, tensor.placement)
        counts[kind] = counts.get(kind, 0) + (whole or (1 if per_side else tensor.num_elements))
    found = (
        Statistic(count=count, bits=bits, per_side=per_side, placement=placement)
        for (bits, per_side, placement), count in counts.items()
    )
    return tuple(sorted(found, key=lambda s: -(side if s.per_side is None else s.per_side)))


def _bits(tensor: StateTensor) -> int | None:
    stored = 8 * tensor.num_bytes / tensor.num_elements
    if stored > max(_NOMINAL_BITS):
        return None
    return min(_NOMINAL_BITS, key=lambda bits: abs(stored - bits))


def _example(entry: OptimizerEntry, shape: tuple[int, ...]) -> Example:
    layouts = {dtype: _layout(entry, shape, dtype) for dtype in WEIGHT_DTYPES}
    shared = {tensor.key: tensor.shared for layout in layouts.values() for tensor in layout}
    amounts = tuple(
        KeyAmount(
            key=key,
            elements={dtype: sum(t.num_elements for t in layout if t.key == key) for dtype, layout in layouts.items()},
            bytes={dtype: sum(t.num_bytes for t in layout if t.key == key) for dtype, layout in layouts.items()},
            shared=shared[key],
        )
        for key in shared
    )
    own = {dtype: sum(t.num_bytes for t in layout if not t.shared) for dtype, layout in layouts.items()}
    return Example(shape=shape, tensors=amounts, own_bytes=own)


def _legend(formula: str) -> dict[str, str]:
    used = {node.id for node in ast.walk(ast.parse(formula)) if isinstance(node, ast.Name)}
    return {name: meaning for name, meaning in _MEANING.items() if name in used}


def _settings(entry: OptimizerEntry) -> tuple[Setting, ...]:
    """Return the hyperparameters with their defaults, then what every run or every 8-bit optimizer has beside them."""
    from effcli.spec import OptimSpec

    values: dict[str, Any] = dict(entry.defaults)
    if entry.takes_weight_decay:
        values["weight_decay"] = OptimSpec().weight_decay
    if entry.eight_bit:
        values |= {"optim_bits": entry.bits, "min_8bit_size": DEFAULT_MIN_8BIT_SIZE, "keep_32bit": None}
    texts: Mapping[str, str] = {**_HYPER_HELP, **entry.hyper_help}
    return tuple(
        Setting(
            name=name,
            default=default,
            flag=flag_of(name),
            help=texts.get(name, ""),
        )
        for name, default in values.items()
    )
