"""Batches as fake tensors, of as many tokens, pixels or samples as was asked for."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from effcli.errors import UsageError
from effcli.trace.micro import Batch

LABELS = "labels"
AUDIO_SECONDS = 10
"""Length of a clip, where a model reads raw audio: nothing in its configuration says it."""
_SAMPLING_RATE = 16_000
CHOICES = 4
"""Answers to choose from in a multiple-choice row, as in SWAG."""


PRETRAINING_LABELS = ("next_sentence_label", "sentence_order_label")
"""Labels that some models are pretrained with beside the tokens, such as BERT and ALBERT."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchShape:
    """Rows, and tokens of each; in seq2seq those of the source, and those of the target, none for as many.

    Images and spectrograms have the size that the model's configuration says.
    """

    batch_size: int
    max_length: int
    max_target_length: int | None = None


def fake_batch(config: Any, task: str, shape: BatchShape) -> Batch:
    """Return the tensors of a batch by the names that the model's `forward` gives them; within `fake_tensors`.

    int64 ids of shape (rows, tokens), float32 images (rows, channels, height, width), spectrograms (rows, bins, frames)
    or samples (rows, samples). `labels` are (rows,) classes, or one id per position, of a decoder's where there is one.
    """
    rows, length = shape.batch_size, shape.max_length
    if task == "image-classification":
        return {"pixel_values": torch.empty(rows, *_image(config)), LABELS: _classes(rows)}
    if task == "audio-classification" and not hasattr(config, "num_mel_bins"):
        return {"input_values": torch.empty(rows, AUDIO_SECONDS * _SAMPLING_RATE), LABELS: _classes(rows)}
    if task in ("speech-seq2seq", "audio-classification"):
        features = torch.empty(rows, config.num_mel_bins, 2 * config.max_source_positions)
        labels = _ids(rows, length) if task == "speech-seq2seq" else _classes(rows)
        return {"input_features": features, LABELS: labels}
    if task == "multiple-choice":
        return {"input_ids": torch.empty(rows, CHOICES, length, dtype=torch.int64), LABELS: _classes(rows)}
    batch = {"input_ids": _ids(rows, length), "attention_mask": _ids(rows, length)}
    if config.model_type == "gemma3":  # refuses to train without them, images or not
        batch["token_type_ids"] = _ids(rows, length)
    if task == "question-answering":
        return {**batch, "start_positions": _classes(rows), "end_positions": _classes(rows)}
    if task == "pretraining":
        return {**batch, LABELS: _ids(rows, length), **{name: _classes(rows) for name in PRETRAINING_LABELS}}
    if task == "seq2seq" and config.is_encoder_decoder:
        target = shape.max_target_length or length
        return {**batch, LABELS: _ids(rows, target), "decoder_input_ids": _ids(rows, target)}
    if task == "regression":
        return {**batch, LABELS: torch.empty(rows)}
    return {**batch, LABELS: _classes(rows) if task == "classification" else _ids(rows, length)}


def own_loss(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    """Return the loss that the model itself computes; its other outputs are gone when this returns, as in Trainer.

    Raises:
        UsageError: it computes none.
    """
    known = inspect.signature(model.forward).parameters
    loss: torch.Tensor | None = getattr(
        model(**{name: tensor for name, tensor in batch.items() if name in known or name not in PRETRAINING_LABELS}),
        "loss",
        None,
    )
    if loss is None:
        raise UsageError(
            f"{type(model).__name__} computes no loss, so that no update can be planned; give another --task"
        )
    return loss


def logits_for(loss: Callable[..., Any]) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return the forward that keeps the logits alone, and the loss of logits and labels, as the engines do."""

    def forward(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        logits: torch.Tensor = model(**{name: tensor for name, tensor in batch.items() if name != LABELS}).logits
        return logits

    return forward, lambda logits, batch: loss(logits, batch[LABELS])


def _ids(rows: int, length: int) -> torch.Tensor:
    return torch.empty(rows, length, dtype=torch.int64)


def _classes(rows: int) -> torch.Tensor:
    return torch.empty(rows, dtype=torch.int64)


def _image(config: Any) -> tuple[int, int, int]:
    size = getattr(config, "image_size", 224)
    height, width = (size, size) if isinstance(size, int) else tuple(size)
    return getattr(config, "num_channels", 3), height, width
