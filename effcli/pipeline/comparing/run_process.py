"""The process of one run: reads what to train from stdin, and tells on what was its stdout how it goes.

Started by `effcli.pipeline.comparing.fresh_process`. Whatever libraries print goes to stderr.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
from types import FrameType
from typing import Any

from effcli.endings import ending_of, has_traceback
from effcli.errors import InterruptedRunError
from effcli.interruption import interrupt
from effcli.masking import masked
from effcli.pipeline.comparing.run_events import ENDED, READY, EventWriter
from effcli.streams import bear_lost_streams, leave_out_advice


def main() -> None:
    """Train what stdin describes: one JSON document with `spec`, `resume`, `overwrite` and `verbose`."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _interrupt)
    told = os.dup(1)
    os.dup2(2, 1)
    bear_lost_streams()
    leave_out_advice()
    events = EventWriter(told, lost=_stop_as_if_interrupted)
    events.send(READY)
    job = json.load(sys.stdin)
    try:
        _train(job, events)
    except SystemExit as stopped:  # a signal before training, whose session has handlers of its own
        code = stopped.code if isinstance(stopped.code, int) else 1
        events.send(ENDED, status="interrupted", failure="stopped before training", exit_code=code)
        raise
    except Exception as error:
        text, code = ending_of(error)
        failure = masked(" ".join(text.split()))
        if job["verbose"] and has_traceback(error):
            sys.stderr.write(masked(traceback.format_exc()))
        status = "interrupted" if isinstance(error, InterruptedRunError) else "failed"
        events.send(ENDED, status=status, failure=failure, exit_code=code)
        sys.exit(code)
    events.send(ENDED, status="completed", failure=None, exit_code=0)


def _train(job: dict[str, Any], events: EventWriter) -> None:
    from effcli import pipeline
    from effcli.spec import build_spec

    spec = build_spec(job["spec"])
    pipeline.train(spec, progress=events, resume=job["resume"], overwrite=job["overwrite"])


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Raise what hardly any library catches on its way."""
    interrupt(number)


def _stop_as_if_interrupted() -> None:
    """Stop at the next update boundary with the state saved: whoever started this process is gone."""
    os.kill(os.getpid(), signal.SIGTERM)
