"""How torch's CUDA allocator was set up by variables of the environment. No torch."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping

NO_CACHING = "PYTORCH_NO_CUDA_MEMORY_CACHING"
"""Set to anything, torch asks CUDA for each tensor by itself, and counts none of them (torch 2.13)."""

_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
_USUAL = frozenset({"backend:native", "expandable_segments:false"})
_OF_THE_HOST = "pinned_"
"""How settings begin that are about memory of the host."""


def allocator_settings(environment: Mapping[str, str] | None = None) -> str | None:
    """Return the variables that change what torch reserves of a device, as `NAME=value`; None where none does."""
    variables = os.environ if environment is None else environment
    found = [f"{name}={variables[name]}" for name in _VARIABLES if any(_unusual(variables.get(name, "")))]
    if NO_CACHING in variables:
        found.append(f"{NO_CACHING}={variables[NO_CACHING]}")
    return " ".join(found) or None


def refuse_no_caching() -> None:
    """Refuse to count where torch's counters stay at 0 whatever tensors take.

    Raises:
        RuntimeError: torch caches nothing; of what torch raises for an allocator that is plugged in.
    """
    if NO_CACHING in os.environ:
        raise RuntimeError(f"{NO_CACHING} is set: torch counts no tensors on CUDA")


def _unusual(value: str) -> Iterator[str]:
    """Yield the settings of a variable that are not those which a plan assumes."""
    for setting in value.split(","):
        plain = "".join(setting.split()).lower()
        if plain and plain not in _USUAL and not plain.startswith(_OF_THE_HOST):
            yield plain
