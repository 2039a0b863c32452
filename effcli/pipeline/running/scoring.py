"""What scores a model during a run. Imports torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from effcli.data.batches import Collator, eval_loader
from effcli.engines.base import EvalResult
from effcli.engines.evaluate import evaluate
from effcli.engines.whole_tensors import reshard
from effcli.engines.window import WindowLoss
from effcli.optim.modes import evaluation_weights

if TYPE_CHECKING:
    import torch

    from effcli.pipeline.prepare import Prepared


def scoring(
    prepared: Prepared,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    collate: Collator,
    window_loss: WindowLoss,
) -> Callable[[], EvalResult] | None:
    """Return what scores the model on the evaluation rows; None where there are none."""
    loop, rows = prepared.spec.loop, prepared.data.eval
    if rows is None:
        return None
    batch_size = loop.eval_batch_size or loop.batch_size
    loader = eval_loader(rows, collate, batch_size=batch_size, num_workers=loop.num_workers, part=prepared.part)

    def score() -> EvalResult:
        with evaluation_weights(optimizer):
            result = evaluate(model, loader, window_loss, device=prepared.device, precision=loop.precision)
            reshard(model)
            return result

    return score
