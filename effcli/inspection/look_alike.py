"""Which optimizer a saved state looks like: the one whose law says what every parameter's state holds.

An optimizer fits where its law, applied to the shape of each parameter, gives the same keys, elements and bytes as are
saved. Three things are tried in turn: the optimizer's defaults, what the parameter groups say, and, for optimizers that
quantise, some parameters being left whole or other blocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from effcli.inspection.groups import Group, contradicted, group_hyper
from effcli.inspection.layout import SavedState, Shape
from effcli.optim import registry
from effcli.optim.entry import Hyper, OptimizerEntry
from effcli.optim.hyper import DEFAULT_MIN_8BIT_SIZE, default_hyper
from effcli.units import DTYPE_BYTES, ParamInfo, StateAmount, StateTensor

DTYPES = ("float32", "bfloat16", "float16", "float64")
"""What weights can be trained in, the likeliest first."""
_KEPT_IN = frozenset({*DTYPES, "uint8", "int8", "float8_e4m3fn"})
"""What the statistics of listed optimizers are kept in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """An optimizer whose law says what is saved.

    `parameters` are the parameters as the law was given them, by label; `hyper` are the hyperparameters,
    `kept_whole` the labels of parameters that these would quantise but that are not, `dtypes` the dtypes of those
    weights whose law reads it, so that the state tells it.
    """

    entry: OptimizerEntry
    hyper: Hyper
    parameters: Mapping[str, ParamInfo]
    kept_whole: tuple[str, ...] = ()
    dtypes: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Variant:
    """One way of asking a law about a parameter."""

    dtype: str
    hidden: bool
    values: Mapping[str, Any] = field(default_factory=dict)


def fitting(
    states: Mapping[str, SavedState],
    shapes: Mapping[str, Shape],
    dtypes: Mapping[str, str],
    groups: Sequence[Group],
    *,
    unlikely: bool = False,
) -> tuple[Fit, ...]:
    """Return the optimizers that fit every state; without `unlikely`, those that the groups contradict are left out.

    `shapes` are the parameters', for every state; `dtypes` those of weights that are known.
    """
    if not states or any(label not in shapes or not state.dtypes <= _KEPT_IN for label, state in states.items()):
        return ()
    entries = [entry for entry in registry.entries() if unlikely or not contradicted(entry, groups)]
    for attempt in (_by_default, _by_groups, _by_blocks):
        fits = [
            fit
            for entry in entries
            for hyper, bits in attempt(entry, states, groups)
            if (fit := _fit(entry, hyper, bits, states, shapes, dtypes)) is not None
        ]
        if fits:
            return tuple({fit.entry.name: fit for fit in reversed(fits)}[name] for name in _names(fits))
    return ()


def _names(fits: Sequence[Fit]) -> Iterable[str]:
    return dict.fromkeys(fit.entry.name for fit in fits)


Attempts = Iterable[tuple[Hyper, tuple[int, ...]]]
"""Hyperparameters, and the bits that a parameter may have where the optimizer lets some have others."""


def _by_default(entry: OptimizerEntry, states: Mapping[str, SavedState], groups: Sequence[Group]) -> Attempts:
    yield default_hyper(entry), ()


def _by_groups(entry: OptimizerEntry, states: Mapping[str, SavedState], groups: Sequence[Group]) -> Attempts:
    hyper = group_hyper(entry, groups)
    if hyper != default_hyper(entry):
        yield hyper, ()


def _by_blocks(entry: OptimizerEntry, states: Mapping[str, SavedState], groups: Sequence[Group]) -> Attempts:
    """Yield other thresholds, parameters left in 32 bit, and other block sizes, where something is quantised."""
    if not any(state.quantised for state in states.values()):
        return
    hyper = group_hyper(entry, groups)
    if entry.bits == 8:
        yield {**hyper, "min_8bit_size": 1}, (8, 32)
    if "block_size" in entry.defaults:
        for size in sorted(set().union(*(state.block_sizes for state in states.values()))):
            yield {**hyper, "block_size": size}, ()


