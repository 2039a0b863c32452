"""Python's garbage collector, kept from running where it would cost more than it frees. No torch."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pause garbage collection, and leave it afterwards as it was.

    Importing torch and transformers makes millions of objects that stay; walking them again and again takes a sixth of
    the time.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
