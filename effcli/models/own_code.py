"""Code that comes with a model: refused or left alone, or run where that was asked for by name.

One rule for all commands, that of transformers (`resolve_trust_remote_code` in dynamic_module_utils.py, 5.24): trusted
code runs wherever `auto_map` in `config.json` names it, also for a model type that transformers has. Without trust such
a type is built from transformers' own code, and any other is refused.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from effcli.errors import UsageError, nearest
from effcli.files import at_home
from effcli.hub import hub_errors
from effcli.models.unusable import untrusted, unusable

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_IMPLEMENTATIONS = ("attn_implementation", "experts_implementation")
"""Keys whose value can be a repository of kernels (transformers/integrations/hub_kernels.py, 5.24)."""


def brings_own_code(config: Mapping[str, Any]) -> bool:
    """Return whether a configuration as written names code that comes with the model."""
    return bool(config.get("auto_map"))


def runs_own_code(config: PretrainedConfig) -> bool:
    """Return whether code that comes with the model is to run: `config_of` leaves it named where it was trusted."""
    return bool(getattr(config, "auto_map", None))


def own_class(config: PretrainedConfig, auto_class: str) -> Any:
    """Return the model's own class for one of transformers' auto classes; None where it names none, or none is trusted.

    Raises:
        UsageError: it names one that cannot be imported.
    """
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    reference = names_own_class(config, auto_class)
    if reference is None:
        return None
    name = config.name_or_path
    with unusable(name, "config.json"), hub_errors("model", name, flag="--model"):
        return get_class_from_dynamic_module(reference, name)


def names_own_class(config: PretrainedConfig, auto_class: str) -> str | None:
    """Return where trusted code has a class of its own for an auto class, such as `modeling.OwnClassifier`."""
    auto_map = getattr(config, "auto_map", None)
    return auto_map.get(auto_class) if isinstance(auto_map, Mapping) else None


def config_of(name: str, values: Mapping[str, Any], *, trust: bool) -> PretrainedConfig:
    """Return transformers' configuration made of the values of a `config.json`, or with `trust` the model's own.

    `name` is the folder, hub id or catalogue name. Only what is trusted keeps its `auto_map`, from which transformers'
    auto classes take the code to run.

    Raises:
        UsageError: the model type is not known and its code not trusted, or a value does not fit it.
    """
    from transformers import CONFIG_MAPPING, AutoConfig

    kind = values.get("model_type")
    if brings_own_code(values):
        if trust:
            folder = at_home(name)
            with unusable(name, "config.json"), hub_errors("model", name, flag="--model"):
                return AutoConfig.from_pretrained(str(folder) if folder.is_dir() else name, trust_remote_code=True)
        if kind not in CONFIG_MAPPING:
            raise untrusted(name, "config.json")
    if kind not in CONFIG_MAPPING:
        raise UsageError(
            f"'{name}': transformers knows no model type '{kind}'.{nearest(str(kind), CONFIG_MAPPING.keys())}"
            if kind
            else f"'{name}': its config.json names no model_type, such as bert or llama"
        )
    if kind == "mistral" and "layer_types" in values:
        kind = "ministral"  # as AutoConfig.from_pretrained reads it (models/auto/configuration_auto.py, 5.24)
    own = {key: value for key, value in values.items() if key != "auto_map"}
    with unusable(name, "config.json"):
        return CONFIG_MAPPING[kind].from_dict(copy.deepcopy(own))  # nested dicts are written into


def refuse_kernels(name: str, values: Any) -> None:
    """Raise where a configuration as written, or a part of it, names a kernel of the hub, which transformers loads.

    Raises:
        UsageError: it does; such kernels are compiled code, fetched without being asked for.
    """
    if not isinstance(values, Mapping):
        return
    for key, value in values.items():
        if key.removeprefix("_") in _IMPLEMENTATIONS and "/" in str(value):
            raise UsageError(
                f"--model '{name}': its config.json says {key} = {value!r}, code that would be fetched from the hub; "
                "take that line out of the file, and choose with --attn sdpa or eager"
            )
        refuse_kernels(name, value)
