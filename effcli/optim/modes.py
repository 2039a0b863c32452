"""Optimizers whose weights while training are not those to use afterwards, as schedule-free ones. No torch at import.

Such an optimizer has two methods, `train()` and `eval()`, that move the weights between the points where gradients are
taken and the average that is evaluated and saved. Any optimizer that has both is served, also behind a wrapper.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def set_to_train(optimizer: torch.optim.Optimizer) -> None:
    """Put the weights where gradients are taken; an optimizer without modes is left alone."""
    inner = _with_modes(optimizer)
    if inner is not None:
        inner.train()


@contextmanager
def evaluation_weights(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Hold the model at the weights to evaluate and to save, then put back bit for bit those it trains with.

    Going there and back by the optimizer's own methods rounds, bf16 weights coarsely, so that evaluating would change
    the training. The copy that avoids it is as large as the gradients, which do not exist between two updates.
    """
    inner = _with_modes(optimizer)
    if inner is None:
        yield
        return
    params = [param for group in inner.param_groups for param in group["params"]]
    kept = [param.detach().clone() for param in params]
    inner.eval()
    try:
        yield
    finally:
        inner.train()
        for param, value in zip(params, kept, strict=True):
            param.detach().copy_(value)


def _with_modes(optimizer: Any) -> Any:
    """Return the optimizer inside any wrappers if it has modes, else None.

    accelerate's wrapper has both methods whatever it wraps (accelerate/optimizer.py, 1.15).
    """
    inner = optimizer
    while getattr(inner, "optimizer", None) is not None:
        inner = inner.optimizer
    return inner if callable(getattr(inner, "train", None)) and callable(getattr(inner, "eval", None)) else None
