"""The folder of one run: refused when it holds something, written so that nothing half done looks complete."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from effcli.errors import UsageError, WriteError
from effcli.files import DRAFT

RECORD = "record.json"
RECIPE = "recipe.yaml"
MODEL = "model"
CHECKPOINTS = "checkpoints"


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


def dated_name(now: datetime, optimizer: str) -> str:
    """Return the default run folder, such as `runs/2030-01-31-12-59-59-adam8bit`."""
    return f"runs/{now:%Y-%m-%d-%H-%M-%S}-{optimizer.replace(':', '-')}"


def saved_recipe(out: str) -> Path:
    """Return the path of the specification that the run in folder `out` was started with.

    Raises:
        UsageError: the folder holds no run.
    """
    recipe = RunFolder(path=Path(out).expanduser()).recipe
    if not recipe.is_file():
        raise UsageError(f"--resume: '{out}' holds no run ({RECIPE} is missing); leave --resume out to start one")
    return recipe


def check_run_folder(out: str, *, resume: bool, overwrite: bool) -> RunFolder:
    """Return the run folder of `out` without touching it, so that a run that fails early costs nothing.

    Raises:
        UsageError: it holds something and neither `resume` nor `overwrite` was given, or both were.
    """
    folder = RunFolder(path=Path(out).expanduser())
    if resume and overwrite:
        raise UsageError("--resume and --overwrite exclude each other; give one")
    if folder.path.is_file():
        raise UsageError(f"--out '{out}' is a file; give a folder")
    if resume:
        saved_recipe(out)
    elif not overwrite and folder.path.is_dir() and any(folder.path.iterdir()):
        raise UsageError(
            f"--out '{out}' is not empty; continue its run with --resume, replace it with --overwrite, "
            "or choose another folder"
        )
    return folder


def open_run_folder(folder: RunFolder, *, overwrite: bool) -> None:
    """Create the folder where needed and prove that it can be written to; with `overwrite`, remove an earlier run.

    Files that are not ours are never removed.

    Raises:
        WriteError: it cannot be written to.
    """
    try:
        folder.path.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder.path).close()
        if overwrite:
            for path in (folder.record, folder.recipe):
                path.unlink(missing_ok=True)
            for path in (folder.model, folder.checkpoints):
                shutil.rmtree(path, ignore_errors=True)
        for draft in (*folder.path.glob(f"{DRAFT}*"), *folder.checkpoints.glob(f"{DRAFT}*")):  # left by a kill
            shutil.rmtree(draft) if draft.is_dir() else draft.unlink()
    except OSError as error:
        raise WriteError(
            f"--out '{folder.path}' cannot be written to: {error.strerror}; choose another folder"
        ) from error
