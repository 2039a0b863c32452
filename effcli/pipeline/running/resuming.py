"""Where a run starts from, and what it saves so that it can go on."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from effcli.engines.checkpoint import CheckpointProgress, CheckpointStore
from effcli.engines.session import Evaluation, Update
from effcli.engines.window_schedule import START, Position, WindowSchedule
from effcli.errors import UsageError
from effcli.flags import field_label
from effcli.measure.record import ProfiledUpdate
from effcli.pipeline.resolve import changed_fields
from effcli.ranks.agreeing import on_all
from effcli.ranks.group import gathered
from effcli.run_folder import is_complete

if TYPE_CHECKING:
    from effcli.engines.session import TrainingSession
    from effcli.pipeline.prepare import Prepared
    from effcli.run_folder import RunFolder


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """What a run starts from: a checkpoint and what was known when it was written, or nothing.

    `origin` is where the windows of the run's size begin, `first_window` the rows of its very first one, None where
    that is still to come; `profiled` is the profiled update so far; `damaged` are checkpoints that were passed over,
    `notes` what should be said about it.
    """

    checkpoint: Path | None = None
    update: int = 0
    origin: Position = START
    history: tuple[Update, ...] = ()
    evaluations: tuple[Evaluation, ...] = ()
    first_window: int | None = None
    profiled: ProfiledUpdate | None = None
    damaged: tuple[Path, ...] = ()
    notes: tuple[str, ...] = ()


def find_start(prepared: Prepared, folder: RunFolder) -> Start:
    """Return the newest intact checkpoint of a run folder; without one, the start of the run. Collective.

    Raises:
        UsageError: the specification or the data changed in what is learnt, the run is already complete or past the
            last update, or the processes do not see the same folder.
        TrainingFailedError: all checkpoints are damaged, or the intact one is of another version of effcli.
    """
    with on_all():
        start = _find_start(prepared, folder)
    _refuse_other_folders(start, folder)
    return start


def _refuse_other_folders(start: Start, folder: RunFolder) -> None:
    """Raise unless all processes found the same checkpoint; collective.

    Raises:
        UsageError: they did not.
    """
    of_all = gathered(start.checkpoint and start.checkpoint.name)
    for number, name in enumerate(of_all):
        if name != of_all[0]:
            raise UsageError(
                f"--resume: rank 0 finds {of_all[0] or 'no checkpoint'} in '{folder.checkpoints}', and rank {number} "
                f"{name or 'none'}; put --out where all processes see the same files"
            )


def _find_start(prepared: Prepared, folder: RunFolder) -> Start:
    found = CheckpointStore(folder.checkpoints, keep=prepared.spec.output.keep).newest_intact()
    if found is None:
        return Start(notes=("No checkpoint yet: starting from the first update.",))
    saved = found.progress
    _refuse_changes(prepared, saved)
    before = _windows(saved)
    same_window = before.window == prepared.window_schedule.window
    origin = saved.origin if same_window else before.position(saved.update)
    resumed = replace(prepared, origin=origin)
    _refuse_ended(resumed, saved.update, is_complete=is_complete(folder))
    damaged = (f"Checkpoint '{broken}' is damaged: going on from the one before it." for broken in found.damaged)
    return Start(
        checkpoint=found.path,
        update=saved.update,
        origin=origin,
        history=saved.history,
        evaluations=saved.evaluations,
        first_window=saved.first_window,
        profiled=None if saved.profiled is None else ProfiledUpdate.model_validate(saved.profiled),
        damaged=found.damaged,
        notes=(*damaged, *_changes(saved, resumed)),
    )


def saved_state(
    prepared: Prepared, session: TrainingSession, *, first_window: int, profiled: ProfiledUpdate | None
) -> CheckpointProgress:
    """Return what a checkpoint holds of a session beside tensors."""
    return CheckpointProgress(
        update=session.update,
        spec=prepared.spec.model_dump(mode="json"),
        train_rows=prepared.data.train_rows,
        rows_fingerprint=prepared.rows_fingerprint(),
        config_fingerprint=_config_fingerprint(prepared),
        origin=prepared.origin,
        first_window=first_window,
        total_updates=prepared.total_updates,
        world_size=prepared.launch.world_size,
        history=tuple(session.history),
        evaluations=tuple(session.evaluations),
        profiled=None if profiled is None else profiled.model_dump(mode="json"),
    )


def _refuse_changes(prepared: Prepared, saved: CheckpointProgress) -> None:
    """Raise where what is learnt would not be what the checkpoint's run learnt."""
    changed = changed_fields(saved.spec, prepared.spec.model_dump(mode="json"))
    if changed:
        raise UsageError(
            f"--resume: the run was started with other values of {', '.join(map(field_label, changed))}; "
            "keep them, or start anew with --overwrite"
        )
    rows = prepared.data.train_rows
    if saved.train_rows != rows:
        raise UsageError(
            f"--resume: the training data had {saved.train_rows:,} rows and has {rows:,} now; "
            "restore it, or start anew with --overwrite"
        )
    if saved.rows_fingerprint != prepared.rows_fingerprint():
        raise UsageError(
            f"--resume: the {rows:,} training rows are not those that the run was started with, in texts, labels, "
            "order or tokens; restore the data and the tokenizer, or start anew with --overwrite"
        )
    if saved.config_fingerprint != _config_fingerprint(prepared):
        raise UsageError(
            f"--resume: the configuration of '{prepared.source.name}' is not the one that the run was started with; "
            "restore it, or start anew with --overwrite"
        )


