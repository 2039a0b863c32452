"""Parameter groups: which weights are decayed, which parameters have settings of their own. No torch at import."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from effcli.errors import UsageError
from effcli.optim.overrides import check_overrides, values_for

if TYPE_CHECKING:
    import torch

    from effcli.optim.entry import Groups, Hyper

PER_PARAMETER = ("params", "names", "hidden")
"""Keys of a group that hold one item per parameter, in the same order."""


def decay_groups(model: torch.nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Return up to two groups with `params`, `names`, `hidden` and `weight_decay`: decayed weights, then the rest.

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
            counts = is_decayed(name, param.dim()) and not _is_normalising(owners[id(param)])
            (decayed if counts else rest)[name] = param
    if not decayed and not rest:
        raise UsageError("nothing to train: every parameter of the model is frozen; narrow --freeze")
    hidden = hidden_names(model)
    return [
        {
            "params": list(named.values()),
            "names": list(named),
            "hidden": [name in hidden for name in named],
            "weight_decay": decay,
        }
        for named, decay in ((decayed, weight_decay), (rest, 0.0))
        if named
    ]


def is_decayed(name: str, num_dims: int) -> bool:
    """Return whether a parameter is decayed by its name and dimensions; one of a normalisation module is not."""
    last = name.rpartition(".")[2]
    return num_dims >= 2 and last != "bias" and not last.endswith("_bias")


def _is_normalising(module: torch.nn.Module) -> bool:
    return "norm" in type(module).__name__.lower()


def hidden_names(model: torch.nn.Module) -> frozenset[str]:
    """Return the names of the parameters of the model's body: neither of an embedding nor of the output head.

    The head is what `get_output_embeddings` returns and whatever lies outside the base model of a transformers model.
    Optimizers for hidden matrices (Muon, GaLore) leave the others to their fallback.
    """
    import torch

    inner = model.get_base_model() if hasattr(model, "get_base_model") else model  # a LoRA wrapper of peft
    base = getattr(inner, "base_model", inner)
    outside = {id(param) for param in inner.parameters()} - {id(param) for param in base.parameters()}
    output = getattr(inner, "get_output_embeddings", lambda: None)()
    if output is not None:
        outside |= {id(param) for param in output.parameters()}
    for module in model.modules():
        below = getattr(module, "base_layer", module)  # what an adapter of peft is wrapped around
        if isinstance(below, torch.nn.Embedding | torch.nn.EmbeddingBag):
            outside |= {id(param) for param in module.parameters()}
    return frozenset(name for name, param in model.named_parameters() if id(param) not in outside)


def unique_groups(groups: Groups) -> list[dict[str, Any]]:
    """Return copies of the groups in which each parameter occurs once, by identity, where it came first.

    torch would update a parameter listed twice in one group twice, and adds its own defaults to the dicts it is given.
    A group without `names` gets positional ones, unique over all groups; without `hidden`, all are.
    """
    seen: set[int] = set()
    unique: list[dict[str, Any]] = []
    position = 0
    for group in groups:
        params = list(group["params"])
        names = list(group.get("names") or (str(position + index) for index in range(len(params))))
        hidden = list(group.get("hidden") or [True] * len(params))
        position += len(params)
        kept = []
        for row in zip(params, names, hidden, strict=True):
            if id(row[0]) not in seen:
                seen.add(id(row[0]))
                kept.append(row)
        if kept:
            unique.append(dict(group) | _columns(kept))
    return unique


def split_groups(groups: Groups, hyper: Hyper) -> list[dict[str, Any]]:
    """Return unique groups, those parameters apart that have overrides; each such group says them in `overrides`.

    Overridden groups come last, so that the first group's learning rate stays the one that was asked for. An
    overridden `weight_decay` becomes the group's own.

    Raises:
        UsageError: an override fits no parameter.
    """
    unique = unique_groups(groups)
    check_overrides(hyper, [name for group in unique for name in group["names"]])
    plain: list[dict[str, Any]] = []
    apart: list[dict[str, Any]] = []
    for group in unique:
        kinds: dict[tuple[tuple[str, Any], ...], list[tuple[Any, ...]]] = {}
        for row in _rows(group):
            kinds.setdefault(tuple(sorted(values_for(row[1], hyper).items())), []).append(row)
        for kind, rows in kinds.items():
            values = dict(kind)
            split = dict(group) | _columns(rows)
            if not values:
                plain.append(split)
                continue
            decay = values.get("weight_decay", group.get("weight_decay", 0.0))
            apart.append(split | {"weight_decay": decay, "overrides": values})
    return [*plain, *apart]


def upstream_groups(
    groups: Groups, hyper: Hyper, arguments: Callable[[Hyper], Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Return the groups for upstream's constructor, overridden ones with the options that differ.

    `arguments` turns hyperparameters into upstream's keyword arguments, which are group options too.
    """
    base = arguments(hyper)
    made = []
    for group in split_groups(groups, hyper):
        values = group.pop("overrides", {})
        own = arguments({**hyper, **values})
        made.append(group | {key: value for key, value in own.items() if value != base[key]})
    return made


def partition(
    group: Mapping[str, Any], belongs: Callable[[Sequence[int], bool], bool]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return two groups with the options of one: the parameters that belong, by shape and `hidden`, and the rest.

    Either may be without parameters.
    """
    rows: dict[bool, list[tuple[Any, ...]]] = {True: [], False: []}
    for param, name, hidden in _rows(group):
        rows[belongs(param.shape, hidden)].append((param, name, hidden))
    return dict(group) | _columns(rows[True]), dict(group) | _columns(rows[False])


def _rows(group: Mapping[str, Any]) -> Iterable[tuple[Any, ...]]:
    return zip(*(group[key] for key in PER_PARAMETER), strict=True)


def _columns(rows: Sequence[tuple[Any, ...]]) -> dict[str, list[Any]]:
    return {key: [row[index] for row in rows] for index, key in enumerate(PER_PARAMETER)}
