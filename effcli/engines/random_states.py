"""The random generators that a run draws from: their state, and draws that are the same in all processes."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from effcli.ranks.group import rank, world_size


def random_state() -> dict[str, Any]:
    """Return the state of every random generator a run draws from, as plain values and tensors."""
    numpy_state: Any = np.random.get_state(legacy=True)
    name, keys, *rest = numpy_state
    return {
        "python": random.getstate(),
        "numpy": (name, torch.from_numpy(keys.astype(np.int64)), *rest),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def set_random_state(state: dict[str, Any]) -> None:
    """Set every random generator to a state that `random_state` returned, on those CUDA devices that there are."""
    random.setstate(state["python"])
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    if state["cuda"] and torch.cuda.is_available():
        for index, of_device in enumerate(state["cuda"][: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(of_device, index)


def restore_random_state(saved: dict[str, Any] | list[dict[str, Any]], *, seed: int, update: str) -> None:
    """Set the random state of this process, out of those of all ranks, or of one where there was one.

    Without one, since there are more processes now, it follows from seed, update and rank.
    """
    states = saved if isinstance(saved, list) else [saved]
    if rank() < len(states):
        set_random_state(states[rank()])
    else:
        _seed_all(f"{seed} {update} {rank()}")


@contextmanager
def steps_draw_alike(optimizer: torch.optim.Optimizer, seed: int, update: Callable[[], int]) -> Iterator[None]:
    """Let the steps of replicas draw the same numbers, which follow from seed and update, and nothing else change.

    Each process draws dropout of its own; an optimizer that did so too, as one that rounds at random, would train
    another model in each. A run of one process is left alone, and so are shards, of which each draws for its own.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if world_size() == 1 or any(isinstance(parameter, DTensor) for parameter in parameters):
        yield
        return
    kept: list[dict[str, Any]] = []

    def before(*ignored: Any) -> None:
        kept.append(random_state())
        _seed_all(f"{seed} {update()} step")

    def after(*ignored: Any) -> None:
        set_random_state(kept.pop())

    hooks = (optimizer.register_step_pre_hook(before), optimizer.register_step_post_hook(after))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _seed_all(text: str) -> None:
    seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:4])
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