def _refuse_ended(resumed: Prepared, update: int, *, is_complete: bool) -> None:
    """Raise where no update is left after those that a checkpoint has."""
    total = resumed.total_updates
    if update >= total and is_complete:
        raise UsageError(f"--resume: the run is complete ({update} updates); raise --epochs or --max-steps to go on")
    if update > total:
        epochs = math.ceil(resumed.window_schedule.epochs(update))
        least = f"--max-steps {update}" if resumed.spec.loop.max_steps else f"--epochs {epochs}"
        raise UsageError(
            f"--resume: update {update} is already done, and the run would end at update {total}; give at least {least}"
        )


def _windows(saved: CheckpointProgress) -> WindowSchedule:
    """Return the windows of the run that wrote a checkpoint."""
    loop = saved.spec["loop"]
    return WindowSchedule(
        num_rows=saved.train_rows,
        batch_size=loop["batch_size"],
        accum=loop["accum"],
        world_size=saved.world_size,
        origin=saved.origin,
    )


def _changes(saved: CheckpointProgress, resumed: Prepared) -> Iterator[str]:
    """Yield where a run goes on, and what is not as it was when the checkpoint was written."""
    total, loop = resumed.total_updates, resumed.spec.loop
    yield f"Resumed after update {saved.update} of {total}."
    before, now = _windows(saved), resumed.window_schedule
    if _sizes(before) != _sizes(now):
        yield _window_note(before, now, before.position(saved.update))
    shard = saved.spec["loop"].get("shard", loop.shard)
    if shard != loop.shard and saved.world_size > 1 and now.world_size > 1:
        yield f"--shard {shard} becomes {loop.shard}: results agree, but not in every bit."
    if saved.spec["loop"]["gradient_checkpointing"] != loop.gradient_checkpointing:
        yield "--gradient-checkpointing changed: results agree, but not in every bit."
    if saved.total_updates != total:
        yield f"The run was to end at update {saved.total_updates}: the learning-rate schedule changes with that."


def _config_fingerprint(prepared: Prepared) -> str:
    """Return the SHA-256 of the model's configuration: dropout, heads, or activation change no shape."""
    config = prepared.source.config.to_dict()
    fields = {name: value for name, value in config.items() if name not in ("transformers_version", "_name_or_path")}
    return hashlib.sha256(json.dumps(fields, sort_keys=True, default=str).encode()).hexdigest()


def _sizes(windows: WindowSchedule) -> tuple[int, int, int]:
    return windows.batch_size, windows.accum, windows.world_size


def _window_note(before: WindowSchedule, now: WindowSchedule, position: Position) -> str:
    """Return what other batches, or another number of processes, change."""
    changes = []
    if before.world_size != now.world_size:
        processes = "1 process becomes" if before.world_size == 1 else f"{before.world_size} processes become"
        changes.append(f"{processes} {now.world_size}")
    if (before.batch_size, before.accum) != (now.batch_size, now.accum):
        sizes = f"{before.batch_size} x {before.accum} becomes {now.batch_size} x {now.accum}"
        changes.append(f"{'batch' if changes else 'Batch'} {sizes}")
    change = ", ".join(changes)
    if before.window == now.window:
        return f"{change}: the same {now.window:,} rows per update."
    left = now.num_rows - position.rows
    return (
        f"{change}: the {left:,} rows left of epoch {position.epoch + 1} make {-(-left // now.window):,} updates, "
        f"a whole epoch {now.updates_per_epoch:,}."
    )
