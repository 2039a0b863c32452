"""`RunSpec`: everything a run depends on, validated at once, frozen, and writable as a recipe."""

from __future__ import annotations

import math
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from effcli.errors import UsageError, nearest

Task = Literal["classification", "causal-lm"]
Engine = Literal["pytorch", "accelerate", "trainer"]
Precision = Literal["fp32", "bf16", "fp16", "bf16-pure"]
Scheduler = Literal["linear", "cosine", "constant"]
Scalar = bool | int | float | str

TASKS: tuple[str, ...] = ("classification", "causal-lm")


class Section(BaseModel):
    """Base of the sections: frozen, unknown keys refused, docstrings under fields are their descriptions."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)


class ModelSpec(Section):
    """Which model is trained, and which of its parameters."""

    name: str | None = None
    """Local folder or hub id; none means the small built-in DistilBERT with random weights."""
    task: Task | None = None
    """What is learnt; guessed from model and data when not given."""
    freeze: tuple[str, ...] = ()
    """Shell-style patterns of parameter names that are not trained."""


class DataSpec(Section):
    """Which rows are read, and how."""

    train: str | None = None
    """File (CSV, TSV, JSON lines, Parquet), `save_to_disk` folder or hub id; none means the built-in pairs."""
    eval: str | None = None
    """Evaluation rows, in the same forms; none means the validation split where the data has one."""
    text_columns: tuple[str, ...] = Field(default=(), max_length=2)
    """One or two text columns; guessed by name when not given."""
    label_column: str | None = None
    """Label column; guessed by name when not given."""
    delimiter: str | None = None
    """Field separator of CSV files; guessed when not given."""
    encoding: str = "utf-8"
    """Text encoding of files."""
    max_length: int | None = Field(default=None, ge=2)
    """Tokens kept per row; none means the model's limit, at most 512."""
    limit_rows: int | None = Field(default=None, ge=1)
    """Use only the first rows of the training data."""


class OptimSpec(Section):
    """The optimizer and its hyperparameters; none means the registry entry's default."""

    name: str = "adamw"
    """Registry name or alias."""
    lr: float | None = Field(default=None, ge=0)
    """Learning rate."""
    beta1: float | None = Field(default=None, ge=0, lt=1)
    """Decay of the first moment."""
    beta2: float | None = Field(default=None, ge=0, lt=1)
    """Decay of the second moment."""
    eps: float | None = Field(default=None, ge=0)
    """Term added to the denominator."""
    args: dict[str, Scalar] = Field(default_factory=dict)
    """Further hyperparameters by their upstream name."""
    weight_decay: float = Field(default=0.01, ge=0)
    """Decay of weights; biases and normalisation layers are never decayed."""
    keep_32bit: tuple[str, ...] = ()
    """Shell-style patterns of parameter names whose 8-bit state stays in 32 bit."""
    min_8bit_size: int = Field(default=4096, ge=1)
    """Parameters with fewer elements keep 32-bit state in 8-bit optimizers."""


class LoopSpec(Section):
    """How updates are made."""

    engine: Engine = "pytorch"
    """The loop that runs: bare PyTorch, Accelerate, or transformers' Trainer."""
    device: str = Field(default="auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$")
    """auto, cpu, cuda or cuda:i."""
    precision: Precision = "fp32"
    """fp32; bf16 or fp16 autocast over fp32 weights; bf16-pure holds weights in bf16."""
    batch_size: int = Field(default=8, ge=1)
    """Rows per micro-batch."""
    eval_batch_size: int | None = Field(default=None, ge=1)
    """Rows per evaluation batch; none means the training batch size."""
    accum: int = Field(default=1, ge=1)
    """Micro-batches accumulated per update."""
    epochs: int = Field(default=3, ge=1)
    """Passes over the training data."""
    max_steps: int | None = Field(default=None, ge=1)
    """Stop after this many updates; overrides epochs."""
    scheduler: Scheduler = "linear"
    """Learning-rate schedule over updates."""
    warmup_ratio: float = Field(default=0.0, ge=0, lt=1)
    """Share of the updates spent warming up."""
    max_grad_norm: float = Field(default=1.0, ge=0)
    """Clip the gradient norm once per update; 0 means no clipping."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass instead of keeping them."""
    seed: int = Field(default=42, ge=0, lt=2**32)
    """Seed of weights, dropout and data order."""
    num_workers: int = Field(default=0, ge=0)
    """Worker processes that prepare batches."""


class OutputSpec(Section):
    """What is written, and how often."""

    out: str | None = None
    """Run folder; none means a dated folder under runs/."""
    save_every: int | None = Field(default=None, ge=1)
    """Updates between checkpoints; none means each epoch."""
    keep: int = Field(default=2, ge=1)
    """Checkpoints kept."""
    logging_steps: int = Field(default=10, ge=1)
    """Updates between progress lines."""


class RunSpec(Section):
    """A whole run. Sections: model, data, optim, loop, output."""

    model: ModelSpec = ModelSpec()
    data: DataSpec = DataSpec()
    optim: OptimSpec = OptimSpec()
    loop: LoopSpec = LoopSpec()
    output: OutputSpec = OutputSpec()

    @field_validator("model", "data", "optim", "loop", "output", mode="before")
    @classmethod
    def _empty_section_is_default(cls, value: Any) -> Any:
        return {} if value is None else value

    @property
    def uses_builtin_demo(self) -> bool:
        """Return whether both model and data are the built-in ones."""
        return self.model.name is None and self.data.train is None
