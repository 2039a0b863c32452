"""A pause of Python's garbage collector, which frees tensors at moments of its own. No torch."""

from __future__ import annotations

import gc


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
