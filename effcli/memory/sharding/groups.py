"""Which parameters `fully_shard` gathers and reduces together: those of one layer, and the rest. No torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from effcli.units import ParamInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class GatherGroups:
    """The parameters of each layer in the order of the model, and the rest, which belongs to the model itself.

    `early` are those of the rest whose gradients are there before the backward pass reaches the layers: the head.
    """

    layers: tuple[tuple[ParamInfo, ...], ...]
    rest: tuple[ParamInfo, ...]
    early: tuple[ParamInfo, ...]


def gather_groups(parameters: Iterable[ParamInfo]) -> GatherGroups:
    """Return the groups of a model whose layers are the numbered elements of its lists, as in transformers.

    Names stand for modules: a layer is what has a name up to the first number (`bert.encoder.layer.3`), which holds for
    the `GradientCheckpointingLayer`s of transformers' language models (5.24). It does not hold where one layer is
    used again and again (ALBERT) nor where layers hold layers (Swin): there the split is another, never the sum.
    """
    parameters = tuple(parameters)
    layers: dict[str, list[ParamInfo]] = {}
    rest: list[ParamInfo] = []
    after_layers = 0
    for info in parameters:
        layer = _layer_of(info.name)
        if layer is None:
            rest.append(info)
        else:
            layers.setdefault(layer, []).append(info)
            after_layers = len(rest)
    late, early = rest[:after_layers], rest[after_layers:]
    if _is_tied(late, early):
        early = rest
    return GatherGroups(layers=tuple(tuple(layer) for layer in layers.values()), rest=tuple(rest), early=tuple(early))


def _layer_of(name: str) -> str | None:
    """Return the layer of a parameter; None where no part of the name is a number."""
    parts = name.split(".")
    for index, part in enumerate(parts[:-1]):
        if part.isdecimal():
            return ".".join(parts[: index + 1])
    return None


def _is_tied(before: Iterable[ParamInfo], after: Iterable[ParamInfo]) -> bool:
    """Return whether the head is the embedding, which gets a gradient from both ends: no matrix follows the layers.

    A bias as long as an embedding, without a matrix of so many rows, belongs to a tied head as well.
    """
    heads = {info.shape[0] for info in after if len(info.shape) > 1}
    biases = {info.shape[0] for info in after if len(info.shape) == 1}
    tables = [info.shape for info in before if len(info.shape) == 2]
    lengths = {shape[0] for shape in tables} - {shape[1] for shape in tables}
    return not heads or bool(lengths & biases - heads)
