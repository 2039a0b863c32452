"""Percentile clipping: the gradient norm is held to a percentile of the norms of the last updates."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.nn.utils import get_total_norm

from effcli.engines.base import Loop
from effcli.engines.distributing import whole
from effcli.engines.session import Update
from effcli.ranks.group import largest

WINDOW = 100
"""Norms that the percentile is taken of, as bitsandbytes' optimizers had it before 0.50."""


class PercentileClipping:
    """Clips an optimizer's steps from outside, whichever engine makes them; inert without `loop.percentile_clipping`.

    Just before a step, the norm over the gradients of all trained parameters joins the last 100. Gradients are scaled
    down to the percentile of these (numpy's linear one, this norm included), or to `loop.max_norm` where that is less.
    So the percentile never clips the first update, nor any at 100. Under fp16 the gradients are unscaled by then; an
    update that the scaler skips makes no step, or with a fused optimizer one whose norm is not finite: neither counts.
    Several processes make each step together, and take the same norm, that of the whole gradients.

    `limit` is the norm that the last step was held to, None without any clipping.
    """

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, loop: Loop) -> None:
        self.limit: float | None = loop.max_norm if math.isfinite(loop.max_norm) else None
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._max_norm = loop.max_norm
        self._percentile = loop.percentile_clipping
        self._norms: deque[float] = deque(maxlen=WINDOW)
        self._in_step = False
        self._handles = []
        if self._percentile is not None:
            self._handles = [
                optimizer.register_step_pre_hook(self._before_step),
                optimizer.register_step_post_hook(self._after_step),
            ]

    def remember(self, history: Sequence[Update]) -> None:
        """Take the norms of earlier updates; bit for bit those measured before each step, as engines report them."""
        self._norms.extend(line.grad_norm for line in history if line.grad_norm is not None)

    def detach(self) -> None:
        """Take the hooks off. May be called more than once."""
        while self._handles:
            self._handles.pop().remove()

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        # A class whose `step` calls that of its base runs the hooks twice, once either is patched (torch 2.13).
        if self._in_step:
            return
        self._in_step = True
        gradients = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        norm = _norm(gradients)
        if not math.isfinite(norm):
            return
        self._norms.append(norm)
        self.limit = min(self._max_norm, float(np.percentile(self._norms, self._percentile)))
        if norm > self.limit:
            # Without the 1e-6 that torch adds to the norm: a percentile is as small as the gradients are.
            for gradient in gradients:
                gradient.mul_(self.limit / norm)

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._in_step = False


def _norm(gradients: Sequence[torch.Tensor]) -> float:
    """Return the norm of all gradients together, the same on every process, where they may differ in the last bits."""
    (norm,) = largest([float(whole(get_total_norm(gradients)))])
    return norm


def clipping_notes(loop: Loop, history: Sequence[Update]) -> tuple[str, ...]:
    """Return a sentence on how often, and to which norm, a run was clipped; nothing without percentile clipping."""
    made = [
        (line.grad_norm, line.clip_norm)
        for line in history
        if line.grad_norm is not None and line.clip_norm is not None
    ]
    if loop.percentile_clipping is None or not made:
        return ()
    clipped = sum(norm > limit for norm, limit in made)
    note = (
        f"Percentile clipping at {loop.percentile_clipping:g}: {clipped} of {len(made)} updates clipped, the last "
        f"limit was {made[-1][1]:.4g}"
    )
    by_fixed_limit = sum(limit == loop.max_norm < norm for norm, limit in made)
    if by_fixed_limit:
        note += f"; in {by_fixed_limit} of them --max-grad-norm {loop.max_norm:g} was the smaller limit (0 lifts it)"
    return (f"{note}.",)
