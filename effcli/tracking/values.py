"""What services are told, as plain numbers and texts by name."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from effcli.masking import masked
from effcli.setting_texts import dotted

if TYPE_CHECKING:
    from effcli.engines.session import Evaluation, Update
    from effcli.measure.record import RunRecord

Scalar = bool | int | float | str


def config_values(spec: Mapping[str, Mapping[str, Any]]) -> dict[str, Scalar]:
    """Return the fields of a dumped specification by dotted name, texts without secrets; those not given are left out.

    Hyperparameters of `optim.args` have a name each, lists are joined by commas, overrides are one JSON text.
    """
    flat = dotted(spec, depth=2)
    flat |= {f"optim.args.{name}": value for name, value in flat.pop("optim.args", {}).items()}
    return {name: _plain(value) for name, value in flat.items() if value is not None and value not in ({}, [], ())}


def _plain(value: Any) -> Scalar:
    if isinstance(value, bool | int | float):
        return value
    if isinstance(value, list | tuple):
        return masked(", ".join(map(str, value)))
    return masked(json.dumps(value) if isinstance(value, Mapping) else str(value))


def is_due(update: int, *, logging_steps: int, total_updates: int) -> bool:
    """Return whether services are told of an update: each `logging_steps`-th, and the last, as in the progress."""
    return update % logging_steps == 0 or update == total_updates


def update_values(history: Sequence[Update], logging_steps: int) -> dict[str, float]:
    """Return loss, rate, gradient norm (before clipping) and epoch of the last update, by the names of Trainer.

    The loss is the mean over the updates since the last one that was due. What was not finite is left out.
    """
    last = history[-1]
    interval = (last.update - 1) % logging_steps + 1
    losses = [line.loss for line in history[-interval:] if line.loss is not None]
    values = {
        "train/loss": math.fsum(losses) / len(losses) if losses else None,
        "train/learning_rate": last.lr,
        "train/grad_norm": last.grad_norm,
        "train/epoch": last.epoch,
    }
    return {name: value for name, value in values.items() if value is not None}


def evaluation_values(evaluation: Evaluation) -> dict[str, float]:
    """Return the loss of an evaluation and the metrics that the task has."""
    result = evaluation.result
    values = {"loss": result.loss, "accuracy": result.accuracy, "f1": result.f1, "perplexity": result.perplexity}
    return {f"eval/{name}": value for name, value in values.items() if value is not None and math.isfinite(value)}


def final_values(record: RunRecord) -> dict[str, float]:
    """Return bytes, predicted and measured, and the averages of training, as far as they are known when a run ends."""
    values: dict[str, float] = {}
    for name, predicted, measured in _memory(record):
        if predicted is not None:
            values[f"memory/{name}/predicted"] = predicted
        if measured is not None:
            values[f"memory/{name}/measured"] = measured
    if record.throughput is not None:
        values |= {f"throughput/{name}": value for name, value in record.throughput.model_dump().items()}
    return values


def memory_text(record: RunRecord) -> str:
    """Return a Markdown table of the bytes of `final_values`, in full."""
    rows = [
        f"| {name} | {'' if predicted is None else predicted} | {'' if measured is None else measured} |"
        for name, predicted, measured in _memory(record)
    ]
    return "\n".join(["| | predicted | measured |", "|---|---|---|", *rows])


def _memory(record: RunRecord) -> Iterator[tuple[str, int | None, int | None]]:
    """Yield name, predicted and measured bytes; the predicted peak is that of the batch that was measured."""
    measured, peak = record.measured, record.comparable_planned_peak_bytes
    yield "weights_bytes", record.model.weights_bytes, measured.weights_bytes if measured else None
    yield "gradients_bytes", record.model.gradients_bytes, measured.gradients_bytes if measured else None
    state_bytes = measured.optimizer_state_bytes if measured else None
    yield "optimizer_state_bytes", record.optimizer.state_bytes, state_bytes
    yield "peak_allocated_bytes", peak, measured.peak_allocated_bytes if measured else None
    yield "peak_rss_bytes", None, measured.peak_rss_bytes if measured else None
