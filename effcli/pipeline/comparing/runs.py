"""Several runs, one after the other and each in a fresh process, side by side in one record. No torch."""

from __future__ import annotations

import shlex
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from effcli.engines.base import Progress
from effcli.errors import DataError, EffcliError, IncompleteComparisonError
from effcli.files import remove_folder
from effcli.masking import masked
from effcli.measure.comparison_record import Attempt, ComparisonRecord, compared
from effcli.measure.reading import read_record
from effcli.measure.record import RunRecord, Status
from effcli.pipeline.comparing.folder import (
    ComparisonFolder,
    check_comparison_folder,
    open_comparison_folder,
    remove_run,
    saved_comparison,
)
from effcli.pipeline.comparing.fresh_process import Ended, PassedSignals, train_in_fresh_process
from effcli.pipeline.comparing.notes import comparison_notes
from effcli.pipeline.comparing.run_events import SaidOnce
from effcli.pipeline.comparing.settings import Comparison, WantedRun
from effcli.recipes import overlay
from effcli.run_folder import RunFolder, is_complete
from effcli.run_lock import RunLock
from effcli.spec import RunSpec, build_spec

MakeProgress = Callable[[], Progress]
SIGNALLED = 128
"""Exit codes above it say which signal ended a run."""


def compare(
    comparison: Comparison,
    *,
    make_progress: MakeProgress,
    resume: bool = False,
    overwrite: bool = False,
    verbose: bool = False,
) -> ComparisonRecord:
    """Make the runs that are not complete yet, and return the record, which is also saved after each of them.

    Runs that fail, or are stopped by a signal, leave the others' rows; `check_compared` raises for them. Checkpoints of
    a complete run are removed, so that large models do not fill the disk, unless `output.keep` was given.

    Raises:
        UsageError: the folder holds something else, or is in use.
        WriteError: the folder cannot be written to.
    """
    spec, out = comparison.runs[0].spec, comparison.out
    inputs = {"--model": spec.model.name, "--data": spec.data.train, "--eval-data": spec.data.eval}
    folder = check_comparison_folder(out, resume=resume, overwrite=overwrite, inputs=inputs)
    with RunLock(folder.path) as lock:
        used = {wanted.folder for wanted in comparison.runs}
        open_comparison_folder(folder, lock, overwrite=overwrite, used=used)
        saved = saved_comparison(out).attempts if resume else (None,) * len(comparison.runs)
        runs = [_ComparedRun.of(wanted, folder, before) for wanted, before in zip(comparison.runs, saved, strict=True)]
        return _Comparing(comparison, folder, runs, make_progress, verbose).run()


def plan_comparison(comparison: Comparison, *, make_progress: MakeProgress) -> ComparisonRecord:
    """Return the record of runs that are planned and not made, one for each name; nothing is written.

    Raises:
        EffcliError: no run can be planned, all for the same reason.
    """
    from effcli import pipeline

    said: set[str] = set()
    attempts: list[Attempt] = []
    records: list[RunRecord] = []
    errors: list[EffcliError] = []
    for wanted in comparison.runs:
        if wanted.name in (attempt.name for attempt in attempts):  # bytes are the same whatever the seed
            continue
        attempt = Attempt(name=wanted.name, seed=wanted.seed, spec=_asked(wanted))
        try:
            records.append(pipeline.plan(wanted.spec, progress=SaidOnce(make_progress(), said)))
        except EffcliError as error:
            errors.append(error)
            update = {"status": "failed", "failure": masked(str(error)), "exit_code": error.exit_code}
        else:
            update = {"status": "planned", "run": len(records) - 1}
        attempts.append(attempt.model_copy(update=update))
    if errors and len(errors) == len(attempts) and len({str(error) for error in errors}) == 1:
        raise errors[0]
    return compared(attempts, records, status="failed" if errors else "planned", notes=comparison.notes)


def check_compared(record: ComparisonRecord, out: str) -> None:
    """Raise unless every run was completed, or planned where nothing was to be trained.

    Raises:
        IncompleteComparisonError: with the exit code of the first run that was not.
    """
    left = [attempt for attempt in record.attempts if not attempt.ended_well]
    if not left:
        return
    first, code = left[0], left[0].exit_code or 1
    if record.status == "interrupted":  # the signal decides, whatever failed before it
        first = next((attempt for attempt in left if (attempt.exit_code or 0) > SIGNALLED), first)
        code = max(first.exit_code or 0, SIGNALLED + signal.SIGINT)
    done, again = "complete", f"; to complete them: effcli compare --resume --out {shlex.quote(out)}"
    if first.folder is None:  # nothing was to be trained
        done, again = "planned", ""
    raise IncompleteComparisonError(
        f"{len(record.attempts) - len(left)} of {len(record.attempts)} runs are {done}; "
        f"{first.name}: {first.failure or first.status}{again}",
        exit_code=code,
    )


