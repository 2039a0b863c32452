"""Hyperparameters that differ for some parameters, by name. No torch at import.

One form serves the command line (`--keep-32bit`, `--override`), recipes, the estimate and every engine: an `Override`
in `hyper["overrides"]`. From Python, `override_config` and `register_module_override` make them from parameters and
modules, with the arguments that the methods of bitsandbytes' `GlobalOptimManager` take, for `resolve_hyper`.

Names stand for parameters until an optimizer is built, which resolves them to the parameters of its groups. So nothing
has to be registered before a model moves to a GPU, nothing has to be cleared afterwards, and the order of runs in one
process makes no difference: an optimizer knows its own overrides and no others.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from effcli.errors import UsageError
from effcli.optim.patterns import check_patterns, matches

if TYPE_CHECKING:
    import torch

    from effcli.optim.entry import Hyper, OptimizerEntry


@dataclass(frozen=True, slots=True, kw_only=True)
class Override:
    """Hyperparameters of the parameters whose name fits `pattern`; `flag` is named where something is wrong with it."""

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
    """Raise unless every override fits a trainable parameter's name, and no two ways of saying it contradict.

    Of two overrides that were said in the same way, the later one may narrow the earlier one.

    Raises:
        UsageError: a pattern fits nothing, or `--keep-32bit` and `--override` say different things of one parameter.
    """
    known = list(names)
    overrides: tuple[Override, ...] = tuple(hyper.get("overrides", ()))
    for override in overrides:
        check_patterns((override.pattern,), known, override.flag, "trainable parameter")
    for index, later in enumerate(overrides):
        for earlier in overrides[:index]:
            if earlier.flag != later.flag and _differ(earlier, later):
                for name in known:
                    if matches(name, (earlier.pattern,)) and matches(name, (later.pattern,)):
                        raise UsageError(
                            f"{earlier.flag} '{earlier.pattern}' and {later.flag} '{later.pattern}' contradict each "
                            f"other over '{name}'; drop one of them or narrow its pattern"
                        )


def _differ(one: Override, other: Override) -> bool:
    return any(key in one.values and one.values[key] != value for key, value in other.values.items())


def override_notes(entry: OptimizerEntry, hyper: Hyper) -> tuple[str, ...]:
    """Return what should be said aloud about the overrides, once each: where one of them has no effect."""
    keys = [key for override in hyper.get("overrides", ()) for key in override.values]
    return tuple(dict.fromkeys(entry.override_notes[key] for key in keys if key in entry.override_notes))


def override_config(
    model: torch.nn.Module,
    parameters: torch.Tensor | Iterable[torch.Tensor],
    key: str | None = None,
    value: Any = None,
    key_value_dict: Mapping[str, Any] | None = None,
) -> tuple[Override, ...]:
    """Return overrides for one parameter or several of `model`, which `resolve_hyper` takes and checks.

    A key is a hyperparameter of ours or of bitsandbytes: `lr`, `betas`, `eps`, `weight_decay`, `optim_bits`,
    `min_8bit_size`, `is_sparse`. A shared parameter goes by the first of its names.

    Raises:
        UsageError: a tensor that is no parameter of the model, or neither or both of `key` and `key_value_dict`.
    """
    if (key is None) == (key_value_dict is None):
        raise UsageError("override_config: give either key and value, or key_value_dict")
    values = {key: value} if key is not None else dict(key_value_dict or {})
    return _overrides_of(model, parameters, values, "override_config")


def register_module_override(
    model: torch.nn.Module, module: torch.nn.Module, param_name: str, config: Mapping[str, Any]
) -> tuple[Override, ...]:
    """Return the override for the parameter `param_name` of one module of `model`; see `override_config`.

    Raises:
        UsageError: the module has no such parameter, or is no part of the model.
    """
    import torch

    flag = "register_module_override"
    param = getattr(module, param_name, None)
    if not isinstance(param, torch.nn.Parameter):
        raise UsageError(f"{flag}: {type(module).__name__} has no parameter '{param_name}'")
    return _overrides_of(model, param, config, flag)


def _overrides_of(
    model: torch.nn.Module, parameters: torch.Tensor | Iterable[torch.Tensor], given: Mapping[str, Any], flag: str
) -> tuple[Override, ...]:
    import torch

    values = dict(given)
    if "betas" in values:
        betas = values.pop("betas")
        if not isinstance(betas, list | tuple):
            raise UsageError(f"{flag}: betas are several numbers, as in (0.9, 0.99); got {betas!r}")
        values |= {f"beta{number}": beta for number, beta in enumerate(betas, start=1)}
    if isinstance(parameters, torch.nn.Module):
        raise UsageError(f"{flag}: a module is no parameter; give module.weight, or list(module.parameters())")
    wanted = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    names = {id(param): name for name, param in model.named_parameters()}
    unknown = sum(id(param) not in names for param in wanted)
    if unknown:
        raise UsageError(f"{flag}: {unknown} of {len(wanted)} tensors are no parameters of the model")
    fitting = dict.fromkeys(names[id(param)] for param in wanted)
    return tuple(Override(pattern=f"={name}", values=values, flag=flag) for name in fitting)
