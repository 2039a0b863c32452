"""`Worker`: the calls of one service, made where they can neither hold up nor disturb a run."""

from __future__ import annotations

import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from queue import SimpleQueue

_SLICE_S = 0.1
"""Seconds after which a wait looks for signals, which the system may hand to another thread."""


class Worker:
    """One thread that makes all calls of one service, since some keep their run by thread.

    A call that does not end in time is left behind with its thread, which does not keep the process alive.
    """

    def __init__(self, name: str) -> None:
        self._calls: SimpleQueue[_Call | None] = SimpleQueue()
        threading.Thread(target=self._work, name=f"effcli-track-{name}", daemon=True).start()

    def call(self, function: Callable[[], object], *, limit_s: float) -> BaseException | None:
        """Make a call and wait for it at most `limit_s` seconds; return what went wrong, None where nothing did.

        What it prints goes to stderr, and what it draws from random generators is put back.
        """
        call = _Call(function)
        with redirect_stdout(sys.stderr), kept_random_state():
            self._calls.put(call)
            end_s = time.monotonic() + limit_s
            while not call.done.wait(_SLICE_S):
                if time.monotonic() > end_s:
                    return TimeoutError(f"no answer within {limit_s:g} seconds")
        return call.error

    def end(self) -> None:
        """Let the thread end after the calls made so far."""
        self._calls.put(None)

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            call.make()


class _Call:
    """A call, whether it is done, and what it raised."""

    def __init__(self, function: Callable[[], object]) -> None:
        self._function = function
        self.done = threading.Event()
        self.error: BaseException | None = None

    def make(self) -> None:
        try:
            self._function()
        except BaseException as error:  # whatever the code of a service raises, an exit of the process too
            self.error = error
        self.done.set()


@contextmanager
def kept_random_state() -> Iterator[None]:
    """Put the generators of Python, NumPy and torch's CPU back: trackio draws from them when it is imported (0.43)."""
    import numpy as np
    import torch

    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
        torch.set_rng_state(before[2])
