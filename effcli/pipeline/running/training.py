"""One training run from specification to record."""

from __future__ import annotations

import shlex
from contextlib import nullcontext
from dataclasses import dataclass, replace
from datetime import datetime
from typing import TYPE_CHECKING

from effcli.errors import UsageError
from effcli.files import at_home
from effcli.interruption import stop_if_interrupted
from effcli.measure.device_monitor import DeviceMonitor
from effcli.measure.free_memory import free_memory
from effcli.measure.out_of_memory_record import OutOfMemoryFacts
from effcli.measure.record import RunRecord
from effcli.pipeline.agreement import check_same_rows
from effcli.pipeline.build import build
from effcli.pipeline.facts import expectation, planned_record
from effcli.pipeline.prepare import Prepared, prepare
from effcli.pipeline.run_plan import RunPlanner
from effcli.pipeline.running.auto_batch import smaller, with_sizes
from effcli.pipeline.running.guards import explained_out_of_memory
from effcli.pipeline.running.out_of_memory import RunOutOfMemoryError, explained, going_on, loading_facts, where
from effcli.pipeline.running.resuming import Start, find_start
from effcli.pipeline.running.run import Run, RunParts
from effcli.pipeline.verdicts import peak_sentences
from effcli.ranks.group import from_main, is_main
from effcli.recipes import write_recipe
from effcli.run_folder import RECIPE_PURPOSE, RunFolder, check_run_folder, dated_name, open_run_folder
from effcli.run_lock import RunLock
from effcli.spec import RunSpec

if TYPE_CHECKING:
    from effcli.engines.base import Progress


@dataclass(frozen=True, slots=True, kw_only=True)
class _Attempt:
    """A run with one size of its batches; `failures` are those before it, that ran out of memory."""

    prepared: Prepared
    planner: RunPlanner
    start: Start
    failures: tuple[OutOfMemoryFacts, ...]

    @property
    def notes(self) -> tuple[str, ...]:
        """Return what should be said about the order of the rows, and about the attempts before this one."""
        spec, notes = self.prepared.spec, []
        if spec.loop.longest_first and self.start.update == 0:
            rows = min(self.prepared.window_schedule.window, self.prepared.data.train_rows)
            notes.append(f"The first update takes the {rows} longest rows, up to {self.prepared.data.longest} tokens.")
        if self.failures:
            last, origin = self.failures[-1], "the newest checkpoint" if self.start.checkpoint else "the start weights"
            loop = spec.loop
            notes.append(
                f"Memory ran out {where(last)}: beginning again from {origin} with --batch-size {loop.batch_size} "
                f"--accum {loop.accum}, the same {loop.batch_size * loop.accum} rows per update."
            )
        return tuple(notes)

    def explain(self, facts: OutOfMemoryFacts) -> OutOfMemoryFacts:
        """Return facts about running out of memory with what follows: a smaller batch, or what a person can change."""
        if self.prepared.spec.loop.auto_batch:
            data = self.prepared.data
            sizes = smaller(facts.sizes, doing=facts.doing, train_rows=data.train_rows, eval_rows=data.eval_rows)
            if sizes is not None:
                return going_on(facts, sizes)
        return explained(facts, self.prepared, self.planner)


def train(
    spec: RunSpec, *, progress: Progress, resume: bool, overwrite: bool, stop_after_updates: int | None
) -> RunRecord:
    """Train and return the record, which is also saved; a failed or interrupted run leaves a record that says so.

    Raises:
        EffcliError: bad input before the run; during it OutOfMemoryError, TrainingFailedError, InterruptedRunError,
            WriteError.
    """
    if resume and spec.output.out is None:
        raise UsageError("--resume needs --out with the folder of the run to continue")
    out = from_main(spec.output.out or dated_name(datetime.now(), spec.optim.name))
    spec = spec.model_copy(update={"output": spec.output.model_copy(update={"out": out})})
    inputs = {"--model": spec.model.name, "--data": spec.data.train, "--eval-data": spec.data.eval}
    folder = RunFolder(path=at_home(out))
    if is_main():
        folder = check_run_folder(out, resume=resume, overwrite=overwrite, inputs=inputs)
    with RunLock(folder.path) if is_main() else nullcontext() as lock:
        return _attempts(
            spec, folder, lock, progress, resume=resume, overwrite=overwrite, stop_after_updates=stop_after_updates
        )


