"""Bytes that a run really holds: parameters and gradients at the first step, and the peaks. Torch only when needed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_LINUX_STATUS = Path("/proc/self/status")


class StepProbe:
    """Watches an optimizer's steps from outside, whichever engine makes them.

    Just before the first step, when gradients are complete and no optimizer state exists yet, it counts
    `weights_bytes` and `gradients_bytes` as true storage: tied weights, and views of one buffer, once. Both are None
    until then; a step that the fp16 scaler skips is no step.

    Of several processes that is what lies here: shards with their padding (FSDP2), and under DDP the buckets that
    gradients are views of, in which a parameter without gradient has its place too.

    Where no parameter has a gradient, they are kept elsewhere (DeepSpeed's flat partitions): their bytes stay None, and
    no parameter counts as without one.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        read_lr: Callable[[torch.optim.Optimizer], float],
    ) -> None:
        self.weights_bytes: int | None = None
        self.gradients_bytes: int | None = None
        self._unused: dict[str, torch.nn.Parameter] = {}
        self._model = model
        self._optimizer = optimizer
        self._last_lr: float | None = None
        self._read_lr = read_lr
        self._handles = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
        ]

    @property
    def last_lr(self) -> float:
        """Return what `read_lr` said right after the last step; before the first, what it says now."""
        return self._read_lr(self._optimizer) if self._last_lr is None else self._last_lr

    @property
    def without_gradient(self) -> tuple[str, ...]:
        """Return the names of the trainable parameters that never got a gradient; none before the first step."""
        return tuple(self._unused)

    def detach(self) -> None:
        """Take the hooks off; what was read stays. May be called more than once."""
        while self._handles:
            self._handles.pop().remove()

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self.weights_bytes is None:
            parameters = list(self._model.parameters())
            # DeepSpeed's stage 3 leaves the parameter empty and hangs the part that lies here on it.
            self.weights_bytes = storage_bytes(getattr(p, "ds_tensor", p) for p in parameters)
            gradients = [p.grad for p in parameters if p.grad is not None]
            if gradients:
                self.gradients_bytes = storage_bytes(gradients)
                self._unused = {name: p for name, p in self._model.named_parameters() if p.requires_grad}
        self._unused = {name: p for name, p in self._unused.items() if p.grad is None}

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._last_lr = self._read_lr(optimizer)


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of the storages behind tensors, each storage once; subclasses are looked through."""
    from effcli.storage import storages

    # The list keeps every handle: a gradient made by a property must not be freed while others are being counted.
    found = [storage for tensor in tensors for storage in storages(tensor)]
    return sum({storage.identity: storage.num_bytes for storage in found}.values())


def peak_rss_bytes() -> int:
    """Return the largest resident set of this process so far, in bytes: Python and libraries included.

    On Linux this is `VmHWM`. `getrusage` is second choice there: its maximum survives `exec`, so a process that a
    large one started (a test runner, a notebook) would report its parent's size (Linux 6: 411 MiB instead of 9).
    `ru_maxrss` is in KiB on Linux and in bytes on macOS.
    """
    try:
        lines = _LINUX_STATUS.read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024

    import resource  # not on Windows

    maximum = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return maximum if sys.platform == "darwin" else maximum * 1024
