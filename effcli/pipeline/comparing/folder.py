"""The folder of a comparison: its record, and a folder for each of its runs. No torch."""

from __future__ import annotations

import contextlib
import shlex
import tempfile
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from effcli.errors import UsageError, WriteError
from effcli.files import at_home, write_text
from effcli.measure.comparison_record import ComparisonRecord
from effcli.measure.reading import NotARecordError, read_document
from effcli.run_folder import COMPARISON, RunFolder, checked_place, contents, refuse_inputs
from effcli.run_lock import RunLock
from effcli.units import listed

PAGE = "compare.html"
_ANOTHER = "compare in another folder; effcli report shows the runs in this one, by their folders"


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparisonFolder:
    """Names inside the folder of a comparison."""

    path: Path

    @property
    def record(self) -> Path:
        """Return the path of the record."""
        return self.path / COMPARISON

    def run(self, name: str) -> RunFolder:
        """Return the folder of one run."""
        return RunFolder(path=self.path / name)

    def read(self) -> ComparisonRecord | None:
        """Return the saved record; None where there is none.

        Raises:
            UsageError: what has its name is damaged, of another version, or something else.
        """
        if not self.record.is_file():
            return None
        try:
            found = read_document(self.record)
        except NotARecordError as error:
            raise UsageError(f"--out '{self.path}': {error.reason}; {_ANOTHER}") from error
        if not isinstance(found, ComparisonRecord) or found.command != "compare":
            raise UsageError(f"--out '{self.path}': '{self.record}' is no record of effcli compare; {_ANOTHER}")
        return found

    def save(self, record: ComparisonRecord) -> None:
        """Write the record, whole or not at all.

        Raises:
            WriteError: it cannot be written; an earlier one stays, from which the comparison goes on.
        """
        try:
            write_text(self.record, record.model_dump_json(indent=1) + "\n")
        except WriteError as error:
            if not self.record.is_file():
                raise
            again = f"effcli compare --resume --out {shlex.quote(str(self.path))}"
            raise WriteError(
                f"{error}; the runs are kept: make it writable or make room, then type: {again}"
            ) from error


def saved_comparison(out: str) -> ComparisonRecord:
    """Return the record of the comparison in folder `out`.

    Raises:
        UsageError: the folder holds none that could be completed.
    """
    record = ComparisonFolder(path=at_home(out)).read()
    if record is None:
        raise UsageError(
            f"--resume: '{out}' holds no comparison ({COMPARISON} is missing); leave --resume out to start"
        )
    if not all(attempt.spec and _is_name(attempt.folder) for attempt in record.attempts):
        raise UsageError(f"--resume: '{out}' does not say what was asked of its runs; start anew with --overwrite")
    return record


def check_comparison_folder(
    out: str, *, resume: bool, overwrite: bool, inputs: Mapping[str, str | None]
) -> ComparisonFolder:
    """Return the folder of `out` without touching it; `inputs` are the models and data that are read, by flag.

    A comparison none of whose runs left anything is replaced unasked.

    Raises:
        UsageError: it holds something and neither `resume` nor `overwrite` was given, or both were; with `overwrite`,
            what it holds is no comparison, or one of the inputs lies in it.
    """
    folder = ComparisonFolder(path=checked_place(out, resume=resume, overwrite=overwrite))
    if resume:
        saved_comparison(out)
    elif names := contents(folder.path):
        record = folder.read()
        if record is None:
            raise UsageError(
                f"--out '{out}' holds no comparison but {listed(names)}, which none may replace; give a new folder, "
                f"such as --out {shlex.quote(str(Path(out) / 'compare'))}"
            )
        if not overwrite and _has_results(folder, record):
            raise UsageError(
                f"--out '{out}' is not empty; complete its comparison with --resume, replace it with --overwrite, or "
                "choose another folder"
            )
        refuse_inputs(folder.path, out, inputs)
    return folder


def open_comparison_folder(folder: ComparisonFolder, lock: RunLock, *, resume: bool, used: Collection[str]) -> None:
    """Create the folder where needed and prove that it can be written to; remove earlier runs unless `resume`.

    `used` are the folders of the runs to come, which replace what is there themselves. Files that are not ours are
    never removed. `lock` is taken here where the folder is new.

    Raises:
        UsageError: another process compares in it.
        WriteError: it cannot be written to.
    """
    try:
        folder.path.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder.path).close()
        lock.take()
        if not resume:
            record = folder.read()
            for name in _run_folders(record) if record else ():
                remove_run(folder.run(name), entirely=name not in used)
            (folder.path / PAGE).unlink(missing_ok=True)
    except OSError as error:
        raise WriteError(
            f"--out '{folder.path}' cannot be written to: {error.strerror}; choose another folder"
        ) from error


def remove_run(run: RunFolder, *, entirely: bool) -> None:
    """Remove what a run left; its recipe, which marks the folder as that of a run, and the folder only `entirely`."""
    run.remove_results()
    if entirely:
        run.recipe.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # something is in it that is not ours
            run.path.rmdir()


def _has_results(folder: ComparisonFolder, record: ComparisonRecord) -> bool:
    """Return whether a run of a comparison left a record, a checkpoint or a model."""
    runs = map(folder.run, _run_folders(record))
    return any(path.exists() for run in runs for path in (run.record, *run.made_by_run))


def _run_folders(record: ComparisonRecord) -> set[str]:
    """Return the names of the runs' folders."""
    return {str(attempt.folder) for attempt in record.attempts if _is_name(attempt.folder)}


def _is_name(folder: str | None) -> bool:
    """Return whether the folder of a run lies in that of the comparison, whatever a record says."""
    return bool(folder) and folder not in (".", "..") and Path(str(folder)).name == folder
