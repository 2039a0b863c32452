"""The process-wide state of accelerate (1.15). Nothing public puts it back: this is where other names are used."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from accelerate.state import AcceleratorState, GradientState, PartialState

from effcli.engines.surroundings import without_launcher_settings


def forget_states() -> None:
    """Forget device, precision and accumulation of an earlier `Accelerator`, which would decide those of the next."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


@contextmanager
def one_process() -> Iterator[None]:
    """Let accelerate know that there is one process, which its trackers ask; leave no trace of it.

    The state decides the device of whoever asks next: where the engine has made one, that stays.
    """
    if PartialState._shared_state:
        yield
        return
    with without_launcher_settings():
        PartialState(cpu=True)
    try:
        yield
    finally:
        PartialState._reset_state()
