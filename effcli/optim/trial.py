"""One tiny real step, to find out before a model is loaded whether an optimizer works here. Torch inside."""

from __future__ import annotations

from effcli.optim.entry import Hyper, OptimizerEntry

_SIDE = 64
"""4,096 elements: the size from which 8-bit optimizers use their 8-bit kernels."""


def trial_step(entry: OptimizerEntry, hyper: Hyper, device: str) -> None:
    """Make one step on a matrix of 64 x 64 elements on `device`.

    Raises:
        RuntimeError: the weights are not finite afterwards.
        Exception: whatever upstream raises over its arguments or its backend.
    """
    import torch

    param = torch.nn.Parameter(torch.ones(_SIDE, _SIDE, device=device))
    param.grad = torch.rand_like(param) + 0.5
    group = {"params": [param], "names": ["trial"], "hidden": [True], "weight_decay": 0.0}
    entry.build([group], {**hyper, "overrides": ()}).step()
    if not bool(param.isfinite().all()):
        raise RuntimeError("its step on 4,096 elements gave no usable result")
