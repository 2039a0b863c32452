"""The folder of one run: refused when it holds something, written so that nothing half done looks complete."""

from __future__ import annotations

import json
import shlex
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from effcli.errors import UsageError, WriteError
from effcli.files import DRAFT, at_home, remove_folder
from effcli.run_lock import LOCK, RunLock
from effcli.units import listed

RECORD = "record.json"
COMPARISON = "comparison.json"
RECIPE = "recipe.yaml"
MODEL = "model"
CHECKPOINTS = "checkpoints"
TRACKING = "tracking"
RUNS = "runs"
"""Folder that run folders are made in when nothing else is said."""
RECIPE_PURPOSE = "Purpose: the run in"
"""What the first comment of a run's recipe begins with: other tools leave a recipe.yaml beside their models too."""

_RECORD_KEY = b'"schema_version"'


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFolder:
    """Names inside a run folder."""

    path: Path

    @property
    def record(self) -> Path:
        """Return the path of the record."""
        return self.path / RECORD

    @property
    def recipe(self) -> Path:
        """Return the path of the resolved specification."""
        return self.path / RECIPE

    @property
    def model(self) -> Path:
        """Return the folder of the trained model and its tokenizer."""
        return self.path / MODEL

    @property
    def checkpoints(self) -> Path:
        """Return the folder of the checkpoints."""
        return self.path / CHECKPOINTS

    @property
    def tracking(self) -> Path:
        """Return the folder of the files that `--track` leaves."""
        return self.path / TRACKING

    @property
    def made_by_run(self) -> tuple[Path, ...]:
        """Return the folders that a run makes in its own."""
        return (self.model, self.checkpoints, self.tracking)

    def remove_results(self) -> None:
        """Remove record and folders of a run; its recipe, which marks the folder as that of a run, stays."""
        self.record.unlink(missing_ok=True)
        for path in self.made_by_run:
            if path.is_dir():
                remove_folder(path)


def is_complete(folder: RunFolder) -> bool:
    """Return whether the run in a folder saved its model and said so in its record, which a kill may prevent."""
    if not folder.model.is_dir() or not folder.record.is_file():
        return False
    return _status(folder.record) == "completed"


def _status(record: Path) -> str:
    """Return how the run of a record ended; an empty text where the file cannot be read as one."""
    try:
        return str(json.loads(record.read_bytes())["status"])
    except (ValueError, KeyError, TypeError):
        return ""


def dated_name(now: datetime, optimizer: str) -> str:
    """Return the default run folder, such as `runs/2030-01-31-12-59-59-adam8bit`."""
    return f"{RUNS}/{now:%Y-%m-%d-%H-%M-%S}-{optimizer.replace(':', '-')}"


def saved_recipe(out: str) -> Path:
    """Return the path of the specification that the run in folder `out` was started with.

    Raises:
        UsageError: the folder holds no run.
    """
    recipe = RunFolder(path=at_home(out)).recipe
    if not recipe.is_file():
        raise UsageError(f"--resume: '{out}' holds no run ({RECIPE} is missing); leave --resume out to start one")
    return recipe


def check_run_folder(out: str, *, resume: bool, overwrite: bool, inputs: Mapping[str, str | None]) -> RunFolder:
    """Return the run folder of `out` without touching it, so that a run that fails early costs nothing.

    `inputs` are the models and data that the run reads, by flag; hub ids and what was not given are passed over.

    Raises:
        UsageError: it holds something and neither `resume` nor `overwrite` was given, or both were; with `overwrite`,
            what it holds is no run, or one of the inputs lies in it.
    """
    folder = RunFolder(path=checked_place(out, resume=resume, overwrite=overwrite))
    if resume:
        saved_recipe(out)
    elif contents(folder.path):
        _refuse_foreign(folder, out)
        if not overwrite:
            raise UsageError(
                f"--out '{out}' is not empty; continue its run with --resume, replace it with --overwrite, "
                "or choose another folder"
            )
        refuse_inputs(folder.path, out, inputs)
    return folder


def checked_place(out: str, *, resume: bool, overwrite: bool) -> Path:
    """Return the path of a folder that is gone on in, replaced or new.

    Raises:
        UsageError: both `resume` and `overwrite` were given, or the path is that of a file.
    """
    path = at_home(out)
    if resume and overwrite:
        raise UsageError("--resume and --overwrite exclude each other; give one")
    if path.is_file():
        raise UsageError(f"--out '{out}' is a file; give a folder")
    return path


def contents(folder: Path) -> list[str]:
    """Return the names in a folder, sorted, without what a kill left half done; none where there is no folder."""
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith(DRAFT)) if folder.is_dir() else []


def _refuse_foreign(folder: RunFolder, out: str) -> None:
    """Raise unless the folder holds a run."""
    if _holds_run(folder):
        return
    raise UsageError(
        f"--out '{out}' holds no run but {listed(contents(folder.path))}, which no run may replace; "
        f"give a new folder, such as --out {shlex.quote(str(Path(out) / 'run'))}"
    )


def _holds_run(folder: RunFolder) -> bool:
    """Return whether the folder holds a recipe or a record that a run wrote."""
    if folder.recipe.is_file() and folder.recipe.read_bytes().startswith(f"# {RECIPE_PURPOSE} ".encode()):
        return True
    return folder.record.is_file() and _RECORD_KEY in folder.record.read_bytes()


def refuse_inputs(folder: Path, out: str, inputs: Mapping[str, str | None]) -> None:
    """Refuse to replace a folder in which a local model or file lies that is read, directly or through a link.

    Raises:
        UsageError: one of the inputs, by flag, lies in it.
    """
    for flag, name in inputs.items():
        if name is None or not (path := at_home(name)).exists():
            continue
        real = path.resolve()
        if any(place.samefile(folder) for place in (real, *real.parents)):
            raise UsageError(
                f"{flag} '{name}' lies inside --out '{out}', which --overwrite replaces; give another --out, "
                f"or move what {flag} names elsewhere first"
            )


def open_run_folder(folder: RunFolder, lock: RunLock, *, overwrite: bool) -> None:
    """Create the folder where needed and prove that it can be written to; with `overwrite`, remove an earlier run.

    Files that are not ours are never removed. The recipe stays until the new one takes its place: a folder without
    one is no run, and would not be replaced after a kill. `lock` is taken here where the folder is new.

    Raises:
        UsageError: another process trains in it.
        WriteError: it cannot be written to.
    """
    try:
        folder.path.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder.path).close()
        lock.take()
        if overwrite:
            folder.remove_results()
        for draft in (*folder.path.glob(f"{DRAFT}*"), *folder.checkpoints.glob(f"{DRAFT}*")):  # left by a kill
            if draft.name != LOCK:
                shutil.rmtree(draft) if draft.is_dir() else draft.unlink()
    except OSError as error:
        raise WriteError(
            f"--out '{folder.path}' cannot be written to: {error.strerror}; choose another folder"
        ) from error
