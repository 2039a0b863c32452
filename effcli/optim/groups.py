"""Parameter groups: which weights are decayed. No torch at import."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from effcli.errors import UsageError

if TYPE_CHECKING:
    import torch


def decay_groups(model: torch.nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Return up to two groups with `params`, `names` and `weight_decay`: decayed weights, then all the rest with 0.

    Holds the trainable parameters in the order of `named_parameters`, a shared one once, under its first name. Biases,
    parameters that a normalisation module itself owns, whatever its name, and anything with fewer than two dimensions
    are not decayed. An empty group is left out.

    Raises:
        UsageError: no parameter is trainable.
    """
    owners = {id(param): module for module in model.modules() for param in module.parameters(recurse=False)}
    decayed: dict[str, torch.nn.Parameter] = {}
    rest: dict[str, torch.nn.Parameter] = {}
    for name, param in model.named_parameters():
        if param.requires_grad:
            (decayed if _is_decayed(name, param, owners[id(param)]) else rest)[name] = param
    if not decayed and not rest:
        raise UsageError("nothing to train: every parameter of the model is frozen; narrow --freeze")
    return [
        {"params": list(named.values()), "names": list(named), "weight_decay": decay}
        for named, decay in ((decayed, weight_decay), (rest, 0.0))
        if named
    ]


def _is_decayed(name: str, param: torch.nn.Parameter, owner: torch.nn.Module) -> bool:
    last = name.rpartition(".")[2]
    is_bias = last == "bias" or last.endswith("_bias")
    return param.dim() >= 2 and not is_bias and "norm" not in type(owner).__name__.lower()


def unique_groups(groups: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return copies of the groups in which each parameter occurs once, by identity, where it came first.

    torch would update a parameter listed twice in one group twice, and adds its own defaults to the dicts it is given.
    A group without `names` gets positional ones, unique over all groups.
    """
    seen: set[int] = set()
    unique: list[dict[str, Any]] = []
    position = 0
    for group in groups:
        given = list(group["params"])
        names = list(group.get("names") or (str(position + index) for index in range(len(given))))
        position += len(given)
        kept: list[tuple[str, torch.Tensor]] = []
        for name, param in zip(names, given, strict=True):
            if id(param) not in seen:
                seen.add(id(param))
                kept.append((name, param))
        if kept:
            unique.append(dict(group) | {"params": [p for _, p in kept], "names": [n for n, _ in kept]})
    return unique
