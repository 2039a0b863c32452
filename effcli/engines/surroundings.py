"""What lies around a run, in the environment or the process, and must not decide how it computes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from effcli.ranks.group import world_size
from effcli.ranks.launch import RANK_VARIABLES

_PREFIXES = ("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_")
_NAMES = ("FORK_LAUNCHED",)


@contextmanager
def isolated_from_caller(device: torch.device) -> Iterator[None]:
    """Let the specification alone decide the precision, and put everything back afterwards.

    Autocast of a caller is off. Products of float32 matrices are computed in float32, whatever
    `TORCH_ALLOW_TF32_CUBLAS_OVERRIDE` or `torch.set_float32_matmul_precision` say: TensorFloat32 keeps 10 bits of 23.
    """
    matmul_precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        with _without_autocast(device.type), without_launcher_settings():
            yield
    finally:
        torch.set_float32_matmul_precision(matmul_precision)


@contextmanager
def _without_autocast(kind: str) -> Iterator[None]:
    """Leave the autocast of a caller.

    `torch.autocast(enabled=False)` around a run would not do: casts of weights are kept until the outermost autocast
    ends, so that every update after the first would compute with the weights before it (torch 2.13).
    """
    enabled = torch.is_autocast_enabled(kind)
    depth = torch.autocast_increment_nesting() - 1
    for _ in range(depth + 1):
        torch.autocast_decrement_nesting()
    torch.clear_autocast_cache()
    torch.set_autocast_enabled(kind, False)
    try:
        yield
    finally:
        torch.set_autocast_enabled(kind, enabled)
        for _ in range(depth):
            torch.autocast_increment_nesting()


@contextmanager
def without_launcher_settings(*, and_ranks: bool = False) -> Iterator[None]:
    """Hide what `accelerate launch` and `torchrun` say by environment variables.

    Where no precision is asked for, `TrainingArguments` takes `ACCELERATE_MIXED_PRECISION` (transformers 5.24); others
    choose the device or a sharded model, and a local rank alone makes accelerate set up a process group (1.15). Of
    several processes each keeps its rank, which accelerate reads, unless `and_ranks` hides it as well.
    """
    before = {name: os.environ.pop(name) for name in _launcher_settings(and_ranks)}
    try:
        yield
    finally:
        for name in _launcher_settings(and_ranks):
            del os.environ[name]
        os.environ.update(before)


def _launcher_settings(and_ranks: bool) -> list[str]:
    hidden = (*_NAMES, *RANK_VARIABLES) if and_ranks or world_size() == 1 else _NAMES
    return [name for name in os.environ if name in hidden or name.startswith(_PREFIXES)]
