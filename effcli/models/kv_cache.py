"""Keys and values of earlier tokens, which only generation reads: training must not keep them in memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig


@contextmanager
def without_kv_cache(model: torch.nn.Module) -> Iterator[None]:
    """Keep decoders from returning keys and values, and let them again afterwards."""
    before = [(config, config.use_cache) for config in _caching(model)]
    leave_out_kv_cache(model)
    try:
        yield
    finally:
        for config, used in before:
            config.use_cache = used


def leave_out_kv_cache(model: torch.nn.Module) -> None:
    """Keep decoders from returning keys and values from now on."""
    for config in _caching(model):
        config.use_cache = False


def _caching(model: torch.nn.Module) -> list[PretrainedConfig]:
    """Return the configurations that decide it; a decoder inside a model of two parts has its own."""
    from transformers import PretrainedConfig

    found = {
        id(config): config for module in model.modules() if (config := getattr(module, "config", None)) is not None
    }
    return [
        config
        for config in found.values()
        if isinstance(config, PretrainedConfig) and getattr(config, "use_cache", None) is not None
    ]
