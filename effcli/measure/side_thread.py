"""`SideThread`: a daemon thread that a run waits for at its end, whatever a signal interrupts."""

from __future__ import annotations

import threading
from collections.abc import Callable


class SideThread:
    """Does some work, which raises nothing, beside the run; as a daemon, so that the process can end before it."""

    def __init__(self, work: Callable[[], None], name: str) -> None:
        self._work = work
        self._is_begun = False
        self._is_done = threading.Event()
        self._thread = threading.Thread(target=self._do, name=name, daemon=True)

    def start(self) -> None:
        """Begin; also where a signal's handler raises in here, `ends_within` waits for what was begun.

        Raises:
            RuntimeError: the system allows no more threads.
        """
        self._is_begun = True
        try:
            self._thread.start()
        except RuntimeError:
            self._is_begun = False
            raise

    def ends_within(self, seconds: float) -> bool:
        """Return whether the thread has ended after that many seconds at most, or was never started.

        What a signal's handler raises meanwhile is raised again once the thread has ended, or after as many seconds.
        """
        if not self._is_begun:
            return True
        try:
            is_done = self._is_done.wait(seconds)
        except BaseException:
            self._is_done.wait(seconds)
            raise
        if is_done:
            self._thread.join()
        return is_done

    def _do(self) -> None:
        try:
            self._work()
        finally:
            self._is_done.set()
