"""The accumulation rule, in one place for every engine.

A window is the set of micro-batches that make one update. Its loss is (sum of the losses of its items) / (number of
its items), where an item is a row in classification and a predicted token in language modelling. Each micro-batch
contributes its own sum divided by the *window's* count, so gradients simply add up, whatever the sizes of the
micro-batches, and a short last window needs no special case.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

from effcli.data.batches import IGNORED
from effcli.engines.base import Batch, Job
from effcli.errors import TrainingFailedError
from effcli.ranks.group import sums, world_size

if TYPE_CHECKING:
    from effcli.data.batches import EpochLoader
    from effcli.data.columns import Objective


def run_windows(job: Job, loader: EpochLoader) -> Iterator[list[Batch]]:
    """Yield the windows of the updates that are left, epoch after epoch.

    `loader` is the job's, or what accelerate made of it. That one takes the epoch, since it counts its iterations
    and would set the sampler's epoch back to that count; what to skip only the job's own takes (accelerate 1.15).
    """
    schedule, update, total = job.loop.window_schedule, job.start_update, job.loop.total_updates
    while update < total:
        position = schedule.position(update)
        loader.set_epoch(position.epoch)
        job.loader.skip_next(position.rows)
        for window in islice(windows(loader, schedule.accum), total - update):
            yield window
            update += 1


def windows(batches: Iterable[Batch], accum: int) -> Iterator[list[Batch]]:
    """Yield lists of `accum` micro-batches; the last may be shorter."""
    iterator = iter(batches)
    while window := list(islice(iterator, accum)):
        yield window


def is_item(labels: torch.Tensor) -> torch.Tensor:
    """Return which of the `labels` the loss counts, bool of the same shape."""
    return ~labels.isnan() if labels.is_floating_point() else labels != IGNORED


def count_items(labels: torch.Tensor) -> int:
    """Return the number of items among `labels` (rows, or tokens that are predicted)."""
    return int(is_item(labels).sum())


def window_items(window: Sequence[Batch]) -> int:
    """Return the number of items in a window, over all processes.

    Raises:
        TrainingFailedError: there is none, so that the window has no loss.
    """
    (total,) = sums([sum(count_items(batch["labels"]) for batch in window)])
    num_items = int(total)
    if not num_items:
        raise TrainingFailedError(
            f"nothing to learn from in a window of {len(window)} micro-batches: every label in it is {IGNORED}, which "
            "the loss leaves out; remove rows whose label or target is empty, or use a larger --batch-size or --accum"
        )
    return num_items


def window_loss(shares: torch.Tensor | float) -> float:
    """Return the loss of a window, given this process's shares of it, as `WindowLoss.scaled` makes them, added up."""
    (total,) = sums([float(shares)])
    return total / world_size()


class WindowLoss:
    """Computes losses for one objective; called by all engines and by the evaluation.

    `watch` is given each loss that is to be learnt from, before its backward pass.
    """

    def __init__(self, objective: Objective, watch: Callable[[torch.Tensor], None] = lambda loss: None) -> None:
        self.objective, self._watch = objective, watch

    def total(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the sum of the item losses of a micro-batch, in fp32.

        `logits` is (rows, classes) or (rows, 1) or (rows, tokens, vocabulary); `labels` is (rows,) or (rows, tokens).
        In language modelling the label of a position is the next token, and the collator marks the first
        position of each row as ignored. In seq2seq the decoder's inputs are shifted already, its labels are not.
        """
        logits = logits.float()
        if self.objective == "regression":
            scores = logits.squeeze(-1)
            wanted = torch.where(is_item(labels), labels.float(), scores.detach())  # what is ignored is met
            return functional.mse_loss(scores, wanted, reduction="sum")
        if self.objective == "causal-lm":
            # Shifting the labels instead of the logits avoids a copy of the largest tensor of the step.
            labels = functional.pad(labels, (0, 1), value=IGNORED)[:, 1:]
        logits, labels = logits.flatten(0, -2), labels.flatten()
        return functional.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum")

    def scaled(self, logits: torch.Tensor, labels: torch.Tensor, num_items: Any) -> torch.Tensor:
        """Return the micro-batch's share of the window's loss; `num_items` counts the whole window.

        Of several processes each one's share is as many times as large, since gradients are averaged over them.
        """
        share = self.total(logits, labels) * world_size() / num_items
        self._watch(share)
        return share
