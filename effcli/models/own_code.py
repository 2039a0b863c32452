"""Code that comes with a model because transformers lacks it: refused, or run where that was asked for by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from effcli.errors import UsageError
from effcli.models.tasks import HEADS

if TYPE_CHECKING:
    from transformers import PretrainedConfig

FLAG = "--trust-remote-code"
TRUST = "trust_remote_code"
"""Keyword of transformers, which also names it where it refuses to run code."""

_IMPLEMENTATIONS = ("attn_implementation", "experts_implementation")
"""Keys whose value can be a repository of kernels (transformers/integrations/hub_kernels.py, 5.24)."""


def brings_own_code(config: Mapping[str, Any]) -> bool:
    """Return whether a configuration as written names code for itself that transformers lacks."""
    from transformers import CONFIG_MAPPING

    return bool(config.get("auto_map")) and config.get("model_type") not in CONFIG_MAPPING


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


def untrusted(name: str, part: str) -> UsageError:
    """Return the error for a part of a model that cannot be used without running code that comes with it."""
    return UsageError(
        f"--model '{name}': its {part} needs Python code that comes with the model, and such code can do anything that "
        f"you can; read it, then add {FLAG} if you trust it, or give another model"
    )


def trusted_config(path: str) -> PretrainedConfig:
    """Return the configuration of a model whose code may run; `path` is its folder or hub id.

    The heads that come with it are made known to the auto classes: under the configuration's class alone, never under
    its `model_type`, so that a later run in this process without the flag is refused as before.
    """
    import transformers
    from transformers import AutoConfig
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    config = AutoConfig.from_pretrained(path, trust_remote_code=True)
    for head in HEADS:
        reference = (getattr(config, "auto_map", None) or {}).get(head.auto_class)
        if reference is None or head.offers(config):
            continue
        model_class = get_class_from_dynamic_module(reference, path)
        getattr(transformers, head.auto_class).register(type(config), model_class, exist_ok=True)
        model_class.register_for_auto_class(head.auto_class)  # so that the code is saved with the weights
    return config
