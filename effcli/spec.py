"""`RunSpec`: everything a run depends on, validated at once, frozen, and writable as a recipe."""

from __future__ import annotations

import codecs
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator

from effcli.errors import UsageError
from effcli.faults import explain
from effcli.values import Scalar, as_device, as_interval, as_list, as_percentage, as_shard, scalars

Task = Literal["classification", "causal-lm", "seq2seq"]
Engine = Literal["pytorch", "accelerate", "trainer"]
Precision = Literal["fp32", "bf16", "fp16", "bf16-pure"]
Attention = Literal["sdpa", "eager", "flash_attention_2"]
Scheduler = Literal["linear", "cosine", "constant"]
Shard = Literal["ddp", "fsdp", "zero1", "zero2", "zero3"]
"""What each of several processes holds: a replica, or a share by PyTorch's FSDP2 or by DeepSpeed's ZeRO."""
Tracker = Literal["tensorboard", "wandb", "mlflow", "trackio"]
Text = Annotated[str, Field(min_length=1)]

LARGEST = 2**31 - 1
"""Largest count that every library below takes."""


class Section(BaseModel):
    """Base of the sections: frozen, unknown keys refused, docstrings under fields are their descriptions."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)


class ModelSpec(Section):
    """Which model is trained, and which of its parameters."""

    name: Text | None = None
    """Local folder or hub id; none means the small built-in DistilBERT with random weights."""
    task: Task | None = None
    """What is learnt; guessed from model and data when not given."""
    freeze: tuple[Text, ...] = ()
    """Patterns of parameter names that are not trained; without a wildcard, a part of the name."""
    attn: Attention | None = None
    """How attention is computed: sdpa, eager, or the package flash-attn; none means transformers' choice."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model, also where transformers has an architecture of that name."""
    stable_embedding: bool = False
    """Replace the embeddings by bitsandbytes' StableEmbedding: a LayerNorm after each, optimizer state in 32 bit."""
    lora_r: int | None = Field(default=None, ge=1, le=LARGEST)
    """Rank of LoRA adapters; with it only they and a newly made head are trained."""
    lora_targets: tuple[Text, ...] = ()
    """Names of the layers that get adapters, or all-linear; none means peft's choice for the architecture."""
    lora_alpha: float | None = Field(default=None, gt=0)
    """Scale of the adapters, divided by their rank; none means twice the rank."""
    lora_dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout before the adapters."""

    _one_pattern_is_a_list = field_validator("freeze", mode="before")(as_list)

    @field_validator("lora_targets", mode="before")
    @classmethod
    def _targets_may_be_joined(cls, value: Any) -> Any:
        """Read `q_lin,v_lin` as two names."""
        given = as_list(value)
        if not isinstance(given, list | tuple) or not all(isinstance(name, str) for name in given):
            return given
        return tuple(name.strip() for joined in given for name in joined.split(","))


class DataSpec(Section):
    """Which rows are read, and how."""

    train: Text | None = None
    """File (CSV, TSV, JSON lines, Parquet), `save_to_disk` folder or hub id; none means the built-in pairs."""
    eval: Text | None = None
    """Evaluation rows, in the same forms; none means the validation split where the data has one."""
    eval_fraction: float | None = Field(default=None, gt=0, lt=1)
    """Share of the training rows, drawn by the seed, that is kept for evaluation and not trained on."""
    text_columns: tuple[Text, ...] = Field(default=(), max_length=2)
    """One or two text columns, in seq2seq the source; guessed by name when not given."""
    label_column: Text | None = None
    """Label column, in seq2seq the target text; guessed by name when not given."""
    delimiter: Text | None = None
    """Field separator of CSV files; guessed when not given."""
    encoding: Text = "utf-8"
    """Text encoding of files."""
    max_length: int | None = Field(default=None, ge=2, le=LARGEST)
    """Tokens kept per row; none means the model's limit, at most 512."""
    max_target_length: int | None = Field(default=None, ge=2, le=LARGEST)
    """Tokens kept of a seq2seq target; none means as many as of the source, if the decoder reads as many."""
    limit_rows: int | None = Field(default=None, ge=1, le=LARGEST)
    """Use only the first rows of the training data."""

    _one_column_is_a_list = field_validator("text_columns", mode="before")(as_list)

    @field_validator("eval_fraction")
    @classmethod
    def _eval_rows_come_from_one_place(cls, value: float | None, info: ValidationInfo) -> float | None:
        if value is not None and info.data.get("eval") is not None:
            raise ValueError("--eval-data is given as well; evaluation rows come from one of the two")
        return value

    @field_validator("text_columns")
    @classmethod
    def _text_columns_differ(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if len(set(value)) < len(value):
            raise ValueError(f"'{value[0]}' is given twice; name two different columns, or one")
        return value

    @field_validator("label_column")
    @classmethod
    def _label_is_no_text(cls, value: str | None, info: ValidationInfo) -> str | None:
        if value is not None and value in info.data.get("text_columns", ()):
            raise ValueError(f"'{value}' is a text column as well; name another column")
        return value

    @field_validator("delimiter")
    @classmethod
    def _delimiter_is_one_character(cls, value: str | None) -> str | None:
        value = "\t" if value in ("\\t", "tab") else value
        if value is not None and len(value) != 1:
            raise ValueError(f"{value!r} is not one character; give one, or tab")
        return value

    @field_validator("encoding")
    @classmethod
    def _encoding_is_known(cls, value: str) -> str:
        try:
            codecs.lookup(value)
        except (LookupError, ValueError) as error:
            raise ValueError(f"{value!r} is not a known text encoding; give one such as utf-8 or latin-1") from error
        return value


class OptimSpec(Section):
    """The optimizer and its hyperparameters; none means the registry entry's default."""

    name: Text = "adamw"
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
    keep_32bit: tuple[Text, ...] = ()
    """Patterns of parameter names whose 8-bit state stays in 32 bit; without a wildcard, a part of the name."""
    min_8bit_size: int | None = Field(default=None, ge=1, le=LARGEST)
    """Parameters with fewer elements keep 32-bit state in 8-bit optimizers; none means 4,096."""
    optim_bits: Literal[8, 32] | None = None
    """Bits of the state of bitsandbytes' optimizers; none means what the name says."""
    overrides: dict[Text, dict[Text, Scalar]] = Field(default_factory=dict)
    """Pattern of parameter names -> hyperparameters that differ for them."""

    _one_pattern_is_a_list = field_validator("keep_32bit", mode="before")(as_list)

    @field_validator("args", mode="before")
    @classmethod
    def _args_are_scalars(cls, value: Any) -> Any:
        return scalars(value, "optim.args.momentum=0.9")

    @field_validator("overrides", mode="before")
    @classmethod
    def _overrides_are_scalars(cls, value: Any) -> Any:
        example = "overrides: {embed: {lr: 1e-5}}"
        if value is None:
            return {}
        if not isinstance(value, Mapping):
            raise ValueError(f"{value!r} is no set of patterns with hyperparameters; write {example}")
        return {pattern: scalars(values, example) for pattern, values in value.items()}

    @field_validator("optim_bits", mode="before")
    @classmethod
    def _bits_may_be_text(cls, value: Any) -> Any:
        return int(value) if isinstance(value, str) and value.strip() in ("8", "32") else value


class LoopSpec(Section):
    """How updates are made."""

    engine: Engine = "pytorch"
    """The loop that runs: bare PyTorch, Accelerate, or transformers' Trainer."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:i."""
    shard: Shard = "ddp"
    """What each of several processes holds: ddp or none, a replica; fsdp, zero1 to zero3, a share."""
    precision: Precision = "fp32"
    """fp32; bf16 or fp16 autocast over fp32 weights; bf16-pure holds weights in bf16."""
    batch_size: int = Field(default=8, ge=1, le=LARGEST)
    """Rows per micro-batch."""
    eval_batch_size: int | None = Field(default=None, ge=1, le=LARGEST)
    """Rows per evaluation batch; none means the training batch size."""
    accum: int = Field(default=1, ge=1, le=LARGEST)
    """Micro-batches accumulated per update."""
    auto_batch: bool = False
    """When memory runs out, go on with a smaller micro-batch and more accumulation; the rows per update stay."""
    longest_first: bool = False
    """Begin the first epoch with the longest rows, so that a run that cannot fit fails at its first update."""
    epochs: int = Field(default=3, ge=1, le=LARGEST)
    """Passes over the training data."""
    max_steps: int | None = Field(default=None, ge=1, le=LARGEST)
    """Stop after this many updates; overrides epochs."""
    scheduler: Scheduler = "linear"
    """Learning-rate schedule over updates."""
    warmup_ratio: float = Field(default=0.0, ge=0, lt=1)
    """Share of the updates spent warming up."""
    max_grad_norm: float = Field(default=1.0, ge=0)
    """Clip the gradient norm once per update; 0 means no clipping."""
    percentile_clipping: float | None = Field(default=None, gt=0, le=100)
    """Clip the gradient norm at this percentile of the last 100 norms; none means no such clipping."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass instead of keeping them."""
    compile: bool = False
    """Compile the layers of the model with torch.compile."""
    profile_memory: bool = False
    """On a CPU: record the allocator during one warm update, for the peak that was really allocated."""
    seed: int = Field(default=42, ge=0, lt=2**32)
    """Seed of weights, dropout and data order."""
    num_workers: int = Field(default=0, ge=0, le=LARGEST)
    """Worker processes that prepare batches."""
    nvml_interval: float = Field(default=0.2, ge=0, le=3600)
    """On a CUDA device: seconds between two readings of its memory from the NVIDIA driver; 0 means none."""

    _none_is_ddp = field_validator("shard", mode="before")(as_shard)
    _nvml_interval_is_no_burden = field_validator("nvml_interval")(as_interval)
    _device_is_known = field_validator("device")(as_device)


class OutputSpec(Section):
    """What is written, and how often."""

    out: Text | None = None
    """Run folder; none means a dated folder under runs/."""
    save_every: int | None = Field(default=None, ge=1, le=LARGEST)
    """Updates between checkpoints; none means each epoch."""
    keep: int = Field(default=2, ge=1, le=LARGEST)
    """Checkpoints kept."""
    logging_steps: int = Field(default=10, ge=1, le=LARGEST)
    """Updates between progress lines, and between the losses that services are told, each the mean since the last."""
    track: tuple[Tracker, ...] = ()
    """Services that losses, rates and memory are logged to while the run goes on."""
    tolerance: float | None = Field(default=None, ge=0)
    """After the run, per cent that a measured amount of memory may be off its prediction; none: whatever it is."""

    _percent_sign_may_follow = field_validator("tolerance", mode="before")(as_percentage)
    _one_service_is_a_list = field_validator("track", mode="before")(as_list)


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


def build_spec(values: Mapping[str, Any]) -> RunSpec:
    """Return the specification that nested sections describe; texts become the type that each field declares.

    Raises:
        UsageError: one line with every fault, each naming its field, what was given and what is allowed.
    """
    return validated(RunSpec, values)


_Spec = TypeVar("_Spec", bound=Section)


def validated(kind: type[_Spec], values: Mapping[str, Any]) -> _Spec:
    """Return the specification of one kind; see `build_spec`."""
    try:
        return kind.model_validate(dict(values))
    except ValidationError as error:
        raise UsageError(explain(error)) from error
