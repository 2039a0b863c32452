"""Checkpoints: whole updates only, written aside and renamed, each file with its checksum."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch

from effcli.engines.base import EvalResult
from effcli.engines.random_states import random_state, restore_random_state
from effcli.engines.session import Evaluation, Update
from effcli.engines.whole_tensors import load_state, load_weights, save_weights, whole_state, whole_weights
from effcli.engines.window_schedule import Position
from effcli.errors import TrainingFailedError, kind_and_line
from effcli.files import remove_folder, write_folder
from effcli.ranks.agreeing import on_all
from effcli.ranks.group import gathered, is_main

WEIGHTS = "model.safetensors"
TRAINING = "training.pt"
PROGRESS = "progress.json"
MANIFEST = "manifest.json"
FILES = (WEIGHTS, TRAINING, PROGRESS)
PREFIX = "update-"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointProgress:
    """What a checkpoint holds beside tensors: where it stands, specification, rows, length, history.

    `origin` is where the run began to take windows of its size, `first_window` the rows of its very first one. The
    checksums tell other rows and another model apart. The gradient norms in `history` are all that percentile clipping
    goes on from. `profiled` is the profiled update so far, as the record has it. `world_size` counts the processes; a
    checkpoint that does not say it is of one.
    """

    update: int
    spec: dict[str, dict[str, Any]]
    train_rows: int
    rows_fingerprint: str
    config_fingerprint: str
    origin: Position
    first_window: int
    total_updates: int
    history: tuple[Update, ...]
    evaluations: tuple[Evaluation, ...]
    profiled: dict[str, Any] | None = None
    world_size: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The newest intact checkpoint, its progress, and the damaged newer ones that were passed over, newest first."""

    path: Path
    progress: CheckpointProgress
    damaged: tuple[Path, ...]


class CheckpointStore:
    """The checkpoints of one run folder; keeps the newest `keep`.

    `damaged` are those that a resumed run passed over: they go as soon as a new one is written, and never count.
    """

    def __init__(self, folder: Path, *, keep: int, damaged: Sequence[Path] = ()) -> None:
        self._folder = folder
        self._keep = keep
        self._damaged = damaged

    def save(
        self,
        saved: CheckpointProgress,
        *,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        scheduler: torch.optim.lr_scheduler.LRScheduler,
        scaler: torch.amp.GradScaler | None = None,
    ) -> Path:
        """Write the state after `saved.update`; the folder appears under its name only when it is complete.

        `scaler` is the one of fp16, whose scale and age decide which updates are skipped. All processes call it, each
        gives what it holds, and rank 0 writes whole tensors.

        Raises:
            WriteError: the disk is full or the folder is not writable; earlier checkpoints are untouched.
        """
        weights = whole_weights(model)
        training = {
            "optimizer": whole_state(optimizer),
            "scheduler": scheduler.state_dict(),
            "random": gathered(random_state()),
            "scaler": None if scaler is None else scaler.state_dict(),
        }
        final = self._folder / f"{PREFIX}{saved.update:08d}"
        with on_all():
            if is_main():
                self._write(final, saved, weights, training)
        return final

    def _write(self, final: Path, saved: CheckpointProgress, weights: dict[str, Any], training: dict[str, Any]) -> None:
        def fill(folder: Path) -> None:
            save_weights(weights, folder / WEIGHTS)
            with (folder / TRAINING).open("wb") as file:  # given a path, torch keeps the system's reason to itself
                torch.save(training, file)
            (folder / PROGRESS).write_text(json.dumps(asdict(saved)), encoding="utf-8")
            checksums = {name: _checksum(folder / name) for name in FILES}
            (folder / MANIFEST).write_text(json.dumps(checksums, indent=1), encoding="utf-8")

        write_folder(final, fill)
        damaged, self._damaged = [path for path in self._damaged if path != final and path.exists()], ()
        for path in damaged:
            remove_folder(path)
        for path in self.paths()[: -self._keep]:
            remove_folder(path)

    def paths(self) -> list[Path]:
        """Return the checkpoints, oldest first; only complete ones ever had this name."""
        return sorted(self._folder.glob(f"{PREFIX}*"))

    def newest_intact_path(self) -> Path | None:
        """Return the newest checkpoint whose checksums hold; None where none is intact."""
        return next((path for path in reversed(self.paths()) if _intact(path)), None)

    def newest_intact(self) -> Found | None:
        """Return the newest checkpoint whose checksums hold; None where there is no checkpoint.

        Raises:
            TrainingFailedError: all checkpoints are damaged, or the intact one is of another version of effcli.
        """
        path, paths = self.newest_intact_path(), self.paths()
        if path is not None:
            damaged = tuple(reversed(paths[paths.index(path) + 1 :]))
            return Found(path=path, progress=_read_progress(path / PROGRESS), damaged=damaged)
        if paths:
            raise TrainingFailedError(f"every checkpoint in '{self._folder}' is damaged; start again with --overwrite")
        return None


