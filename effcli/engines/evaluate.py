"""Evaluation, the same for every engine."""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import chain

import torch

from effcli.data.scores import classification_scores
from effcli.engines.base import Batch, EvalResult
from effcli.engines.precision import autocast
from effcli.engines.window import WindowLoss, is_item
from effcli.ranks.group import gathered, sums


def evaluate(
    model: torch.nn.Module,
    batches: Iterable[Batch],
    window_loss: WindowLoss,
    *,
    device: torch.device,
    precision: str,
) -> EvalResult:
    """Return the mean loss per item over all batches of all processes, whatever their sizes, and the task's metrics.

    Leaves the model in the mode it was in. A row whose label is ignored, as of a process that has none, counts nowhere.
    """
    was_training = model.training
    model.eval()
    total, num_items = 0.0, 0.0
    predicted: list[int] = []
    expected: list[int] = []
    with torch.no_grad():
        for batch in batches:
            inputs = {name: tensor.to(device) for name, tensor in batch.items()}
            labels = inputs.pop("labels")
            with autocast(device, precision):
                logits = model(**inputs).logits
            total += float(window_loss.total(logits, labels))
            counts = is_item(labels)
            num_items += int(counts.sum())
            if window_loss.objective == "classification":
                predicted += logits.argmax(-1)[counts].tolist()
                expected += labels[counts].tolist()
    model.train(was_training)
    total, num_items = sums([total, num_items])
    loss = total / num_items
    if window_loss.objective == "classification":
        predicted, expected = (list(chain.from_iterable(gathered(rows))) for rows in (predicted, expected))
        accuracy, f1 = classification_scores(expected, predicted, num_labels=logits.shape[-1])
        return EvalResult(loss=loss, accuracy=accuracy, f1=f1)
    if window_loss.objective in ("causal-lm", "seq2seq"):
        return EvalResult(loss=loss, perplexity=math.exp(min(loss, 700.0)))
    return EvalResult(loss=loss)
