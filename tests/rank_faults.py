"""What is done to one process of a launch before its command, so that it fails, waits or counts."""

from __future__ import annotations

import os
import signal
import time
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
