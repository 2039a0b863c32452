"""What 16 bit cost a run: updates that the fp16 scaler skipped, and bf16 weights that small updates left alone."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from effcli.measure.record import Measured, WeightChangeFacts
from effcli.units import count

if TYPE_CHECKING:
    import torch

MAX_COMPARED = 2**18
"""Weights that are compared at most: a share of that many is right to 0.1 % (one standard deviation)."""

FEW = 0.5
"""Share below which updates are said to vanish; with a 32-bit copy nearly every weight with a gradient changes."""


class WeightChanges:
    """Compares trained bfloat16 weights, evenly spaced, with what they are when this is made; inert without any.

    Rows of an embedding whose tokens never occur get no gradient and change in no precision, so each step adds to a
    mask of the compared weights which had one. Values of the start lie in host memory; the mask takes
    `MAX_COMPARED` bytes at most where the weights are, and a step four times that for a moment before its own
    temporaries. Nothing that the run computes is touched.

    Of weights that are divided among processes each looks at its shard; `added_up` are those of all.

    The start is that of the whole run, while the mask begins anew where a run is resumed: a weight whose gradients all
    came before and that did not change is left out, so that the share may then be too large.
    """

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        import torch

        from effcli.storage import local

        weights = [p for p in model.parameters() if p.requires_grad and p.dtype == torch.bfloat16]
        self._num_weights = sum(local(weight).numel() for weight in weights)
        self._stride = -(-self._num_weights // MAX_COMPARED) | 1  # odd, since most rows have an even length
        ends = itertools.accumulate(local(weight).numel() for weight in weights)
        # With the first element of each to compare: every `_stride`-th is, counted through all of them.
        self._weights = [(w, (local(w).numel() - end) % self._stride) for w, end in zip(weights, ends, strict=True)]
        self.is_sharded = any(local(weight) is not weight for weight in weights)
        self._start = self._values().cpu() if self._weights else None
        self._had_gradient: torch.Tensor | None = None
        self._handles = [optimizer.register_step_pre_hook(self._before_step)] if self._weights else []

    def result(self) -> WeightChangeFacts | None:
        """Return the counts so far; None where no trained weight is in bfloat16 or no step was made."""
        if self._start is None or self._had_gradient is None:
            return None
        changed = self._values().cpu() != self._start
        reached = self._had_gradient.cpu() | changed
        return WeightChangeFacts(
            num_weights=self._num_weights,
            num_compared=self._start.numel(),
            num_with_gradient=int(reached.sum()),
            num_changed=int(changed.sum()),
        )

    def detach(self) -> None:
        """Take the hook off; what was seen stays. May be called more than once."""
        while self._handles:
            self._handles.pop().remove()

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        import torch

        gradients = torch.cat(
            [
                torch.zeros_like(self._sample(weight, first))
                if weight.grad is None
                else self._sample(weight.grad, first)
                for weight, first in self._weights
            ]
        )
        had_one = gradients != 0
        self._had_gradient = had_one if self._had_gradient is None else self._had_gradient.logical_or_(had_one)

    def _values(self) -> torch.Tensor:
        import torch

        return torch.cat([self._sample(weight, first) for weight, first in self._weights])

    def _sample(self, tensor: torch.Tensor, first: int) -> torch.Tensor:
        from effcli.storage import local

        return local(tensor.detach()).reshape(-1)[first :: self._stride]


def added_up(parts: Sequence[WeightChangeFacts | None]) -> WeightChangeFacts | None:
    """Return the counts of all shards together; None where none has any."""
    known = [part for part in parts if part is not None]
    if not known:
        return None
    return WeightChangeFacts(
        num_weights=sum(part.num_weights for part in known),
        num_compared=sum(part.num_compared for part in known),
        num_with_gradient=sum(part.num_with_gradient for part in known),
        num_changed=sum(part.num_changed for part in known),
    )


def precision_notes(measured: Measured | None) -> tuple[str, ...]:
    """Return what should be said at the end about skipped updates and unchanged weights; nothing where all is well."""
    if measured is None:
        return ()
    skipped = measured.skipped_updates
    notes = (f"The fp16 scaler skipped {count(skipped, 'update')}.",) if skipped else ()
    return (*notes, *_change_notes(measured.weight_changes))


def _change_notes(changes: WeightChangeFacts | None) -> tuple[str, ...]:
    if changes is None or changes.share is None:
        return ()
    note = f"{changes.share:.1%} of the bf16 weights with a gradient changed"
    if changes.num_compared < changes.num_weights:
        note += f" ({changes.num_compared:,} of {changes.num_weights:,} compared)"
    if changes.share < FEW:
        note += ": most updates were rounded away; --precision bf16 keeps them, and a larger --lr loses fewer"
    return (f"{note}.",)
