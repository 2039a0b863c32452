"""Where the bytes are: amounts by layer, equal neighbours together, and the largest tensors. No torch."""

from __future__ import annotations

from collections.abc import Sequence
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


def layer_amounts(parameters: Sequence[ParamInfo], states: Sequence[StateSummary]) -> tuple[PartAmount, ...]:
    """Return the amounts by layer in the order of the model; consecutive equal layers become one part.

    Tables that all parameters share belong to no layer; the parts' state bytes lack them.
    """
    parts = [
        _amount(name, list(group), states) for name, group in groupby(parameters, key=lambda info: _layer_of(info.name))
    ]
    merged: list[PartAmount] = []
    for part in parts:
        if merged and (joined := _joined(merged[-1], part)) is not None:
            merged[-1] = joined
        else:
            merged.append(part)
    return tuple(merged)


def largest_tensors(
    parameters: Sequence[ParamInfo], states: Sequence[StateSummary], count: int
) -> tuple[PartAmount, ...]:
    """Return the `count` tensors whose weight, gradient and largest state take most, the heaviest first."""
    parts = [_amount(info.name, [info], states) for info in parameters]
    ranked = sorted(parts, key=lambda part: -(part.weights_bytes + part.gradients_bytes + max(part.state_bytes)))
    return tuple(ranked[:count])


def _amount(name: str, parameters: Sequence[ParamInfo], states: Sequence[StateSummary]) -> PartAmount:
    return PartAmount(
        name=name,
        num_parameters=sum(info.num_elements for info in parameters),
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


def _joined(before: PartAmount, part: PartAmount) -> PartAmount | None:
    """Return two parts as one where `part` is the next layer and equals each layer of `before`; None elsewhere."""
    stem, _, number = part.name.rpartition(".")
    first, _, last = before.name.removeprefix(f"{stem}.").partition("-")
    follows = before.name.startswith(f"{stem}.") and number.isdecimal() and (last or first) == str(int(number) - 1)
    amounts = ("num_parameters", "weights_bytes", "gradients_bytes")
    if not follows or any(getattr(before, key) != before.repeats * getattr(part, key) for key in amounts):
        return None
    if before.state_bytes != tuple(before.repeats * num_bytes for num_bytes in part.state_bytes):
        return None
    return PartAmount(
        name=f"{stem}.{first}-{number}",
        repeats=before.repeats + 1,
        **{key: getattr(before, key) + getattr(part, key) for key in amounts},
        state_bytes=tuple(old + new for old, new in zip(before.state_bytes, part.state_bytes, strict=True)),
    )
