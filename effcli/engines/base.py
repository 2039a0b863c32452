"""The contract between the pipeline and the engines: a `Job` goes in, one `after_update` call per update comes out."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

    from effcli.data.batches import EpochLoader
    from effcli.engines.window import WindowLoss
    from effcli.engines.window_schedule import WindowSchedule
    from effcli.spec import Precision, Shard


@dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    """Settings of the loop that every engine needs, already resolved.

    `shard` says what each process holds, `may_lack_gradients` whether the loss may leave out a trained parameter.
    """

    device: torch.device
    precision: Precision
    window_schedule: WindowSchedule
    max_grad_norm: float
    total_updates: int
    seed: int
    shard: Shard = "ddp"
    may_lack_gradients: bool = True
    percentile_clipping: float | None = None

    @property
    def max_norm(self) -> float:
        """Return the largest norm that a step may have whatever came before; infinity where there is none."""
        return self.max_grad_norm if self.max_grad_norm > 0 else float("inf")

    @property
    def clip_norm(self) -> float:
        """Return the norm that the engine clips to; infinity measures the norm without changing the gradient.

        With percentile clipping the engine only measures: `PercentileClipping` knows the limit, at the step.
        """
        return self.max_norm if self.percentile_clipping is None else float("inf")


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateResult:
    """What an engine knows after one update.

    `loss` is the window's loss per item, `grad_norm` the norm before clipping. `skipped` says that the fp16 scaler
    found an overflow and left the weights alone.
    """

    loss: float
    grad_norm: float
    skipped: bool = False


class Observer(Protocol):
    """What happens around the updates: history, evaluation, checkpoints. Implemented by the session."""

    def train_begin(self, scaler: torch.amp.GradScaler | None = None) -> None:
        """Set the random state; called once, after the engine's own preparation and before the first forward.

        `scaler` is the one that scales the loss under fp16; its state belongs to a checkpoint.
        """

    def before_step(self, *, loss: float, grad_norm: float) -> None:
        """Refuse a loss or gradient norm that is not finite; called with the weights still untouched.

        Under fp16 neither is refused: the scaler skips the step and `after_update` says so.
        """

    def after_update(self, result: UpdateResult) -> None:
        """Take note of an update; called at the boundary, with gradients cleared and the schedule advanced."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Everything an engine drives; built by the pipeline, the model already on its device.

    `start_update` is the number of updates already done, 0 unless a run is resumed.
    """

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler
    loader: EpochLoader
    window_loss: WindowLoss
    loop: Loop
    start_update: int
    observer: Observer


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalResult:
    """One evaluation: mean loss per item, and metrics where the task has them."""

    loss: float
    accuracy: float | None = None
    f1: float | None = None
    perplexity: float | None = None


class Progress(Protocol):
    """Shows a run while it goes on; everything it prints goes to stderr."""

    def note(self, text: str) -> None:
        """Say one sentence."""

    def rows(self, what: str, num_rows: int) -> AbstractContextManager[Callable[[int], None]]:
        """Many rows are read; the function that the block gets is told how many of `num_rows` are done."""

    def start(self, *, first_update: int, total_updates: int) -> None:
        """Training begins after `first_update` updates already done."""

    def update(self, *, update: int, epoch: float, loss: float, lr: float, num_samples: int) -> None:
        """One update is done; `num_samples` rows went into it."""

    def evaluation(self, *, epoch: float, result: EvalResult) -> None:
        """An evaluation is done."""

    def stop(self) -> None:
        """Training is over, for whatever reason."""


Batch = dict[str, Any]
