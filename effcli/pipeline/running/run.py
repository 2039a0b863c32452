"""`Run`: the objects of one training run while it lasts."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import nullcontext, redirect_stdout
from dataclasses import asdict, dataclass
from importlib import import_module
from typing import TYPE_CHECKING

from effcli.data.batches import EpochLoader, collator, train_loader
from effcli.engines.base import Job, Loop
from effcli.engines.checkpoint import CheckpointStore
from effcli.engines.compiling import compiled
from effcli.engines.random_states import steps_draw_alike
from effcli.engines.session import TrainingSession
from effcli.engines.surroundings import isolated_from_caller
from effcli.engines.window import WindowLoss
from effcli.errors import InterruptedRunError, WriteError
from effcli.files import write_text
from effcli.history.remember import remember
from effcli.masking import masked
from effcli.measure.device_monitor import DeviceMonitor
from effcli.measure.out_of_memory_record import OutOfMemoryFacts
from effcli.measure.record import RunRecord, UpdateFacts
from effcli.memory.sharding.share import is_zero
from effcli.models.kv_cache import without_kv_cache
from effcli.optim.modes import evaluation_weights
from effcli.pipeline.build import Built, build_scheduler
from effcli.pipeline.prepare import Prepared
from effcli.pipeline.running.guards import (
    broken_gradient,
    explained_failure,
    explained_loss,
    explained_out_of_memory,
    explained_write_failure,
)
from effcli.pipeline.running.measured import eval_facts
from effcli.pipeline.running.out_of_memory import facts_of
from effcli.pipeline.running.profiling import PlanWindow
from effcli.pipeline.running.resuming import Start
from effcli.pipeline.running.saving import Saving
from effcli.pipeline.running.scoring import scoring
from effcli.pipeline.running.watchers import Watchers
from effcli.ranks.group import is_main
from effcli.run_folder import RunFolder
from effcli.spec import LoopSpec
from effcli.tracking.tracking import Tracking

if TYPE_CHECKING:
    from effcli.engines.base import Progress


@dataclass(frozen=True, slots=True, kw_only=True)
class RunParts:
    """What a run is made of: what was prepared and built, its folder, who is told how it goes, what is known of it
    before it begins, where it starts from, what watches its device, what explains that memory ran out, what plans
    the profiled update, and whether a trained parameter may get no gradient."""

    prepared: Prepared
    built: Built
    folder: RunFolder
    progress: Progress
    record: RunRecord
    start: Start
    monitor: DeviceMonitor
    explain: Callable[[OutOfMemoryFacts], OutOfMemoryFacts]
    plan_window: PlanWindow
    may_lack_gradients: bool


class Run:
    """The objects of one run while it lasts."""

    def __init__(self, parts: RunParts) -> None:
        prepared, built, start = parts.prepared, parts.built, parts.start
        self._prepared, self._model, self._start, self._explain = prepared, built.model, start, parts.explain
        self._folder, self._progress, self._record = parts.folder, parts.progress, parts.record
        self._monitor = parts.monitor
        self._loop = _loop(prepared, parts.may_lack_gradients)
        self._optimizer = prepared.entry.build(built.groups, built.hyper)
        self._scheduler = build_scheduler(prepared, self._optimizer)
        self._watchers = Watchers(prepared, built.model, self._optimizer, self._loop, start, self._monitor)
        self._store = CheckpointStore(parts.folder.checkpoints, keep=prepared.spec.output.keep, damaged=start.damaged)
        self._first_window = start.first_window or self._loop.window_schedule.window
        self._saving = Saving(
            prepared=prepared,
            model=built.model,
            optimizer=self._optimizer,
            scheduler=self._scheduler,
            folder=parts.folder,
            store=self._store,
            start=start,
            first_window=self._first_window,
        )
        self._window_loss = WindowLoss(prepared.problem.objective, self._watchers.whereabouts.watch)
        self._tracking = Tracking(prepared.spec, parts.folder, parts.progress)
        self._collate = collator(
            prepared.problem,
            prepared.tokenizer,
            prepared.source.padding_side,
            built.decoder_inputs,
            stand_in=prepared.data.train[0],
        )
        self._loader = self._train_loader()
        self._watchers.profiling.choose(self._loader, start.update, parts.plan_window)

    def _train_loader(self) -> EpochLoader:
        loop = self._prepared.spec.loop
        return train_loader(
            self._prepared.data.train,
            self._watchers.profiling.watching(self._collate),
            batch_size=loop.batch_size,
            seed=loop.seed,
            num_workers=loop.num_workers,
            num_longest_first=self._first_window if loop.longest_first else 0,
            part=self._prepared.part,
        )

    def execute(self, stop_after_updates: int | None) -> RunRecord:
        """Run the engine to its end and return the saved record; see `train` for what it raises."""
        prepared, watchers = self._prepared, self._watchers
        session = TrainingSession(
            window_schedule=self._loop.window_schedule,
            total_updates=self._loop.total_updates,
            save_every=prepared.spec.output.save_every,
            progress=self._progress,
            prepare=self._saving.begin,
            read_lr=lambda: watchers.probe.last_lr,
            read_clip_norm=lambda: watchers.clipping.limit,
            read_samples=watchers.meter.rows_since_last,
            read_training_s=lambda: watchers.meter.training_s,
            find_broken_gradient=lambda: broken_gradient(self._model),
            evaluate=scoring(prepared, self._model, self._optimizer, self._collate, self._window_loss),
            save=watchers.gathering(self._save_checkpoint),
            track_update=self._tracking.update,
            track_evaluation=self._tracking.evaluation,
            pause_clock=watchers.profiling.pause_clock,
            start_clock=lambda: watchers.profiling.start_clock(session.update + 1),
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
        steps = steps_draw_alike(self._optimizer, self._loop.seed, lambda: session.update)
        with session.stopping_on_signals(), steps:
            return self._drive(job, session)

    def _drive(self, job: Job, session: TrainingSession) -> RunRecord:
        """Run the engine, save the model, and return the record after writing it."""
        prepared = self._prepared
        engine = import_module(f"effcli.engines.{_engine(prepared.spec.loop)}")
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
                    self._saving.begin(None)
                    session.evaluate_once()
            with (
                explained_write_failure(self._store),
                explained_loss(session),
                evaluation_weights(self._optimizer),
            ):
                self._saving.final_model()
        except BaseException as error:
            self._record_failure(session, error)
            raise
        finally:
            self._progress.stop()
            self._watchers.detach()
        return self._finish(session, "completed", None)

    def _save_checkpoint(self, session: TrainingSession) -> None:
        self._saving.checkpoint(session, self._watchers.profiling.facts)

    def _out_of_memory(self, session: TrainingSession, error: str) -> OutOfMemoryFacts:
        """Return what is known about memory that ran out, and keep it for the record.

        Raises:
            InterruptedRunError: the run would begin again, but a signal has asked to stop.
        """
        self._watchers.profiling.detach()
        facts = facts_of(
            self._prepared,
            error,
            updates_done=session.update,
            whereabouts=self._watchers.whereabouts,
            peaks=self._monitor.peaks(),
        )
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
        seen = self._watchers.seen(
            session,
            num_updates=session.update - self._start.update,
            predicted_state_bytes=self._record.optimizer.state_bytes,
        )
        record = self._record.model_copy(
            update={
                "history": tuple(UpdateFacts(**asdict(line)) for line in session.history),
                "eval": tuple(eval_facts(line) for line in session.evaluations),
                "measured": seen.measured,
                "throughput": seen.throughput,
                "notes": (*self._record.notes, *seen.notes, *self._tracking.notes),
                "status": status,
                "failure": failure,
            }
        )
        try:
            self._write(record)
        finally:
            known = self._tracking.notes
            self._tracking.finish(record)
        for note in seen.notes:
            self._progress.note(note)
        if late := self._tracking.notes[len(known) :]:
            record = record.model_copy(update={"notes": (*record.notes, *late)})
            self._write(record)
        if is_main() and (not_kept := remember(record)):
            self._progress.note(not_kept)
        return record

    def _write(self, record: RunRecord) -> None:
        if not is_main():
            return
        write_text(self._folder.record, record.model_dump_json(indent=1) + "\n")


def _engine(loop: LoopSpec) -> str:
    """Return the module that drives a run: under a mode of DeepSpeed its own loop, which accelerate prepares."""
    return "deepspeed" if is_zero(loop.shard) else loop.engine


def _loop(prepared: Prepared, may_lack_gradients: bool) -> Loop:
    loop = prepared.spec.loop
    return Loop(
        device=prepared.device,
        precision=loop.precision,
        window_schedule=prepared.window_schedule,
        max_grad_norm=loop.max_grad_norm,
        total_updates=prepared.total_updates,
        seed=loop.seed,
        shard=loop.shard,
        may_lack_gradients=may_lack_gradients,
        percentile_clipping=loop.percentile_clipping,
    )
