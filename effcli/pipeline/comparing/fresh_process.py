"""One run in a process of its own, so that nothing that ran before changes a number of it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import Any, Literal

from effcli.engines.base import Progress
from effcli.errors import OutOfMemoryError
from effcli.hidden_devices import environment_with_all_devices
from effcli.pipeline.comparing.processor_times import others_share, read_processor_times
from effcli.pipeline.comparing.run_events import ENDED, READY, EventPlayer, read_event
from effcli.spec import RunSpec

PROGRAM = """
import json, sys
sys.path[:] = json.loads(sys.argv.pop())
from effcli.pipeline.comparing.run_process import main
main()
"""
"""Finds modules where this process does, which may differ from where `python -c` or `-m` would."""
_PATIENCE = 2
"""Signals that are passed on; one more ends the run's process, which does not listen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a run ended; `others_share` is that of the processors' time which went to other processes meanwhile."""

    status: Literal["completed", "interrupted", "failed"]
    failure: str | None
    exit_code: int
    others_share: float | None = None


class PassedSignals:
    """While it lasts, SIGINT and SIGTERM go to the run in progress; `number` is the first that came, None before it.

    The run's process has a group of its own: a Ctrl-C, which the terminal sends to the whole group of this process,
    would else reach it twice, which stops a run at once. So does Ctrl-Z, which is passed on as well.
    """

    def __init__(self) -> None:
        self.number: int | None = None
        self._count = 0
        self._process: subprocess.Popen[str] | None = None
        self._early: list[int] | None = []
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> PassedSignals:
        """Take over the signals; where this is not the main thread the caller owns them."""
        handlers: dict[int, Callable[[int, FrameType | None], None]] = {
            signal.SIGINT: self._pass_on,
            signal.SIGTERM: self._pass_on,
        }
        if hasattr(signal, "SIGTSTP"):
            handlers[signal.SIGTSTP] = self._suspend
        with contextlib.suppress(ValueError):
            for number, handler in handlers.items():
                self._previous[number] = signal.signal(number, handler)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Put the handlers back."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def attach(self, process: subprocess.Popen[str]) -> None:
        """Pass signals on to a process, as soon as it is `ready`."""
        self._process = process

    def detach(self) -> None:
        """Keep signals for the next process, which starts with them."""
        self._process, self._early = None, []

    def ready(self) -> None:
        """Pass on what came before the process had handlers, which would have ended it in the middle of an import."""
        early, self._early = self._early, None
        for number in early or ():
            self._send(number)

    @property
    def has_killed(self) -> bool:
        """Return whether so many signals came that the last ended the run's process."""
        return self._count > _PATIENCE

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        self.number = number if self.number is None else self.number
        self._count += 1
        if self.has_killed:
            self._send(signal.SIGKILL)
        elif self._early is not None:
            self._early.append(number)
        else:
            self._send(number)

    def _suspend(self, number: int, frame: FrameType | None) -> None:
        self._send(signal.SIGSTOP)
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
        signal.signal(number, self._suspend)
        self._send(signal.SIGCONT)

    def _send(self, number: int) -> None:
        if self._process is not None:
            self._process.send_signal(number)


def train_in_fresh_process(
    spec: RunSpec,
    *,
    resume: bool,
    overwrite: bool,
    verbose: bool,
    progress: Progress,
    signals: PassedSignals,
    program: str = PROGRAM,
) -> Ended:
    """Return how a run ended that trained in a process of its own, by `program`; its record is in its folder."""
    job = {"spec": spec.model_dump(mode="json", exclude_unset=True), "resume": resume, "overwrite": overwrite}
    before = read_processor_times()
    try:
        process = subprocess.Popen(
            [sys.executable, "-c", program, json.dumps(sys.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            encoding="utf-8",
            env=environment_with_all_devices(),
            process_group=0,
        )
    except OSError as error:
        return Ended(status="failed", failure=f"its process did not start: {error.strerror}", exit_code=1)
    with process:
        signals.attach(process)
        ended = _followed(process, json.dumps({**job, "verbose": verbose}), EventPlayer(progress), signals)
        code = process.wait()
    signals.detach()
    if ended is None and signals.has_killed:
        ended = {
            "status": "interrupted",
            "failure": "killed, since it did not stop",
            "exit_code": 128 + (signals.number or 0),
        }
    share = others_share(before, read_processor_times())
    return Ended(**{**(ended or _died(code)), "others_share": share})


def _followed(
    process: subprocess.Popen[str], job: str, player: EventPlayer, signals: PassedSignals
) -> dict[str, Any] | None:
    """Give a process its job and show how it goes; return how it ended, None where it did not say."""
    ended = None
    assert process.stdin is not None  # pipes, as asked for
    assert process.stdout is not None
    with contextlib.suppress(BrokenPipeError), process.stdin:
        process.stdin.write(job)
    for line in process.stdout:
        event = read_event(line)
        if event.get("event") == READY:
            signals.ready()
        elif event.get("event") == ENDED:
            ended = {key: event[key] for key in ("status", "failure", "exit_code")}
        else:
            player.play(event)
    player.close()
    return ended


def _died(code: int) -> dict[str, Any]:
    """Return how a process ended that left without a word.

    The exit code of SIGKILL is a guess: it is sent by a person, or by the kernel when memory has run out.
    """
    exit_code = 1
    if code >= 0:
        failure = f"its process ended with code {code} and said nothing"
    elif -code == signal.SIGKILL:
        exit_code = OutOfMemoryError.exit_code
        failure = (
            "its process was killed by signal 9 (SIGKILL), often because the machine ran out of memory; if so, try a "
            "smaller --batch-size with a larger --accum"
        )
    else:
        failure = f"its process was killed by signal {-code} ({signal.strsignal(-code)})"
    return {"status": "failed", "failure": failure, "exit_code": exit_code}
