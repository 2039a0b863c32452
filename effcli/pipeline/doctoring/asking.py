"""Questions put to fresh processes: a broken driver or package hangs or aborts whoever asks it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from types import TracebackType
from typing import Any, BinaryIO

from effcli.masking import masked
from effcli.pipeline.doctoring.findings import quoted

PROGRAM = """
import json, sys
sys.path[:] = json.loads(sys.argv.pop())
from effcli.pipeline.doctoring.answering import main
main()
"""
"""Finds modules where this process does. Its arguments: the question, what belongs to it as JSON, seconds to live."""
ANSWER, ERROR, DETAILS = "answer", "error", "details"
LATE = "gave no answer"
"""How the failure of a process begins that took too long."""

_REAPED_WITHIN_S = 2.0
"""A process that waits for a driver may not even end when it is killed; nobody waits for it then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What came back: an answer, or what went wrong in one line, with what else was said."""

    answer: dict[str, Any] | None = None
    failure: str = ""
    details: str = ""


class ProbeProcess:
    """A fresh process that answers one question, for `limit_s` seconds at most; ended when it is left."""

    def __init__(self, question: str, *, limit_s: float, **about: Any) -> None:
        self.question = question
        self._limit_s = limit_s
        self._ends = time.monotonic() + limit_s
        self._said, self._complained = _scratch(), _scratch()
        self._process: subprocess.Popen[bytes] | None = None
        self._why_not = ""
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", PROGRAM, question, json.dumps(about), str(limit_s), json.dumps(sys.path)],
                stdin=subprocess.DEVNULL,
                stdout=self._said,
                stderr=self._complained,
                process_group=0,  # so that a Ctrl-C does not print its traceback, and what it starts ends with it
            )
        except OSError as error:
            self._why_not = f"its process did not start: {error.strerror}"

    def __enter__(self) -> ProbeProcess:
        """Return the process, which runs already."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the process and all that it started."""
        self._end()
        self._said.close()
        self._complained.close()

    def reply(self) -> Reply:
        """Return the answer; when there is none in time, what became of the process."""
        if self._process is None:
            return Reply(failure=self._why_not)
        late = False
        try:
            self._process.wait(max(0.0, self._ends - time.monotonic()))
        except subprocess.TimeoutExpired:
            late = True
            self._end()
        said = _last_document(_content(self._said))
        complaint = masked(_content(self._complained))
        if ANSWER in said:
            return Reply(answer=said[ANSWER], details=complaint)
        if ERROR in said:
            return Reply(failure=str(said[ERROR]), details=str(said.get(DETAILS, "")))
        fate = f"{LATE} within {self._limit_s:g} s" if late else _fate(self._process.returncode)
        return Reply(failure=fate + _last_words(complaint), details=complaint)

    def _end(self) -> None:
        if self._process is not None and self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_REAPED_WITHIN_S)


def _fate(code: int) -> str:
    if code < 0:
        return f"its process was killed by signal {-code} ({signal.strsignal(-code)})"
    return f"its process ended with code {code} and no answer"


def _scratch() -> BinaryIO:
    """Return a file that needs no reader; in memory where the system has such, since a disk may be full."""
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create("effcli-doctor"), "w+b")
    return tempfile.TemporaryFile()


def _content(file: BinaryIO) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")


def _last_document(text: str) -> dict[str, Any]:
    """Return the last line that is a JSON object; an empty one where there is none."""
    for line in reversed(text.splitlines()):
        with contextlib.suppress(ValueError):
            document = json.loads(line)
            if isinstance(document, dict):
                return document
    return {}


def _last_words(complaint: str) -> str:
    lines = [line for line in complaint.splitlines() if line.strip()]
    return f": {quoted(lines[-1])}" if lines else ""
