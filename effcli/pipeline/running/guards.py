"""What is put around an engine while it runs."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from effcli.errors import EffcliError, TrainingFailedError, WriteError, chain, first_line, kind_and_line
from effcli.files import NO_ROOM, refused_write
from effcli.measure.free_memory import free_memory
from effcli.models.finite import first_not_finite
from effcli.pipeline.running.out_of_memory import RunOutOfMemoryError
from effcli.ranks.group import gathered, is_lost_peer, largest, world_size
from effcli.ranks.lost_peer import GO_ON, lost_peer

if TYPE_CHECKING:
    import torch

    from effcli.engines.checkpoint import CheckpointStore
    from effcli.engines.session import TrainingSession
    from effcli.measure.out_of_memory_record import OutOfMemoryFacts


_WORKER = "DataLoader worker"
_NO_MEMORY = ("can't allocate memory", "CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
"""Words of torch's errors that are no `OutOfMemoryError`: of its CPU allocator, of CUDA itself, of cuBLAS (2.13)."""


@contextmanager
def explained_out_of_memory(explain: Callable[[str], OutOfMemoryFacts]) -> Iterator[None]:
    """Turn the allocator's error into one that says what `explain` makes of its first line.

    What the failed pass held is let go first, so that there is memory to explain with.

    Raises:
        RunOutOfMemoryError: memory ran out.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not _is_out_of_memory(error):
            raise
        _let_go(error)
        raise RunOutOfMemoryError(explain(first_line(error))) from error


def _is_out_of_memory(error: BaseException) -> bool:
    import torch

    return isinstance(error, torch.OutOfMemoryError | MemoryError) or any(text in str(error) for text in _NO_MEMORY)


def _let_go(error: BaseException) -> None:
    """Clear the variables of the frames that an error came through: outputs, graph, and batches."""
    for link in chain(error):
        traceback.clear_frames(link.__traceback__)
    free_memory()


@contextmanager
def explained_failure(session: TrainingSession) -> Iterator[None]:
    """Turn what a model, an optimizer or a data worker raises while it trains into one line that names the update.

    Raises:
        TrainingFailedError: anything but an error of ours was raised.
    """
    try:
        with explained_loss(session):
            yield
    except Exception as error:  # whatever their code raises
        for link in chain(error):  # ends data workers, which would wait for their loader's end
            traceback.clear_frames(link.__traceback__)
        where = f"update {session.update + 1} failed"
        if _WORKER in str(error):
            raise TrainingFailedError(f"{where} in a {_worker_failure(error)}") from error
        if isinstance(error, EffcliError):
            raise
        raise TrainingFailedError(
            f"{where} in the model or the optimizer, {kind_and_line(error)}; --verbose shows where"
        ) from error


@contextmanager
def explained_loss(session: TrainingSession) -> Iterator[None]:
    """Turn what an exchange raises where another process has ended into one line, with the reason that it left.

    Raises:
        EffcliError: another process of the run has ended, or stands still.
    """
    try:
        yield
    except Exception as error:  # torch's backends have no class of error in common
        if not is_lost_peer(error):
            raise
        raise lost_peer(error, f"after update {session.update}", hint=GO_ON) from error


def _worker_failure(error: Exception) -> str:
    """Return which data worker failed, why, and what to try; from the words of torch's loader (torch 2.13)."""
    cause = error.__cause__ if _WORKER in str(error.__cause__) else error  # the signal, behind "exited unexpectedly"
    lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
    said = lines[0].partition(_WORKER)[2].strip(" .")
    if len(lines) > 1:  # raised in the worker, whose traceback follows
        number = said.removeprefix("process ")
        return f"data worker (number {number} of --num-workers), {lines[-1]}; --num-workers 0 shows where"
    if "shared memory" in said:
        return f"data worker {said}; use fewer --num-workers, or --num-workers 0, or allow more in /dev/shm"
    hint = ": the system may have run out of memory" if "Killed" in said else ""
    return f"data worker {said}{hint}; use fewer --num-workers, or --num-workers 0"


@contextmanager
def explained_saving(update: int) -> Iterator[None]:
    """Turn what goes wrong while a checkpoint is saved into one line that names the update it is of.

    Raises:
        WriteError: the system failed in another way than by refusing to write, as where the folder is gone.
        TrainingFailedError: anything else but an error of ours, or of memory, was raised.
    """
    try:
        yield
    except EffcliError:
        raise
    except OSError as error:
        raise WriteError(f"the checkpoint of update {update} was not saved: {error}") from error
    except Exception as error:  # whatever the code of an optimizer's state raises
        if _is_out_of_memory(error) or is_lost_peer(error):
            raise
        raise TrainingFailedError(
            f"the checkpoint of update {update} was not saved, {kind_and_line(error)}; --verbose shows where"
        ) from error


@contextmanager
def explained_write_failure(checkpoints: CheckpointStore) -> Iterator[None]:
    """Add to an error of writing what of the run is left, and how to go on.

    Raises:
        WriteError: with that added.
    """
    try:
        yield
    except WriteError as error:
        saved = checkpoints.newest_intact_path()
        first = "make room" if refused_write(error) in NO_ROOM else "make it writable"
        left = (
            f"'{saved}' is intact: {first}, then continue with --resume"
            if saved
            else f"no intact checkpoint was saved before: {first}, then --resume starts from the first update"
        )
        raise WriteError(f"{error}; {left}") from error


def broken_gradient(model: torch.nn.Module) -> str | None:
    """Return the name of the first parameter whose gradient is not finite; None where none is, or all are. Collective.

    Clipping multiplies by the norm: where that is no number, every gradient has become so, and the first means nothing.
    """
    import torch

    from effcli.storage import local

    gradients = {name: local(value.grad) for name, value in model.named_parameters() if value.grad is not None}
    flags = largest([0.0 if torch.isfinite(gradient).all() else 1.0 for gradient in gradients.values()])
    broken = [name for name, flag in zip(gradients, flags, strict=True) if flag]
    return broken[0] if 0 < len(broken) < len(gradients) else None


def refuse_weights_that_are_not_finite(model: torch.nn.Module) -> None:
    """Refuse to save a model that the last update broke, which no loss has shown yet. Collective.

    Raises:
        TrainingFailedError: a weight is infinite or not a number, in any process.
    """
    found = first_not_finite(model)
    names = [name for name in gathered(found) if name is not None]
    if names:
        raise TrainingFailedError(
            f"the last update left weights of {names[0]} that are not finite: nothing of it is saved, earlier "
            "checkpoints are intact. Try a lower --lr"
        )


def refuse_replicas_that_differ(model: torch.nn.Module) -> None:
    """Refuse to save as one model what has become several: each process has one, and all must hold the same.

    Collective.

    Raises:
        TrainingFailedError: they do not.
    """
    from effcli.engines.same_weights import first_that_differs

    if world_size() == 1:
        return
    if found := first_that_differs(model):
        rank, name = found
        raise TrainingFailedError(
            f"the weights of {name} in rank {rank} are no longer those in rank 0: the processes have trained different "
            "models, and nothing of this update is saved, earlier checkpoints are intact. Take another --optim, or one "
            "process"
        )
