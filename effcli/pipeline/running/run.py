"""`Run`: the objects of one training run while it lasts."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import nullcontext, redirect_stdout
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from transformers import set_seed

from effcli.data.batches import collator, train_loader
from effcli.engines.base import Job, Loop
from effcli.engines.checkpoint import CheckpointStore, restore
from effcli.engines.clipping import PercentileClipping, clipping_notes
from effcli.engines.compiling import compiled
from effcli.engines.session import TrainingSession
from effcli.engines.surroundings import isolated_from_caller
from effcli.engines.window import WindowLoss
from effcli.errors import InterruptedRunError, WriteError
from effcli.files import write_folder, write_text
from effcli.masking import masked
from effcli.measure.optimizer_size import inspect_optimizer, state_notes
from effcli.measure.peak import StepProbe, reset_cuda_peak
from effcli.measure.precision import WeightChanges, precision_notes
from effcli.measure.record import OutOfMemoryFacts, RunRecord, UpdateFacts
from effcli.measure.throughput import ThroughputMeter
from effcli.measure.whereabouts import Whereabouts
from effcli.models.kv_cache import without_kv_cache
from effcli.models.lora import save_model
from effcli.optim.learning_rate import current_lr
from effcli.optim.modes import evaluation_weights
from effcli.pipeline.build import Built, build_scheduler
from effcli.pipeline.prepare import Prepared
from effcli.pipeline.running.guards import (
    broken_gradient,
    explained_failure,
    explained_out_of_memory,
    explained_saving,
    explained_write_failure,
    refuse_weights_that_are_not_finite,
)
from effcli.pipeline.running.measured import eval_facts, measured
from effcli.pipeline.running.out_of_memory import facts_of
from effcli.pipeline.running.profiling import PlanWindow, Profiling
from effcli.pipeline.running.resuming import Start, saved_state
from effcli.pipeline.running.scoring import scoring
from effcli.run_folder import RunFolder
from effcli.tracking.tracking import Tracking

if TYPE_CHECKING:
    import torch

    from effcli.engines.base import Progress


class Run:
    """The objects of one run while it lasts."""

    def __init__(
        self,
        prepared: Prepared,
        built: Built,
        folder: RunFolder,
        progress: Progress,
        record: RunRecord,
        start: Start,
        explain: Callable[[OutOfMemoryFacts], OutOfMemoryFacts],
        plan_window: PlanWindow,
    ) -> None:
        spec, model = prepared.spec, built.model
        self._prepared, self._model, self._folder, self._progress = prepared, model, folder, progress
        self._record, self._explain = record, explain
        self._collate = collator(
            prepared.problem, prepared.tokenizer, prepared.source.padding_side, built.decoder_inputs
        )
        self._optimizer = prepared.entry.build(built.groups, built.hyper)
        self._scheduler = build_scheduler(prepared, self._optimizer)
        self._probe = StepProbe(model, self._optimizer, current_lr)
        before_s = start.history[-1].training_s if start.history else 0.0
        self._meter = ThroughputMeter(model, time.perf_counter, before_s=before_s)
        self._whereabouts = Whereabouts(model, self._optimizer)
        self._weight_changes = WeightChanges(model, self._optimizer)
        self._store = CheckpointStore(folder.checkpoints, keep=spec.output.keep, damaged=start.damaged)
        self._window_loss = WindowLoss(prepared.problem.objective)
        self._loop = Loop(
            device=prepared.device,
            precision=spec.loop.precision,
            window_schedule=prepared.window_schedule,
            max_grad_norm=spec.loop.max_grad_norm,
            total_updates=prepared.total_updates,
            seed=spec.loop.seed,
            percentile_clipping=spec.loop.percentile_clipping,
        )
        self._clipping = PercentileClipping(model, self._optimizer, self._loop)
        self._clipping.remember(start.history)
        self._profiling = Profiling(prepared, model, self._optimizer, self._meter, start.profiled)
        watchers = (self._probe, self._meter, self._whereabouts, self._weight_changes, self._clipping)
        self._watchers = (self._profiling, *watchers)
        self._tracking = Tracking(spec, folder, progress)
        self._start = start
        self._first_window = start.first_window or self._loop.window_schedule.window
        self._loader = train_loader(
            prepared.data.train,
            self._profiling.watching(self._collate),
            batch_size=spec.loop.batch_size,
            seed=spec.loop.seed,
            num_workers=spec.loop.num_workers,
            num_longest_first=self._first_window if spec.loop.longest_first else 0,
        )
        self._profiling.choose(self._loader, start.update, plan_window)

    def execute(self, stop_after_updates: int | None) -> RunRecord:
        """Run the engine to its end and return the saved record; see `train` for what it raises."""
        prepared = self._prepared
        session = TrainingSession(
            window_schedule=self._loop.window_schedule,
            total_updates=self._loop.total_updates,
            save_every=prepared.spec.output.save_every,
            progress=self._progress,
            prepare=self._begin,
            read_lr=lambda: self._probe.last_lr,
            read_clip_norm=lambda: self._clipping.limit,
            read_samples=self._meter.rows_since_last,
            read_training_s=lambda: self._meter.training_s,
            find_broken_gradient=lambda: broken_gradient(self._model),
            evaluate=scoring(prepared, self._model, self._optimizer, self._collate, self._window_loss),
            save=self._save_checkpoint,
            track_update=self._tracking.update,
            track_evaluation=self._tracking.evaluation,
            pause_clock=self._profiling.pause_clock,
            start_clock=lambda: self._profiling.start_clock(session.update + 1),
            stop_after=stop_after_updates,
            update=self._start.update,
            saved_update=self._start.update if self._start.checkpoint else None,
            history=list(self._start.history),
            evaluations=list(self._start.evaluations),
        )
        job = Job(
            model=self._model,
            optimizer=self._optimizer,
            scheduler=self._scheduler,
            loader=self._loader,
            window_loss=self._window_loss,
            loop=self._loop,
            start_update=self._start.update,
            observer=session,
        )
        with session.stopping_on_signals():
            return self._drive(job, session)

    def _drive(self, job: Job, session: TrainingSession) -> RunRecord:
        """Run the engine, save the model, and return the record after writing it."""
        prepared = self._prepared
        engine = import_module(f"effcli.engines.{prepared.spec.loop.engine}")
        reset_cuda_peak(prepared.device)
        try:
            with (
                explained_write_failure(self._store),
                without_kv_cache(self._model),
                isolated_from_caller(prepared.device),
                compiled(self._model) if prepared.spec.loop.compile else nullcontext(),
                explained_failure(session),
                explained_out_of_memory(lambda error: self._out_of_memory(session, error)),
            ):
                self._tracking.start(updates_done=session.update, total_updates=self._loop.total_updates)
                if session.update < self._loop.total_updates:
                    with redirect_stdout(sys.stderr):  # some optimizers print, which would spoil a JSON document
                        engine.run(job)
                else:
                    self._begin(None)
                    session.evaluate_once()
            with explained_write_failure(self._store), evaluation_weights(self._optimizer):
                refuse_weights_that_are_not_finite(self._model)
                write_folder(self._folder.model, self._save_model)
        except BaseException as error:
            self._record_failure(session, error)
            raise
        finally:
            self._progress.stop()
            for watcher in self._watchers:
                watcher.detach()
        return self._finish(session, "completed", None)

    def _begin(self, scaler: torch.amp.GradScaler | None) -> None:
        """Set the state that the first update starts from.

        Called after the engine's preparation, which in accelerate casts the optimizer's state once more.
        """
        if self._start.checkpoint is None:
            set_seed(self._prepared.spec.loop.seed)
        else:
            restore(
                self._start.checkpoint,
                model=self._model,
                optimizer=self._optimizer,
                scheduler=self._scheduler,
                scaler=scaler,
            )

    def _save_checkpoint(self, session: TrainingSession) -> None:
        refuse_weights_that_are_not_finite(self._model)
        with explained_saving(session.update):
            self._store.save(
                saved_state(self._prepared, session, first_window=self._first_window, profiled=self._profiling.facts),
                model=self._model,
                optimizer=self._optimizer,
                scheduler=self._scheduler,
                scaler=session.scaler,
            )

    def _save_model(self, path: Path) -> None:
        save_model(self._model, path, self._folder.model)
        self._prepared.tokenizer.save_pretrained(path)

    def _out_of_memory(self, session: TrainingSession, error: str) -> OutOfMemoryFacts:
        """Return what is known about memory that ran out, and keep it for the record.

        Raises:
            InterruptedRunError: the run would begin again, but a signal has asked to stop.
        """
        self._profiling.detach()
        facts = facts_of(self._prepared, error, updates_done=session.update, whereabouts=self._whereabouts)
        facts = self._explain(facts)
        self._record = self._record.model_copy(update={"out_of_memory": (*self._record.out_of_memory, facts)})
        if facts.next_sizes is not None:
            session.stop_if_asked()
        return facts

    def _record_failure(self, session: TrainingSession, error: BaseException) -> None:
        """Write the record of a run that did not end; the first error stays the one that is raised."""
        interrupted = isinstance(error, InterruptedRunError | KeyboardInterrupt)
        try:
            failure = masked(str(error)) or type(error).__name__
            self._finish(session, "interrupted" if interrupted else "failed", failure)
        except WriteError as second:
            self._progress.note(f"The record of the failed run is missing as well: {second}.")

    def _finish(self, session: TrainingSession, status: str, failure: str | None) -> RunRecord:
        """Return the final record after writing it."""
        updates = session.update - self._start.update
        size = inspect_optimizer(self._optimizer)
        predicted_bytes = self._record.optimizer.state_bytes if updates else 0
        unused = state_notes(size, without_gradient=self._probe.without_gradient, predicted_bytes=predicted_bytes)
        facts = None
        if updates:
            facts = measured(
                session,
                device=self._prepared.device,
                size=size,
                probe=self._probe,
                weight_changes=self._weight_changes,
                profiled=self._profiling.facts,
            )
        clipped = clipping_notes(self._loop, session.history)
        notes = (*unused, *clipped, *precision_notes(facts), *self._profiling.notes)
        record = self._record.model_copy(
            update={
                "history": tuple(UpdateFacts(**asdict(line)) for line in session.history),
                "eval": tuple(eval_facts(line) for line in session.evaluations),
                "measured": facts,
                "throughput": self._meter.result(updates) if updates else None,
                "notes": (*self._record.notes, *notes, *self._tracking.notes),
                "status": status,
                "failure": failure,
            }
        )
        try:
            self._write(record)
        finally:
            known = self._tracking.notes
            self._tracking.finish(record)
        for note in notes:
            self._progress.note(note)
        if late := self._tracking.notes[len(known) :]:
            record = record.model_copy(update={"notes": (*record.notes, *late)})
            self._write(record)
        return record

    def _write(self, record: RunRecord) -> None:
        write_text(self._folder.record, record.model_dump_json(indent=1) + "\n")
