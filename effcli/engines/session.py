"""`TrainingSession`: what happens around the updates, the same for every engine."""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import TYPE_CHECKING, Any

from effcli.engines.base import EvalResult, Progress, UpdateResult
from effcli.engines.window_schedule import WindowSchedule
from effcli.errors import InterruptedRunError, TrainingFailedError
from effcli.ranks.group import largest
from effcli.ranks.members import gone
from effcli.units import count

if TYPE_CHECKING:
    import torch


SKIPPED_IN_A_ROW = 30
"""Skipped updates that end a run: torch's scaler halves its scale each time, from 65,536 to less than 0.0001, where
fairseq's gives up too (`min_loss_scale`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """One line of the history; `lr` is the rate that this update used.

    Loss and norm are None where they were not finite, which only the fp16 scaler may let pass. `clip_norm` is the norm
    that the gradient was held to, None without clipping and where the scaler skipped the update. `training_s` are the
    seconds of training from the start of the run to the end of this update, None where they are not known; two updates
    that differ in nothing else are equal.
    """

    update: int
    epoch: float
    loss: float | None
    lr: float
    grad_norm: float | None
    clip_norm: float | None = None
    skipped: bool = False
    training_s: float | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """One evaluation, with where it stands."""

    update: int
    epoch: float
    result: EvalResult


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _not_finite(update: int, what: str) -> TrainingFailedError:
    return TrainingFailedError(
        f"update {update}: {what}; training stopped before any checkpoint of it, earlier ones are intact. Try a lower "
        "--lr, a larger --eps, --max-grad-norm 1, or --precision fp32"
    )


@dataclass(slots=True, kw_only=True)
class TrainingSession:
    """Observer of a run: keeps the history, evaluates, saves, and stops where it is told to.

    The callables are the pipeline's: `read_lr` returns the rate of the update just made, `read_clip_norm` the norm that
    it was held to, `read_samples` the rows it took, `read_training_s` the seconds of training so far, None where they
    are not known, `evaluate` scores the model (None without evaluation data), `save` writes a checkpoint, `prepare` is
    given the scaler of fp16 and sets the state that the first update starts from, `find_broken_gradient` returns the
    name of the first parameter whose gradient is not finite, None where that says nothing. `track_update` is given the
    history after each update, `track_evaluation` each evaluation. `update` counts the updates done, `saved_update` is
    that of the newest checkpoint, None before there is one.
    """

    window_schedule: WindowSchedule
    total_updates: int
    save_every: int | None
    progress: Progress
    prepare: Callable[[torch.amp.GradScaler | None], None]
    read_lr: Callable[[], float]
    read_clip_norm: Callable[[], float | None]
    read_samples: Callable[[], int]
    evaluate: Callable[[], EvalResult] | None
    save: Callable[[TrainingSession], Any]
    find_broken_gradient: Callable[[], str | None] = lambda: None
    read_training_s: Callable[[], float | None] = lambda: None
    track_update: Callable[[list[Update]], None] = lambda history: None
    track_evaluation: Callable[[Evaluation], None] = lambda evaluation: None
    pause_clock: Callable[[], None] = lambda: None
    start_clock: Callable[[], None] = lambda: None
    stop_after: int | None = None
    saved_update: int | None = None
    history: list[Update] = field(default_factory=list)
    evaluations: list[Evaluation] = field(default_factory=list)
    update: int = 0
    stop_signal: int | None = None
    skipped_in_a_row: int = 0
    scaler: torch.amp.GradScaler | None = None

    def train_begin(self, scaler: torch.amp.GradScaler | None = None) -> None:
        """Set the random state and start the clock."""
        self.scaler = scaler
        self.prepare(scaler)
        self.progress.start(first_update=self.update, total_updates=self.total_updates)
        self.start_clock()

    def before_step(self, *, loss: float, grad_norm: float) -> None:
        """Stop before an update that would break the weights.

        Raises:
            TrainingFailedError: loss or gradient norm is not finite, and no fp16 scaler is there to skip the step.
        """
        if self.scaler is None:
            self._check_finite(self.update + 1, loss, grad_norm)

    def after_update(self, result: UpdateResult) -> None:
        """Record one update; evaluate and save where the epoch or the run ends.

        Raises:
            TrainingFailedError: the evaluation loss is not finite, or the fp16 scaler skipped too many updates in a
                row, or let one pass whose loss or gradient norm is not finite.
            InterruptedRunError: a signal asked to stop; the state was saved first.
        """
        self.pause_clock()
        self.update += 1
        self._agree_on_stop()
        self._check_scaler(result)
        self._record(result)
        ends_epoch = self.window_schedule.ends_epoch(self.update)
        last = self.update == self.total_updates
        if ends_epoch or last:
            self.evaluate_once()
        stop = self.stop_signal is not None or self.update == self.stop_after
        due = ends_epoch if self.save_every is None else self.update % self.save_every == 0
        if due or last or stop:
            self.save(self)
            self.saved_update = self.update
        if stop and not last:
            raise InterruptedRunError(
                f"stopped after update {self.update} of {self.total_updates}; the state is saved, "
                "continue with the same command and --resume",
                signal_number=self.stop_signal or signal.SIGINT,
            )
        self.start_clock()

    def _agree_on_stop(self) -> None:
        """Stop where any process of the run was told to, all after the same update."""
        (number,) = largest([self.stop_signal or 0])
        self.stop_signal = int(number) or None

    def _record(self, result: UpdateResult) -> None:
        """Put the update just made into the history, and tell of it."""
        line = Update(
            update=self.update,
            epoch=self.window_schedule.epochs(self.update),
            loss=_finite(result.loss),
            lr=self.read_lr(),
            grad_norm=_finite(result.grad_norm),
            clip_norm=None if result.skipped else self.read_clip_norm(),
            skipped=result.skipped,
            training_s=self.read_training_s(),
        )
        self.history.append(line)
        self.progress.update(
            update=line.update, epoch=line.epoch, loss=result.loss, lr=line.lr, num_samples=self.read_samples()
        )
        self.track_update(self.history)

    def evaluate_once(self) -> None:
        """Evaluate what the last update left, unless that is done or there is nothing to evaluate on.

        Raises:
            TrainingFailedError: the evaluation loss is not finite.
        """
        if self.evaluate is None or (self.evaluations and self.evaluations[-1].update == self.update):
            return
        epoch = self.window_schedule.epochs(self.update)
        evaluation = Evaluation(update=self.update, epoch=epoch, result=self.evaluate())
        if not math.isfinite(evaluation.result.loss):
            raise _not_finite(self.update, f"the evaluation loss is {evaluation.result.loss}")
        self.evaluations.append(evaluation)
        self.progress.evaluation(epoch=epoch, result=evaluation.result)
        self.track_evaluation(evaluation)

    def _check_scaler(self, result: UpdateResult) -> None:
        """Let the fp16 scaler skip steps while it looks for a scale, but neither for ever nor with a broken loss."""
        if self.scaler is None:
            return
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if result.skipped else 0
        if self.skipped_in_a_row == SKIPPED_IN_A_ROW:
            raise TrainingFailedError(
                f"update {self.update}: the fp16 scaler skipped {SKIPPED_IN_A_ROW} updates in a row, whatever the "
                "scale; training stopped. Try --precision bf16 or fp32, or a lower --lr"
            )
        if not result.skipped:
            self._check_finite(self.update, result.loss, result.grad_norm)

    def _check_finite(self, update: int, loss: float, grad_norm: float) -> None:
        if not math.isfinite(loss):
            raise _not_finite(update, f"the loss is {loss}")
        if not math.isfinite(grad_norm):
            name = self.find_broken_gradient()
            where = f" (the first gradient that is not finite is that of {name})" if name else ""
            raise _not_finite(update, f"the gradient norm is {grad_norm}{where}")

    def stop_if_asked(self) -> None:
        """Stop where a signal came and the update that it waits for cannot be made.

        Raises:
            InterruptedRunError: a signal asked to stop.
        """
        if self.stop_signal is not None:
            raise InterruptedRunError(self._stopped_at_once(), signal_number=self.stop_signal)

    def _stopped_at_once(self) -> str:
        where = f"stopped at once after update {self.update} of {self.total_updates}"
        if self.saved_update is None:
            return f"{where}; no state was saved before, --resume starts from the first update"
        later = self.update - self.saved_update
        lost = f"; {count(later, 'later update')} {'is' if later == 1 else 'are'} lost" if later else ""
        return f"{where}; the state after update {self.saved_update} is saved{lost}, continue with --resume"

    @contextmanager
    def stopping_on_signals(self) -> Iterator[None]:
        """Turn SIGINT and SIGTERM into a stop at the next update boundary; a second one stops at once.

        After the last update the first one changes nothing: what is left is to save.
        """
        run = os.getpid()

        def request_stop(number: int, frame: FrameType | None) -> None:
            if os.getpid() != run:  # a process forked from the run inherits this handler
                return
            if self.stop_signal is not None:
                raise InterruptedRunError(self._stopped_at_once(), signal_number=number)
            self.stop_signal = number
            if gone():  # the launcher stops all processes when one has ended, and the next exchange says so
                return
            last = self.update == self.total_updates
            what = "the last update is done, saving what it learnt" if last else "stopping after this update"
            self.progress.note(f"{what}; press again to stop at once")

        previous = {}
        try:
            for number in (signal.SIGINT, signal.SIGTERM):
                previous[number] = signal.signal(number, request_stop)
        except ValueError:  # not the main thread: the caller owns the signals
            pass
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