def _attempts(
    spec: RunSpec,
    folder: RunFolder,
    lock: RunLock | None,
    progress: Progress,
    *,
    resume: bool,
    overwrite: bool,
    stop_after_updates: int | None,
) -> RunRecord:
    """Prepare the run and train, with ever smaller batches where memory runs out; see `train` for what it raises.

    Only the process with the lock, rank 0, writes into the folder.
    """
    prepared = prepare(spec, progress)
    check_same_rows(prepared)
    planner = RunPlanner(prepared)
    failures: tuple[OutOfMemoryFacts, ...] = ()
    while True:
        start = find_start(prepared, folder) if resume else Start()
        prepared = replace(prepared, origin=start.origin)
        attempt = _Attempt(prepared=prepared, planner=planner, start=start, failures=failures)
        try:
            return _run(attempt, folder, lock, progress, overwrite=overwrite, stop_after_updates=stop_after_updates)
        except RunOutOfMemoryError as error:
            if error.facts.next_sizes is None:
                raise
            failures, sizes = (*failures, error.facts), error.facts.next_sizes
        free_memory()  # here, where the error is gone and with it the last reference to the model that failed
        prepared = with_sizes(prepared, sizes)
        resume, overwrite = any(folder.checkpoints.glob("*")), False


def _run(
    attempt: _Attempt,
    folder: RunFolder,
    lock: RunLock | None,
    progress: Progress,
    *,
    overwrite: bool,
    stop_after_updates: int | None,
) -> RunRecord:
    """Build the model and train, with the device watched all the while; see `train` for what it raises."""
    prepared = attempt.prepared
    interval_s = prepared.spec.loop.nvml_interval
    with DeviceMonitor(prepared.device, interval_s=interval_s, baseline=prepared.baseline) as monitor:
        return _built(attempt, folder, lock, progress, monitor, overwrite=overwrite).execute(stop_after_updates)


def _built(
    attempt: _Attempt,
    folder: RunFolder,
    lock: RunLock | None,
    progress: Progress,
    monitor: DeviceMonitor,
    *,
    overwrite: bool,
) -> Run:
    """Build the model, open the folder and write the recipe; see `train` for what it raises."""
    prepared, start = attempt.prepared, attempt.start
    planned = attempt.planner.plan(prepared, progress)
    with explained_out_of_memory(lambda error: loading_facts(prepared, error, planned, monitor.peaks())):
        built = build(prepared, meta=False)
    if start.checkpoint:  # the weights come from the checkpoint, whatever they were made of at first
        built = replace(built, weight_notes=())
    record = planned_record(prepared, built, planned, out=str(prepared.spec.output.out))
    notes = (*start.notes, *attempt.notes)
    record = record.model_copy(update={"notes": (*record.notes, *notes), "out_of_memory": attempt.failures})
    for note in (*built.weight_notes, *built.notes, expectation(record), *peak_sentences(record), *notes):
        progress.note(note)
    stop_if_interrupted()
    run = Run(
        RunParts(
            prepared=prepared,
            built=built,
            folder=folder,
            progress=progress,
            record=record,
            start=start,
            monitor=monitor,
            explain=attempt.explain,
            plan_window=attempt.planner.plan_window,
            may_lack_gradients=prepared.launch.has_many and attempt.planner.may_lack_gradients(prepared),
        )
    )
    if lock is not None:
        open_run_folder(folder, lock, overwrite=overwrite)
        _write_recipe(prepared.spec, folder)
    return run


def _write_recipe(spec: RunSpec, folder: RunFolder) -> None:
    """Write the specification without the folder, so that it can be run again; `--resume` has the folder by `--out`."""
    again = spec.model_copy(update={"output": spec.output.model_copy(update={"out": None})})
    command = f"effcli train --recipe {shlex.quote(str(folder.recipe))}"
    write_recipe(again, folder.recipe, f"{RECIPE_PURPOSE} {spec.output.out}\nCommand: {command}")
