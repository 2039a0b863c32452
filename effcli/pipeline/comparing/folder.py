"""The folder of a comparison: its record, and a folder for each of its runs. No torch."""

from __future__ import annotations

import contextlib
import shlex
import tempfile
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from effcli.errors import UsageError, WriteError
from effcli.files import DRAFT, remove_folder, write_text
from effcli.measure.comparison_record import ComparisonRecord
from effcli.run_folder import RunFolder, refuse_inputs
from effcli.run_lock import RunLock
from effcli.units import listed

RECORD = "comparison.json"
PAGE = "compare.html"


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparisonFolder:
    """Names inside the folder of a comparison."""

    path: Path

    @property
    def record(self) -> Path:
        """Return the path of the record."""
        return self.path / RECORD

    def run(self, name: str) -> RunFolder:
        """Return the folder of one run."""
        return RunFolder(path=self.path / name)

    def save(self, record: ComparisonRecord) -> None:
        """Write the record, whole or not at all.

        Raises:
            WriteError: it cannot be written.
        """
        write_text(self.record, record.model_dump_json(indent=1) + "\n")


def saved_comparison(out: str) -> ComparisonRecord:
    """Return the record of the comparison in folder `out`.

    Raises:
        UsageError: the folder holds none that could be completed.
    """
    record = _read(ComparisonFolder(path=Path(out).expanduser()))
    if record is None:
        raise UsageError(f"--resume: '{out}' holds no comparison ({RECORD}); leave --resume out to start one")
    if not all(attempt.spec and _is_name(attempt.folder) for attempt in record.attempts):
        raise UsageError(f"--resume: '{out}' does not say what was asked of its runs; start anew with --overwrite")
    return record


def check_comparison_folder(
    out: str, *, resume: bool, overwrite: bool, inputs: Mapping[str, str | None]
) -> ComparisonFolder:
    """Return the folder of `out` without touching it; `inputs` are the models and data that are read, by flag.

    Raises:
        UsageError: it holds something and neither `resume` nor `overwrite` was given, or both were; with `overwrite`,
            what it holds is no comparison, or one of the inputs lies in it.
    """
    folder = ComparisonFolder(path=Path(out).expanduser())
    if resume and overwrite:
        raise UsageError("--resume and --overwrite exclude each other; give one")
    if folder.path.is_file():
        raise UsageError(f"--out '{out}' is a file; give a folder")
    if resume:
        saved_comparison(out)
    elif names := _contents(folder.path):
        if _read(folder) is None:
            raise UsageError(
                f"--out '{out}' holds no comparison but {listed(names)}, which none may replace; give a new folder, "
                f"such as --out {shlex.quote(str(Path(out) / 'compare'))}"
            )
        if not overwrite:
            raise UsageError(
                f"--out '{out}' is not empty; complete its comparison with --resume, replace it with --overwrite, or "
                "choose another folder"
            )
        refuse_inputs(folder.path, out, inputs)
    return folder


def open_comparison_folder(folder: ComparisonFolder, lock: RunLock, *, overwrite: bool, used: Collection[str]) -> None:
    """Create the folder where needed and prove that it can be written to; with `overwrite`, remove earlier runs.

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
        record = _read(folder) if overwrite else None
        for name in {str(attempt.folder) for attempt in record.attempts if _is_name(attempt.folder)} if record else ():
            remove_run(folder.run(name), entirely=name not in used)
        if overwrite:
            (folder.path / PAGE).unlink(missing_ok=True)
    except OSError as error:
        raise WriteError(
            f"--out '{folder.path}' cannot be written to: {error.strerror}; choose another folder"
        ) from error


def remove_run(run: RunFolder, *, entirely: bool) -> None:
    """Remove what a run left; its recipe, which marks the folder as that of a run, and the folder only `entirely`."""
    run.record.unlink(missing_ok=True)
    for path in (run.model, run.checkpoints):
        if path.is_dir():
            remove_folder(path)
    if entirely:
        run.recipe.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # something is in it that is not ours
            run.path.rmdir()


def _contents(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.iterdir() if not entry.name.startswith(DRAFT)) if path.is_dir() else []


def _read(folder: ComparisonFolder) -> ComparisonRecord | None:
    """Return the saved record; None where there is none."""
    from pydantic import ValidationError

    try:
        record = ComparisonRecord.model_validate_json(folder.record.read_bytes())
    except (OSError, ValidationError):
        return None
    return record if record.command == "compare" else None


def _is_name(folder: str | None) -> bool:
    """Return whether the folder of a run lies in that of the comparison, whatever a record says."""
    return bool(folder) and folder not in (".", "..") and Path(str(folder)).name == folder