@dataclass(slots=True, kw_only=True)
class _ComparedRun:
    """One run as it stands; `goes_on` says that it has a checkpoint to go on from."""

    wanted: WantedRun
    folder: RunFolder
    attempt: Attempt
    goes_on: bool = False
    record: RunRecord | None = None

    @staticmethod
    def of(wanted: WantedRun, folder: ComparisonFolder, before: Attempt | None) -> _ComparedRun:
        """Return the run as an earlier process left it; one that failed starts afresh."""
        run = _ComparedRun(
            wanted=wanted,
            folder=folder.run(wanted.folder),
            attempt=Attempt(name=wanted.name, seed=wanted.seed, folder=wanted.folder, spec=_asked(wanted)),
        )
        if before is None:
            return run
        run.read()
        run.attempt = before.model_copy(update={"spec": _asked(wanted), "run": None})
        if is_complete(run.folder):
            run.attempt = run.attempt.model_copy(update={"status": "completed", "failure": None, "exit_code": 0})
            run.drop_checkpoints()
        elif before.status != "failed" and run.folder.recipe.is_file() and any(run.folder.checkpoints.glob("*")):
            run.goes_on = True
        return run

    def read(self) -> None:
        """Read the record that the run left, if it did."""
        try:
            self.record = read_record(self.folder.record) if self.folder.record.is_file() else None
        except DataError:
            self.record = None

    def spec(self) -> RunSpec:
        """Return what its process is asked for."""
        output = {"out": str(self.folder.path)}
        keep = {} if "keep" in self.wanted.spec.output.model_fields_set else {"keep": 1}
        return build_spec(
            overlay(_asked(self.wanted), {"loop": {"profile_memory": True}, "output": {**output, **keep}})
        )

    def leave(self, why: str, exit_code: int) -> None:
        """Leave it for another time; what ended it before stays said."""
        if self.attempt.status == "missing":
            self.attempt = self.attempt.model_copy(update={"failure": why, "exit_code": exit_code})

    def drop_checkpoints(self) -> None:
        """Remove the checkpoints of a complete run, which needs them no more, unless it was told how many to keep."""
        if "keep" not in self.wanted.spec.output.model_fields_set:
            remove_folder(self.folder.checkpoints)

    def end(self, ended: Ended) -> None:
        """Take how it ended."""
        complete = is_complete(self.folder)
        status, failure = ("completed", None) if complete else (ended.status, ended.failure or "it left no record")
        if status == "interrupted" and failure:  # how to go on is said for the whole comparison
            failure = failure.partition(", continue with")[0]
        self.attempt = self.attempt.model_copy(
            update={
                "status": "failed" if status == "completed" and not complete else status,
                "failure": failure,
                "exit_code": 0 if complete else ended.exit_code or 1,
                "others_share": ended.others_share,
            }
        )
        self.read()
        if complete:
            self.drop_checkpoints()


@dataclass(slots=True)
class _Comparing:
    """A comparison while it lasts."""

    comparison: Comparison
    folder: ComparisonFolder
    runs: Sequence[_ComparedRun]
    make_progress: MakeProgress
    verbose: bool
    said: set[str] = field(default_factory=set)
    refusals: list[str] = field(default_factory=list)

    def run(self) -> ComparisonRecord:
        """Make the runs that are left, and return the saved record."""
        self._save("interrupted")
        stopped = None
        with PassedSignals() as signals:
            for number, run in enumerate(self.runs, start=1):
                if run.attempt.status == "completed":
                    continue
                stopped = stopped or signals.number
                if stopped is not None:
                    run.leave("not started: the comparison was interrupted", SIGNALLED + stopped)
                elif self._fail_alike():
                    run.leave("not started: others failed before training, for the same reason", 1)
                else:
                    self._make(run, number, signals)
                    self._save("interrupted")
                    if run.attempt.status == "interrupted":
                        stopped = (run.attempt.exit_code or 0) - SIGNALLED
            if all(run.attempt.status == "completed" for run in self.runs):
                return self._save("completed")
            return self._save("failed" if stopped is None else "interrupted")

    def _make(self, run: _ComparedRun, number: int, signals: PassedSignals) -> None:
        progress = SaidOnce(self.make_progress(), self.said)
        progress.note(f"Run {number} of {len(self.runs)}: {run.wanted.name}, seed {run.wanted.seed}.")
        if not run.goes_on and run.folder.path.is_dir():
            remove_run(run.folder, entirely=False)
        run.end(
            train_in_fresh_process(
                run.spec(),
                resume=run.goes_on,
                overwrite=not run.goes_on,
                verbose=self.verbose,
                progress=progress,
                signals=signals,
            )
        )
        if run.attempt.status == "failed":
            progress.note(f"{run.wanted.name}: {run.attempt.failure}")
            self.refusals += [str(run.attempt.failure)] if run.record is None else []

    def _fail_alike(self) -> bool:
        """Return whether two runs failed before training for one reason, which the others will hardly escape."""
        return len(set(self.refusals)) < len(self.refusals)

    def _save(self, status: Status) -> ComparisonRecord:
        ran = [(run, run.record) for run in self.runs if run.record is not None]
        places = {id(run): place for place, (run, _) in enumerate(ran)}
        attempts = [run.attempt.model_copy(update={"run": places.get(id(run))}) for run in self.runs]
        facts = [(run.attempt, record) for run, record in ran]
        notes = (*self.comparison.notes, *comparison_notes(facts))
        record = compared(attempts, [record for _, record in ran], status=status, notes=notes)
        self.folder.save(record)
        return record


def _asked(wanted: WantedRun) -> dict[str, object]:
    return wanted.spec.model_dump(mode="json", exclude_unset=True)
