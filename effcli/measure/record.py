"""`RunRecord`: the one JSON document that reports read. Bytes are integers, times are seconds."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from effcli.facts import Fact
from effcli.measure.device_record import AllocatorFacts, NvmlFacts
from effcli.measure.out_of_memory_record import OutOfMemoryFacts
from effcli.measure.rank_record import DistributionFacts, RankAmounts, RankMeasured
from effcli.memory.plan import MemoryPlan
from effcli.units import StateAmount

SCHEMA_VERSION = 1
Status = Literal["planned", "completed", "interrupted", "failed"]


class ModelFacts(Fact):
    """The model as trained; bytes are those of the parameters and of their gradients."""

    name: str
    architecture: str
    task: str
    num_parameters: int
    num_trainable_parameters: int
    num_parameter_tensors: int
    weights_bytes: int
    gradients_bytes: int


class OptimizerFacts(Fact):
    """The optimizer's state as predicted before the run.

    `placements` are its bytes by where they lie (device, host, paged); on a CPU all lie on the device.
    `allocator_state_bytes` are what torch's CUDA allocator counts for those on the device, in blocks of 512 bytes, of
    which those above 1 MiB may be up to 1 MiB larger; None where that is not predicted. `per_rank` is empty for one
    process.
    """

    name: str
    state_bytes: int
    state_elements: int
    rule_of_thumb_bytes: int | None
    basis: str
    tensors: dict[str, StateAmount]
    placements: dict[str, int] = Field(default_factory=dict)
    allocator_state_bytes: int | None = None
    by_parameter: dict[str, int] | None = None
    total_before_activations_bytes: int
    plan: MemoryPlan | None = None
    per_rank: tuple[RankAmounts, ...] = ()


class BatchFacts(Fact):
    """Rows per micro-batch, micro-batches per update, processes, and their product."""

    micro: int
    accum: int
    world_size: int
    effective: int

    @classmethod
    def of(cls, *, micro: int, accum: int, world_size: int) -> BatchFacts:
        """Return the facts with the product, the rows of an update."""
        return cls(micro=micro, accum=accum, world_size=world_size, effective=micro * accum * world_size)


class GroupFacts(Fact):
    """One parameter group of the optimizer."""

    weight_decay: float
    num_tensors: int
    num_elements: int


class DataFacts(Fact):
    """Rows used, rows left out (empty), and rows whose text and whose target (seq2seq) were cut to their maximum."""

    train_rows: int
    eval_rows: int
    skipped_rows: int
    truncated_rows: int
    truncated_targets: int = 0


class UpdateFacts(Fact):
    """One optimizer update: mean loss per item of its window, the learning rate it used, gradient norm before
    clipping (None where it was not finite), and the norm it was clipped to where it was larger (None without clipping
    too). `skipped` says that the fp16 scaler met an overflow and left weights, state and schedule alone. `training_s`
    are the seconds of training from the start of the run to the end of this update, evaluation and saving left out."""

    update: int
    epoch: float
    loss: float | None
    lr: float
    grad_norm: float | None
    clip_norm: float | None = None
    skipped: bool = False
    training_s: float | None = None


class EvalFacts(Fact):
    """One evaluation; metrics that do not apply to the task are None."""

    epoch: float
    update: int
    eval_loss: float | None
    eval_accuracy: float | None = None
    eval_f1: float | None = None
    eval_perplexity: float | None = None


class WeightChangeFacts(Fact):
    """Trained bfloat16 weights that a run changed, compared with its start weights.

    `num_compared` of all `num_weights` were looked at; `num_with_gradient` of these had a gradient in some update since
    the run began or was resumed, or changed.
    """

    num_weights: int
    num_compared: int
    num_with_gradient: int
    num_changed: int

    @property
    def share(self) -> float | None:
        """Return the share of the weights with a gradient that changed; None where none had one."""
        return self.num_changed / self.num_with_gradient if self.num_with_gradient else None


class ProfiledUpdate(Fact):
    """What the CPU's allocator handed out during one warm update, and what was planned for a batch of that shape.

    `rows` and `tokens` are those of its largest micro-batch, `timeline_bytes` the live bytes moment by moment.
    """

    update: int
    rows: int
    tokens: int
    peak_allocated_bytes: int
    planned_peak_allocated_bytes: int | None = None
    timeline_bytes: tuple[int, ...] = ()


class Measured(Fact):
    """What the run really took.

    `weights_bytes` and `gradients_bytes` are read before the first step that is not skipped; `peak_allocated_bytes` is
    CUDA's counter, on a CPU that of the `profiled` update, None where none was profiled. `allocator` is None on a CPU.
    `parameters_without_state` are those that the optimizer holds no state for, where it has one for others.
    `skipped_updates` counts those of the whole history, `weight_changes` is None unless weights are trained in
    bfloat16.
    """

    weights_bytes: int | None
    gradients_bytes: int | None
    optimizer_state_bytes: int
    optimizer_state_elements: int
    tensors: dict[str, StateAmount]
    parameters_without_state: tuple[str, ...] = ()
    peak_allocated_bytes: int | None
    profiled: ProfiledUpdate | None = None
    peak_rss_bytes: int
    allocator: AllocatorFacts | None = None
    nvml: NvmlFacts
    skipped_updates: int = 0
    weight_changes: WeightChangeFacts | None = None
    per_rank: tuple[RankMeasured, ...] = ()

    @property
    def update_peak_allocated_bytes(self) -> int | None:
        """Return the most that updates had allocated, which alone is planned; None where that was not measured.

        `peak_allocated_bytes` may be more on CUDA, where it is that of evaluations too.
        """
        if self.allocator is None:
            return self.peak_allocated_bytes
        updates = self.allocator.of_updates
        return updates.peak_allocated_bytes if updates else None

    @property
    def update_peak_reserved_bytes(self) -> int | None:
        """Return the most that torch's CUDA allocator reserved in updates; None where that was not measured."""
        updates = self.allocator.of_updates if self.allocator else None
        return updates.peak_reserved_bytes if updates else None


