"""Hyperparameters that differ for some parameters, by name. No torch at import.

One form serves the command line (`--keep-32bit`, `--override`), recipes, the estimate and every engine: an `Override`
in `hyper["overrides"]`. From Python, `override_config` and `register_module_override` make them from parameters and
modules, with the arguments that the methods of bitsandbytes' `GlobalOptimManager` take.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from effcli.errors import UsageError
from effcli.optim.patterns import check_patterns, matches

if TYPE_CHECKING:
    import torch

    from effcli.optim.entry import Hyper


@dataclass(frozen=True, slots=True, kw_only=True)
class Override:
    """Hyperparameters of the parameters whose name fits `pattern`; `flag` is named when it fits none."""

    pattern: str
    values: Mapping[str, Any]
    flag: str = "--override"


def values_for(name: str, hyper: Hyper) -> dict[str, Any]:
    """Return what is overridden for the parameter `name`; of two overrides the later one counts."""
    values: dict[str, Any] = {}
    for override in hyper.get("overrides", ()):
        if matches(name, (override.pattern,)):
            values |= override.values
    return values


def hyper_for(name: str, hyper: Hyper) -> Hyper:
    """Return the hyperparameters of the parameter `name`."""
    return {**hyper, **values_for(name, hyper)}


def check_overrides(hyper: Hyper, names: Iterable[str]) -> None:
    """Raise unless every override fits at least one of the trainable parameters' names.

    Raises:
        UsageError: a pattern fits nothing.
    """
    known = list(names)
    for override in hyper.get("overrides", ()):
        check_patterns((override.pattern,), known, override.flag)


def override_config(
    model: torch.nn.Module,
    parameters: torch.Tensor | Iterable[torch.Tensor],
    key: str | None = None,
    value: Any = None,
    key_value_dict: Mapping[str, Any] | None = None,
) -> tuple[Override, ...]:
    """Return overrides for one parameter or a list of parameters of `model`, for `hyper["overrides"]`.

    A key is a hyperparameter of ours or of bitsandbytes: `lr`, `betas`, `eps`, `weight_decay`, `optim_bits`,
    `min_8bit_size`, `is_sparse`.

    Raises:
        UsageError: a tensor that is no parameter of the model, or neither or both of `key` and `key_value_dict`.
    """
    import torch

    if (key is None) == (key_value_dict is None):
        raise UsageError("override_config: give either key and value, or key_value_dict")
    values = {key: value} if key is not None else dict(key_value_dict or {})
    if betas := values.pop("betas", None):
        values |= {f"beta{index}": beta for index, beta in enumerate(betas, start=1)}
    names = {id(param): name for name, param in model.named_parameters()}
    wanted = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    unknown = sum(id(param) not in names for param in wanted)
    if unknown:
        raise UsageError(f"override_config: {unknown} of {len(wanted)} tensors are no parameters of the model")
    return tuple(Override(pattern=f"={names[id(param)]}", values=values, flag="override_config") for param in wanted)


def register_module_override(
    model: torch.nn.Module, module: torch.nn.Module, param_name: str, config: Mapping[str, Any]
) -> tuple[Override, ...]:
    """Return the override for the parameter `param_name` of one module of `model`; see `override_config`.

    Raises:
        UsageError: the module has no such parameter, or is no part of the model.
    """
    import torch

    param = getattr(module, param_name, None)
    if not isinstance(param, torch.nn.Parameter):
        raise UsageError(f"register_module_override: {type(module).__name__} has no parameter '{param_name}'")
    return override_config(model, param, key_value_dict=config)
