"""What a run in another process tells the one that started it: a JSON line for each call of `Progress`. No torch."""

from __future__ import annotations

import json
import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from typing import Any

from effcli.engines.base import EvalResult, Progress

READY, ENDED = "ready", "ended"
"""Events beside the calls of `Progress`: signals are handled from now on; how the run ended."""
_ROWS_SECONDS = 0.1
"""Time between two events about rows that are read."""

MakeProgress = Callable[[], Progress]


class EventWriter:
    """The `Progress` of a run whose user looks at another process; `lost` is called once when nobody reads any more.

    Each line also begins with an end of line: where a signal stops the writing of one, the next is whole all the same.
    """

    def __init__(
        self, descriptor: int, *, lost: Callable[[], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._descriptor, self._lost, self._clock = descriptor, lost, clock
        self._waiting: deque[bytes] = deque()
        self._is_writing = self._is_lost = False

    def send(self, event: str, **values: Any) -> None:
        """Write one event; called by a handler of signals while another is written, it comes after that one."""
        self._waiting.append(f"\n{json.dumps({'event': event, **values})}\n".encode())
        if self._is_writing or self._is_lost:
            return
        self._is_writing = True
        try:
            while self._waiting:
                line = self._waiting.popleft()
                while line:
                    line = line[os.write(self._descriptor, line) :]
        except OSError:
            self._is_lost = True
            self._lost()
        finally:
            self._is_writing = False

    def note(self, text: str) -> None:
        """Tell a sentence."""
        self.send("note", text=text)

    @contextmanager
    def rows(self, what: str, num_rows: int) -> Iterator[Callable[[int], None]]:
        """Tell now and then how many rows are done."""
        next_s = self._clock()

        def done(num_done: int) -> None:
            nonlocal next_s
            if self._clock() >= next_s:
                next_s = self._clock() + _ROWS_SECONDS
                self.send("rows_done", num_done=num_done)

        self.send("rows", what=what, num_rows=num_rows)
        try:
            yield done
        finally:
            self.send("rows_end")

    def start(self, *, first_update: int, total_updates: int) -> None:
        """Tell that training begins."""
        self.send("start", first_update=first_update, total_updates=total_updates)

    def update(self, *, update: int, epoch: float, loss: float, lr: float, num_samples: int) -> None:
        """Tell of an update."""
        self.send("update", update=update, epoch=epoch, loss=loss, lr=lr, num_samples=num_samples)

    def evaluation(self, *, epoch: float, result: EvalResult) -> None:
        """Tell of an evaluation."""
        self.send("evaluation", epoch=epoch, result=asdict(result))

    def stop(self) -> None:
        """Tell that training is over."""
        self.send("stop")


def read_event(line: str) -> dict[str, Any]:
    """Return the event of a line; an empty one where a signal stopped its writing, or the line is blank."""
    try:
        event = json.loads(line)
    except ValueError:
        return {}
    return event if isinstance(event, dict) and isinstance(event.get("event"), str) else {}


class SaidOnce:
    """Shows a run by another `Progress`; a sentence in `said` is not said again, and what is said is added to it."""

    def __init__(self, progress: Progress, said: set[str]) -> None:
        self._said = said
        self.rows, self.start, self.update = progress.rows, progress.start, progress.update
        self.evaluation, self.stop, self._note = progress.evaluation, progress.stop, progress.note

    def note(self, text: str) -> None:
        """Say one sentence."""
        if text not in self._said:
            self._said.add(text)
            self._note(text)


class EventPlayer:
    """Makes the calls that events tell of on a `Progress` here."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._rows = ExitStack()
        self._done: Callable[[int], None] = lambda num_done: None

    def play(self, event: dict[str, Any]) -> None:
        """Make the call of one event; what is no call is passed over."""
        values = dict(event)
        match values.pop("event", None):
            case "note":
                self._progress.note(**values)
            case "rows":
                self._done = self._rows.enter_context(self._progress.rows(**values))
            case "rows_done":
                self._done(values["num_done"])
            case "rows_end":
                self._rows.close()
            case "start":
                self._progress.start(**values)
            case "update":
                self._progress.update(**values)
            case "evaluation":
                self._progress.evaluation(epoch=values["epoch"], result=EvalResult(**values["result"]))
            case "stop":
                self._progress.stop()

    def close(self) -> None:
        """Close what a run that ended early left open."""
        self._rows.close()
        self._progress.stop()
