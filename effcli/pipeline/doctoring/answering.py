"""The process that answers one question of `effcli.pipeline.doctoring.asking`, as one line of JSON on what was stdout.

What libraries print goes to stderr.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from importlib import import_module
from typing import Any

from effcli.errors import EffcliError
from effcli.masking import masked
from effcli.pipeline.doctoring.asking import ANSWER, DETAILS, ERROR
from effcli.pipeline.doctoring.findings import in_words
from effcli.streams import leave_out_advice

QUESTIONS = {
    "driver": ("effcli.pipeline.doctoring.driver", "ask_driver"),
    "torch": ("effcli.pipeline.doctoring.trials", "torch_build"),
    "step": ("effcli.pipeline.doctoring.trials", "step_on_device"),
    "optimizer": ("effcli.pipeline.doctoring.trials", "step_of_optimizer"),
}
"""Where the function is that answers a question with values that JSON has."""

_GRACE_S = 5


def main() -> None:
    """Answer the question of the first argument about the second, a JSON document, and end without tidying up."""
    told = os.dup(1)
    os.dup2(2, 1)
    question, about, limit_s = sys.argv[1], json.loads(sys.argv[2]), float(sys.argv[3])
    signal.alarm(int(limit_s) + _GRACE_S)  # ends this process also where whoever asked is gone
    leave_out_advice()
    os.write(told, (json.dumps(said(question, about)) + "\n").encode())
    sys.stderr.flush()
    os._exit(0)  # a driver may hang or crash once more where a process ends


def said(question: str, about: dict[str, Any]) -> dict[str, Any]:
    """Return the answer to a question, or what went wrong, as one document."""
    try:
        module, function = QUESTIONS[question]
        answer: Callable[..., dict[str, Any]] = getattr(import_module(module), function)
        return {ANSWER: answer(**about)}
    except (Exception, SystemExit) as error:
        details = "" if isinstance(error, EffcliError) and error.__cause__ is None else masked(traceback.format_exc())
        return {ERROR: in_words(error), DETAILS: details}
