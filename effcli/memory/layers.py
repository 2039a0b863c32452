"""Where the bytes are: amounts by layer, equal neighbours together, and the largest tensors. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby

from effcli.facts import Fact
from effcli.memory.state import StateSummary
from effcli.units import ParamInfo


class PartAmount(Fact):
    """Amounts of one part of a model, all repeats together; `state_bytes` has one number per optimizer, in order.

    A part is a layer, a run of `repeats` equal layers, a module outside the layers, or one tensor.
    """

    name: str
    repeats: int = 1
    num_parameters: int
    weights_bytes: int
    gradients_bytes: int
    state_bytes: tuple[int, ...]


def layer_amounts(
    parameters: Sequence[ParamInfo], states: Sequence[StateSummary], counts: Mapping[str, int] | None = None
) -> tuple[PartAmount, ...]:
    """Return the amounts by layer in the order of the model; consecutive equal layers become one part.

    Tables that all parameters share belong to no layer; the parts' state bytes lack them. `counts` are the elements of
    each parameter where `parameters` are shares.
    """
    runs: list[list[PartAmount]] = []
    for name, group in groupby(parameters, key=lambda info: _layer_of(info.name)):
        part = _amount(name, list(group), states, counts or {})
        if runs and _continues(runs[-1][-1], part):
            runs[-1].append(part)
        else:
            runs.append([part])
    return tuple(_run(run) for run in runs)


def largest_tensors(
    parameters: Sequence[ParamInfo],
    states: Sequence[StateSummary],
    count: int,
    counts: Mapping[str, int] | None = None,
) -> tuple[PartAmount, ...]:
    """Return the `count` tensors whose weight, gradient and largest state take most, the heaviest first.

    `counts` are as for `layer_amounts`.
    """
    parts = [_amount(info.name, [info], states, counts or {}) for info in parameters]
    ranked = sorted(parts, key=lambda part: -(part.weights_bytes + part.gradients_bytes + max(part.state_bytes)))
    return tuple(ranked[:count])


def _amount(
    name: str, parameters: Sequence[ParamInfo], states: Sequence[StateSummary], counts: Mapping[str, int]
) -> PartAmount:
    return PartAmount(
        name=name,
        num_parameters=sum(counts.get(info.name, info.num_elements) for info in parameters),
        weights_bytes=sum(info.num_bytes for info in parameters),
        gradients_bytes=sum(info.num_bytes for info in parameters if info.trainable),
        state_bytes=tuple(sum(state.by_parameter.get(info.name, 0) for info in parameters) for state in states),
    )


def _layer_of(name: str) -> str:
    """Return a parameter's layer (`bert.encoder.layer.3`), or its module where no part of the name is a number."""
    parts = name.split(".")
    for index, part in enumerate(parts):
        if part.isdecimal():
            return ".".join(parts[: index + 1])
    return ".".join(parts[:-1]) or name


def _continues(before: PartAmount, part: PartAmount) -> bool:
    """Return whether `part` is the layer after `before` and takes the same."""
    stem, _, number = before.name.rpartition(".")
    follows = number.isdecimal() and part.name == f"{stem}.{int(number) + 1}"
    return follows and part == before.model_copy(update={"name": part.name})


def _run(parts: Sequence[PartAmount]) -> PartAmount:
    """Return equal layers as one part, called after the first and the last."""
    first, repeats = parts[0], len(parts)
    if repeats == 1:
        return first
    return PartAmount(
        name=f"{first.name}-{parts[-1].name.rpartition('.')[2]}",
        repeats=repeats,
        num_parameters=repeats * first.num_parameters,
        weights_bytes=repeats * first.weights_bytes,
        gradients_bytes=repeats * first.gradients_bytes,
        state_bytes=tuple(repeats * num_bytes for num_bytes in first.state_bytes),
    )
