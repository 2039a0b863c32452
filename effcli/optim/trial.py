"""One tiny real step, to find out before a model is loaded whether an optimizer works here. Torch inside."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from typing import TYPE_CHECKING, Any

from effcli.errors import first_line
from effcli.optim.entry import Hyper, OptimizerEntry

if TYPE_CHECKING:
    import torch

_MATRIX, _VECTOR = (64, 64), (64,)
"""4,096 elements, the size from which 8-bit optimizers use their 8-bit kernels, and a size at which they don't."""


def trial_group(
    params: Sequence[torch.nn.Parameter], *, hidden: bool = True, weight_decay: float = 0.0
) -> dict[str, Any]:
    """Return one parameter group as `decay_groups` makes them, of parameters that no model has."""
    return {
        "params": list(params),
        "names": [f"trial.{index}" for index in range(len(params))],
        "hidden": [hidden] * len(params),
        "weight_decay": weight_decay,
    }


def trial_step(entry: OptimizerEntry, hyper: Hyper, device: str, dtype: str) -> None:
    """Make one step on a small matrix on `device`, and on a vector where that takes another kernel.

    Raises:
        RuntimeError: the step fails, or the weights are not finite afterwards.
        Exception: whatever upstream's constructor raises over its arguments.
    """
    import torch

    shapes = (_MATRIX, _VECTOR) if entry.eight_bit else (_MATRIX,)
    params = [torch.nn.Parameter(torch.ones(shape, device=device, dtype=getattr(torch, dtype))) for shape in shapes]
    for param in params:
        param.grad = torch.rand_like(param) + 0.5
    with redirect_stdout(sys.stderr):  # some classes print, which would spoil a JSON document
        optimizer = entry.build([trial_group(params)], {**hyper, "overrides": ()})
        try:
            optimizer.step()
        except (Exception, SystemExit) as error:  # upstream raises whatever its backend raises
            raise RuntimeError(first_line(error)) from error
    if not all(bool(param.isfinite().all()) for param in params):
        raise RuntimeError("its step on 4,096 elements gave no usable result")