class Throughput(Fact):
    """Averages over the training time alone, evaluation and saving left out."""

    updates_per_second: float
    samples_per_second: float
    tokens_per_second: float


class Baselines(Fact):
    """Accuracy and F1 on the evaluation rows without any training of the model."""

    majority_accuracy: float
    majority_f1: float
    bag_of_words_accuracy: float
    bag_of_words_f1: float


class RunRecord(Fact):
    """A whole run: what was asked, what was predicted, what happened, what was measured."""

    schema_version: int = SCHEMA_VERSION
    command: str
    spec: dict[str, Any]
    environment: dict[str, Any]
    distribution: DistributionFacts | None = None
    model: ModelFacts
    optimizer: OptimizerFacts
    batch: BatchFacts
    groups: tuple[GroupFacts, ...]
    data: DataFacts
    total_updates: int
    history: tuple[UpdateFacts, ...] = ()
    eval: tuple[EvalFacts, ...] = ()
    measured: Measured | None = None
    throughput: Throughput | None = None
    baselines: Baselines | None = None
    notes: tuple[str, ...] = ()
    out_of_memory: tuple[OutOfMemoryFacts, ...] = ()
    status: Status = "planned"
    failure: str | None = None

    @property
    def is_on_cuda(self) -> bool:
        """Return whether the run's device is a CUDA device."""
        return str(self.environment.get("device", "")).startswith("cuda")

    @property
    def allocator_settings(self) -> str | None:
        """Return how torch's CUDA allocator was set up, None where by its defaults, which alone are planned."""
        settings = self.environment.get("allocator_settings")
        return str(settings) if settings else None

    @property
    def comparable_planned_reserved_bytes(self) -> int | None:
        """Return what is planned to be reserved in updates; None where the run's allocator reserves by other rules."""
        plan = self.optimizer.plan
        return plan.peak_reserved_bytes if plan is not None and self.allocator_settings is None else None

    @property
    def comparable_planned_process_bytes(self) -> int | None:
        """Return what the process is planned to hold of a CUDA device.

        None also where another part of the run reserved more than its updates, which are planned.
        """
        plan, allocator = self.optimizer.plan, self.measured.allocator if self.measured else None
        if plan is None or self.comparable_planned_reserved_bytes is None:
            return None
        updates = allocator.of_updates if allocator else None
        if allocator is not None and (updates is None or updates.peak_reserved_bytes < allocator.peak_reserved_bytes):
            return None
        return plan.device_total_bytes

    @property
    def comparable_planned_peak_bytes(self) -> int | None:
        """Return the planned peak of the batch whose peak was measured: the profiled one, else the largest.

        None where that is not planned; the peak of one batch says nothing of another's.
        """
        profiled = self.measured.profiled if self.measured else None
        if profiled is not None:
            return profiled.planned_peak_allocated_bytes
        return self.optimizer.plan.peak_allocated_bytes if self.optimizer.plan else None