def _read_progress(path: Path) -> CheckpointProgress:
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        evaluations = [{**line, "result": EvalResult(**line["result"])} for line in fields["evaluations"]]
        read = {
            "spec": {name: dict(section) for name, section in fields["spec"].items()},
            "origin": Position(**fields["origin"]),
            "history": tuple(Update(**line) for line in fields["history"]),
            "evaluations": tuple(Evaluation(**line) for line in evaluations),
        }
        return CheckpointProgress(**{**fields, **read})
    except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
        raise TrainingFailedError(
            f"'{path.parent}' was written by another version of effcli, which this one cannot go on from; use that "
            "version, or start again with --overwrite"
        ) from error


def restore(
    path: Path,
    *,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    scheduler: torch.optim.lr_scheduler.LRScheduler,
    scaler: torch.amp.GradScaler | None = None,
    seed: int = 0,
) -> None:
    """Load weights, optimizer, schedule, random state and scaler, each tensor in the dtype it was saved in.

    Each process takes its shares of whole tensors, and exchanges nothing. One whose random state was not saved, since
    there are more processes now, starts with one that follows from `seed`, the update and its rank.

    Raises:
        TrainingFailedError: the weights are not those of this model, or what should be tensors and plain values is
            something else, which is never loaded, or a file cannot be read.
    """
    try:
        load_weights(model, path / WEIGHTS)
        training: dict[str, Any] = torch.load(path / TRAINING, map_location="cpu", weights_only=True)
    except (RuntimeError, UnpicklingError, OSError) as error:
        raise TrainingFailedError(
            f"checkpoint '{path}' was not loaded: {_why_not_loaded(error)}; restore what the run was started with, or "
            "start again with --overwrite"
        ) from error
    load_state(optimizer, training["optimizer"])
    scheduler.load_state_dict(training["scheduler"])
    _renew_rates(optimizer, scheduler)
    if scaler is not None:
        scaler.load_state_dict(training["scaler"])
    restore_random_state(training["random"], seed=seed, update=path.name)


def _why_not_loaded(error: Exception) -> str:
    if isinstance(error, OSError):
        return kind_and_line(error)
    foreign = isinstance(error, UnpicklingError)
    return f"{TRAINING} holds more than tensors and plain values" if foreign else "the model has changed"


def _renew_rates(optimizer: torch.optim.Optimizer, scheduler: torch.optim.lr_scheduler.LRScheduler) -> None:
    """Set the rates of the next update as the schedule has them now: the number of updates may have changed."""
    if isinstance(scheduler, torch.optim.lr_scheduler.LambdaLR):
        parts = zip(optimizer.param_groups, scheduler.base_lrs, scheduler.lr_lambdas, strict=True)
        for group, base, factor in parts:
            rate = base * factor(scheduler.last_epoch)
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _intact(path: Path) -> bool:
    try:
        checksums = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        return bool(checksums == {name: _checksum(path / name) for name in FILES})
    except (OSError, ValueError, RecursionError):  # the last from brackets within brackets
        return False
