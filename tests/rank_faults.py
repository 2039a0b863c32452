"""What is done to one process of a launch before its command, so that it fails, waits or counts."""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any


def _before_step(act: Any, update: int) -> None:
    """Call `act` when the gradients of an update are there, and before its step."""
    from effcli.engines.session import TrainingSession

    before_step = TrainingSession.before_step

    def acting(session: TrainingSession, **figures: float) -> None:
        if session.update + 1 == update:
            act()
        before_step(session, **figures)

    TrainingSession.before_step = acting


def killed(update: int, number: int = signal.SIGKILL) -> None:
    """Send this process a signal in an update."""
    _before_step(lambda: os.kill(os.getpid(), number), update)


def waiting(update: int, seconds: float) -> None:
    """Let this process stand still in an update."""
    _before_step(lambda: time.sleep(seconds), update)


def raising(update: int, kind: str, text: str) -> None:
    """Raise torch's or a built-in error in an update."""
    import builtins

    import torch

    error = getattr(torch, kind, None) or getattr(builtins, kind)

    def act() -> None:
        raise error(text)

    _before_step(act, update)


def planless() -> None:
    """Spare the run the second that tracing takes."""
    from effcli.pipeline.run_plan import RunPlanner

    RunPlanner.plan = lambda *_: None


def several(runs: list[dict[str, Any]]) -> None:
    """Train with each of these settings, one after the other, in place of the command; ends the process."""
    from effcli import pipeline
    from effcli.report.progress import QuietProgress

    code = 1
    try:
        planless()
        for settings in runs:
            pipeline.train(pipeline.resolve_spec(settings), progress=QuietProgress())
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def other_version(package: str) -> None:
    """Let this process take a package for version 0.0."""
    from importlib import metadata

    version = metadata.version
    metadata.version = lambda name: "0.0" if name == package else version(name)


def other_file(path: str, other: str) -> None:
    """Let this process read another file where a path names one, as where each machine has its own."""
    from effcli.data import source

    load_local = source.load_local

    def loading(name: str, given: Path, **settings: Any) -> Any:
        return load_local(name, Path(other) if str(given) == path else given, **settings)

    source.load_local = loading


def disk_full(update: int) -> None:
    """Refuse to write the checkpoint of an update."""
    import errno

    from effcli.engines.checkpoint import CheckpointStore

    save = CheckpointStore.save

    def saving(store: CheckpointStore, progress: Any, **parts: Any) -> Any:
        import torch

        def refuse(*given: Any, **settings: Any) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        if progress.update == update:
            torch.save = refuse
        return save(store, progress, **parts)

    CheckpointStore.save = saving


def _keep_first_parameter(kept: list[Any]) -> None:
    from effcli.engines import pytorch

    run = pytorch.run

    def running(job: Any) -> None:
        kept.append(next(job.model.parameters()))
        run(job)

    pytorch.run = running


def broken_weights(update: int) -> None:
    """Let a weight of this process alone be no number after an update."""
    from effcli.engines.session import TrainingSession

    after_update = TrainingSession.after_update
    kept: list[Any] = []
    _keep_first_parameter(kept)

    def breaking(session: TrainingSession, result: Any) -> None:
        if session.update + 1 == update:
            import torch

            with torch.no_grad():
                kept[0].view(-1)[0] = float("nan")
        after_update(session, result)

    TrainingSession.after_update = breaking


def worker_killed() -> None:
    """Kill the data workers of this process as they start."""
    from effcli.data import batches

    def worker(number: int) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    batches.leave_stopping_to_the_run = worker


def drawing_apart() -> None:
    """Let the steps of this process draw random numbers of its own."""
    from contextlib import nullcontext

    from effcli.pipeline.running import run

    run.steps_draw_alike = lambda *ignored: nullcontext()


def without_checkpoints() -> None:
    """Hide every checkpoint from this process."""
    from effcli.engines.checkpoint import CheckpointStore

    CheckpointStore.newest_intact = lambda store: None


def unreadable_checkpoint() -> None:
    """Let this process fail to read the weights of a checkpoint."""
    from effcli.engines import checkpoint

    def failing(*ignored: object) -> None:
        raise OSError("gone")

    checkpoint.load_weights = failing


def other_weights() -> None:
    """Let this process load a model of which one number is another one."""
    from effcli.pipeline import build

    build_model = build.build_model

    def building(*given: Any, **settings: Any) -> Any:
        import torch

        model, fresh = build_model(*given, **settings)
        if not settings["meta"]:
            with torch.no_grad():
                next(model.parameters()).view(-1)[0] += 1
        return model, fresh

    build.build_model = building
