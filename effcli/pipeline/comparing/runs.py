"""Several runs, one after the other and each in a fresh process, side by side in one record. No torch."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from effcli.data.files import refuse_missing
from effcli.errors import DataError, DeviceError, MissingExtraError, TrainingFailedError, UnreachableError, UsageError
from effcli.files import remove_folder
from effcli.measure.comparison_record import Attempt, ComparisonRecord, compared
from effcli.measure.reading import read_record
from effcli.measure.record import RunRecord, Status
from effcli.models.source import local_config_file
from effcli.pipeline.comparing.folder import (
    ComparisonFolder,
    check_comparison_folder,
    open_comparison_folder,
    remove_run,
    saved_comparison,
)
from effcli.pipeline.comparing.fresh_process import Ended, PassedSignals, train_in_fresh_process
from effcli.pipeline.comparing.notes import comparison_notes
from effcli.pipeline.comparing.run_events import MakeProgress, SaidOnce
from effcli.pipeline.comparing.settings import Comparison, WantedRun
from effcli.pipeline.comparing.verdict import SIGNALLED
from effcli.recipes import overlay
from effcli.run_folder import RunFolder, is_complete
from effcli.run_lock import RunLock
from effcli.spec import RunSpec, build_spec

_OWN_WAY = re.compile(r", (then )?continue with (the same command and )?--resume$")
"""How a failure ends that tells a run of its own how to go on."""
_REFUSALS = {error.exit_code for error in (UsageError, DataError, MissingExtraError, DeviceError, UnreachableError)}
"""Exit codes of what is refused before training, whatever the optimizer takes."""


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
        UsageError: the folder holds something else, or is in use; or that of the model is not there.
        DataError: a file of data is not there.
        WriteError: the folder cannot be written to.
    """
    spec, out = comparison.runs[0].spec, comparison.out
    inputs = {"--model": spec.model.name, "--data": spec.data.train, "--eval-data": spec.data.eval}
    folder = check_comparison_folder(out, resume=resume, overwrite=overwrite, inputs=inputs)
    if not (resume and all(is_complete(folder.run(wanted.folder)) for wanted in comparison.runs)):
        _refuse_missing(spec)
    with RunLock(folder.path) as lock:
        used = {wanted.folder for wanted in comparison.runs}
        open_comparison_folder(folder, lock, resume=resume, used=used)
        saved = saved_comparison(out).attempts if resume else (None,) * len(comparison.runs)
        runs = [_ComparedRun.of(wanted, folder, before) for wanted, before in zip(comparison.runs, saved, strict=True)]
        return _Comparing(comparison, folder, runs, make_progress, verbose).run()


def _refuse_missing(spec: RunSpec) -> None:
    """Raise where files are not there, for which every run would be refused, one after the other and seconds later."""
    if spec.model.name is not None:
        local_config_file(spec.model.name)
    for name in filter(None, (spec.data.train, spec.data.eval)):
        refuse_missing(name)


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
        """Return the run as an earlier process left it.

        It goes on from its newest checkpoint, unless its training failed: that would lead there again, where it does
        not come from the checkpoint itself.

        Raises:
            DataError: its record is that of a complete run and cannot be read, as one of another version.
        """
        run = _ComparedRun(
            wanted=wanted,
            folder=folder.run(wanted.folder),
            attempt=Attempt(name=wanted.name, seed=wanted.seed, folder=wanted.folder, spec=wanted.asked),
        )
        if before is None:
            return run
        anew = run.attempt
        run.attempt = before.model_copy(update={"spec": wanted.asked, "run": None})
        if is_complete(run.folder):
            run.record = read_record(run.folder.record)
            run.attempt = run.attempt.model_copy(update={"status": "completed", "failure": None, "exit_code": 0})
            run.drop_checkpoints()
            return run
        if before.status == "completed":  # its model or its record is gone
            run.attempt = anew
        run.read()
        has_checkpoint = run.folder.recipe.is_file() and any(run.folder.checkpoints.glob("*"))
        run.goes_on = has_checkpoint and before.exit_code != TrainingFailedError.exit_code
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
        return build_spec(overlay(self.wanted.asked, {"loop": {"profile_memory": True}, "output": {**output, **keep}}))

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
        if failure:  # how to go on is said for the whole comparison
            failure = _OWN_WAY.sub("", failure)
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
            self.refusals += [str(run.attempt.failure)] if run.attempt.exit_code in _REFUSALS else []

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
