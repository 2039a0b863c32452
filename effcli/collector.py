"""Python's garbage collector, kept from running where it costs more than it frees, or would spoil a count. No torch."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


class CollectorPause:
    """Keeps the collector from working between `begin` and `end`; afterwards it is as it was before."""

    def __init__(self) -> None:
        self._was_on = False

    def begin(self) -> None:
        """Let nothing be collected; may be called again before `end`."""
        self._was_on = self._was_on or gc.isenabled()
        gc.disable()

    def end(self) -> None:
        """Let the collector work again where it did before; nothing where there is no pause."""
        if self._was_on:
            self._was_on = False
            gc.enable()


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pause garbage collection, and leave it afterwards as it was.

    Importing torch and transformers makes millions of objects that stay; walking them again and again takes a sixth of
    the time.
    """
    pause = CollectorPause()
    pause.begin()
    try:
        yield
    finally:
        pause.end()
