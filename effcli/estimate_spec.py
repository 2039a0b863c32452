"""`EstimateSpec`: what an estimate depends on, validated at once; its sections are called as in `RunSpec`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePath
from typing import Any, Literal

from pydantic import Field, field_validator

from effcli.spec import LARGEST, ModelSpec, OptimSpec, Precision, Section, Shard, Text, validated
from effcli.values import as_shard

LARGEST_WORLD = 16384
"""Processes that an estimate lists one by one."""

EstimatedDevice = Literal["cuda", "cpu"]
DRAWINGS = (".html", ".png", ".svg")
"""Endings of the files that a timeline can be drawn into."""


class EstimatedModelSpec(ModelSpec):
    """Which model is estimated, with which head; more tasks than the loops can train."""

    task: Text | None = None  # type: ignore[assignment]
    """What is learnt; none means what people fine-tune such a model for."""
    num_labels: int | None = Field(default=None, ge=1, le=LARGEST)
    """Classes of a classification head; none means the configuration's own, or 2."""


class EstimatedDataSpec(Section):
    """What of the data matters to memory."""

    max_length: int | None = Field(default=None, ge=2, le=LARGEST)
    """Tokens of every row, the worst batch; none means the model's limit, at most 512."""
    max_target_length: int | None = Field(default=None, ge=2, le=LARGEST)
    """Tokens of every seq2seq target; none means as many as of the source, if the decoder reads as many."""


class EstimatedLoopSpec(Section):
    """What of a loop matters to memory."""

    precision: Precision = "fp32"
    """As in training: bf16-pure alone changes what weights and gradients are held in, autocast the activations."""
    batch_size: int = Field(default=8, ge=1, le=LARGEST)
    """Rows per micro-batch."""
    accum: int = Field(default=1, ge=1, le=LARGEST)
    """Micro-batches accumulated per update; with more than one, gradients live through the next forward pass."""
    max_grad_norm: float = Field(default=1.0, ge=0)
    """Norm that gradients are clipped to; 0 means no clipping, and none of its temporaries."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass instead of keeping them."""
    world_size: int = Field(default=1, ge=1, le=LARGEST_WORLD)
    """Processes that train together, each on a device of its own."""
    shard: Shard = "ddp"
    """What each of several processes holds: ddp or none, a replica; fsdp, zero1 to zero3, a share."""
    device: EstimatedDevice = "cuda"
    """Whose kernels and allocator are predicted; the device need not be there."""
    gpu: Text | None = None
    """Card, or bytes that it has for us: what the plan is held against."""
    budget: Text | None = None
    """Card or bytes that the plan must not exceed; exceeding them is an error, for scripts."""

    _none_is_ddp = field_validator("shard", mode="before")(as_shard)


class EstimatedOutputSpec(Section):
    """What is drawn."""

    timeline: Text | None = None
    """File for a chart of live bytes over an update: .html, .png or .svg."""

    @field_validator("timeline")
    @classmethod
    def _ending_is_known(cls, value: str | None) -> str | None:
        if value is not None and PurePath(value).suffix.lower() not in DRAWINGS:
            raise ValueError(f"'{value}' does not end in {', '.join(DRAWINGS[:-1])} or {DRAWINGS[-1]}")
        return value


class EstimateSpec(Section):
    """An estimate: one model, several optimizers."""

    model: EstimatedModelSpec
    optim: tuple[OptimSpec, ...]
    data: EstimatedDataSpec = EstimatedDataSpec()
    loop: EstimatedLoopSpec = EstimatedLoopSpec()
    output: EstimatedOutputSpec = EstimatedOutputSpec()

    @property
    def asks_for_peak(self) -> bool:
        """Return whether a setting was given that means nothing before activations."""
        loop = self.loop.model_fields_set - {"precision", "world_size", "shard"}
        return bool(loop or self.data.model_fields_set or self.output.timeline or self.model.attn)


def build_estimate_spec(values: Mapping[str, Any]) -> EstimateSpec:
    """Return the specification that nested sections describe.

    Raises:
        UsageError: see `effcli.spec.build_spec`.
    """
    return validated(EstimateSpec, values)