def _fit(
    entry: OptimizerEntry,
    hyper: Hyper,
    bits: tuple[int, ...],
    states: Mapping[str, SavedState],
    shapes: Mapping[str, Shape],
    dtypes: Mapping[str, str],
) -> Fit | None:
    """Return the fit of one optimizer with these hyperparameters; None where a state differs from the law."""
    chosen: dict[Any, tuple[_Variant, bool] | None] = {}
    parameters: dict[str, ParamInfo] = {}
    whole = []
    told = {}
    for label, state in states.items():
        kind = (shapes[label], dtypes.get(label), _content(state))
        if kind not in chosen:
            chosen[kind] = _variant(entry, hyper, bits, state, shapes[label], dtypes.get(label))
        found = chosen[kind]
        if found is None:
            return None
        variant, tells_dtype = found
        if tells_dtype:
            told[label] = variant.dtype
        parameters[label] = ParamInfo(name=label, shape=shapes[label], dtype=variant.dtype, hidden=variant.hidden)
        if variant.values.get("optim_bits") == 32:
            whole.append(label)
    if bits:
        hyper, whole = _with_threshold(hyper, states, parameters, whole)
    return Fit(entry=entry, hyper=hyper, parameters=parameters, kept_whole=tuple(whole), dtypes=told)


def _variant(
    entry: OptimizerEntry, hyper: Hyper, bits: tuple[int, ...], state: SavedState, shape: Shape, dtype: str | None
) -> tuple[_Variant, bool] | None:
    """Return the first way of asking that gives what is saved, and whether only weights of its width do."""
    likely = [dtype] if dtype is not None else []
    kept = sorted(state.dtypes & set(DTYPES), key=DTYPES.index)
    dtypes = list(dict.fromkeys((*likely, *kept, *(dtype for dtype in DTYPES if dtype != "float64"))))
    values: list[dict[str, Any]] = [{"optim_bits": choice} for choice in bits] or [{}]
    fitting = [
        variant
        for variant in (_Variant(*parts) for parts in product(dtypes, (True, False), values))
        if _says(entry, {**hyper, **variant.values}, shape, variant) == _content(state)
    ]
    if not fitting:
        return None
    return fitting[0], len({DTYPE_BYTES[variant.dtype] for variant in fitting}) == 1


def _says(entry: OptimizerEntry, hyper: Hyper, shape: Shape, variant: _Variant) -> Any:
    param = ParamInfo(name="", shape=shape, dtype=variant.dtype, hidden=variant.hidden)
    layout = entry.state_layout(param, hyper)
    own = {tensor.key: StateAmount(elements=0, bytes=0) for tensor in layout}
    for tensor in layout:
        own[tensor.key] = _added(own[tensor.key], tensor)
    return _as_content(own, {tensor.key: tensor.num_bytes for tensor in layout if tensor.shared})


def _added(amount: StateAmount, tensor: StateTensor) -> StateAmount:
    num_bytes = 0 if tensor.shared else tensor.num_bytes
    return StateAmount(elements=amount.elements + tensor.num_elements, bytes=amount.bytes + num_bytes)


def _content(state: SavedState) -> Any:
    return _as_content(state.own, state.shared)


def _as_content(own: Mapping[str, StateAmount], shared: Mapping[str, int]) -> Any:
    return frozenset((key, amount.elements, amount.bytes) for key, amount in own.items()), frozenset(shared.items())


def _with_threshold(
    hyper: Hyper, states: Mapping[str, SavedState], parameters: Mapping[str, ParamInfo], whole: Sequence[str]
) -> tuple[Hyper, list[str]]:
    """Return the hyperparameters with a `min_8bit_size`, and the labels of parameters that it does not explain.

    It is the default where all quantised parameters reach that, else the size of the smallest, the largest it can be.
    """
    least = min(parameters[label].num_elements for label, state in states.items() if state.quantised)
    threshold = min(DEFAULT_MIN_8BIT_SIZE, least)
    left = [label for label in whole if parameters[label].num_elements >= threshold]
    return {**hyper, "min_8bit_size": threshold}, left
