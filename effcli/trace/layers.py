"""Finds lists of equal layers in a model, and shortens them to what has to be traced."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import torch

from effcli.memory.extend import UNITS, Repetition

_PLACES = frozenset({"layer_idx", "layer_id", "layer_index", "layer_number", "idx", "index"})
"""Attributes that only say where in the list a layer is."""


def layer_lists(model: torch.nn.Module) -> dict[str, torch.nn.ModuleList]:
    """Return the lists of layers by name, the outer ones where lists are nested."""
    found: dict[str, torch.nn.ModuleList] = {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.ModuleList) and not any(name.startswith(f"{outer}.") for outer in found):
            found[name] = module
    return found


def repetitions(model: torch.nn.Module) -> tuple[Repetition, ...]:
    """Return the lists of layers that are long enough to be shortened."""
    types = getattr(getattr(model, "config", None), "layer_types", None)
    found = []
    for name, layers in layer_lists(model).items():
        kinds = types if types is not None and len(types) == len(layers) else [None] * len(layers)
        looks = [(_look(layer), kind) for layer, kind in zip(layers, kinds, strict=True)]
        period = _period(looks)
        repetition = period and Repetition(name=name, length=len(looks), period=period)
        if repetition and repetition.copies:
            found.append(repetition)
    return tuple(found)


def shorten(model: torch.nn.Module, repetition: Repetition) -> None:
    """Keep of a list only the layers that are traced, numbered anew."""
    layers = model.get_submodule(repetition.name)
    kept = [layers[place] for place in repetition.kept]
    del layers[:]
    layers.extend(kept)


def _period(looks: Sequence[Hashable]) -> int | None:
    """Return the length of the shortest pattern that the list repeats from its second unit to its end; None without.

    The first unit may differ (T5's first layer holds the table of relative positions), and where the pattern doesn't
    divide the list, what is left over goes on in the pattern.
    """
    for period in range(1, len(looks) // (UNITS + 1) + 1):
        if all(looks[place] == looks[place + period] for place in range(period, len(looks) - period)):
            return period
    return None


def _look(layer: torch.nn.Module) -> Hashable:
    """Return what a layer is made of: classes, shapes, and settings that are plain values."""
    return tuple((name, type(module).__qualname__, *_settings(module)) for name, module in layer.named_modules())


def _settings(module: torch.nn.Module) -> Iterator[Hashable]:
    for name, value in sorted(vars(module).items(), key=lambda item: item[0]):
        if name not in _PLACES and isinstance(value, bool | int | float | str | None):
            yield name, value
    for tensors in (module._parameters, module._buffers):
        for name, tensor in tensors.items():
            if tensor is not None:
                yield name, tuple(tensor.shape), str(tensor.dtype), tensor.requires_grad


def buffer_bytes(model: torch.nn.Module) -> dict[str, int]:
    """Return the bytes of a model's buffers by name; a shared one once."""
    found: dict[int, tuple[str, Any]] = {}
    for name, buffer in model.named_buffers():
        found.setdefault(id(buffer), (name, buffer))
    return {name: buffer.numel() * buffer.element_size() for name, buffer in found.values()}
