"""The one place where exceptions become a line on stderr and an exit code."""

from __future__ import annotations

import signal
import sys
import traceback
from collections.abc import Callable
from types import FrameType

import typer

from effcli.endings import ending_of, has_traceback
from effcli.interruption import forget_interruption, interrupt
from effcli.masking import masked
from effcli.ranks.voice import INTERRUPTED, is_ending, is_main, may_tell, reason_of_another, with_rank
from effcli.report.text import plain

MAX_ERROR_CHARACTERS = 1500
"""Characters of an error, far more than any has unless what was given is longer still."""


def run_guarded(command: Callable[[], object], *, verbose: bool) -> int:
    """Return the exit code of `command`; whatever goes wrong is one line on stderr, without secrets.

    The traceback of an unexpected fault, without values of variables, is shown with `verbose` only.
    """
    forget_interruption()
    try:
        code = command()
        sys.stdout.flush()  # here, where a failure is told
    except typer.TyperException as error:
        context = getattr(error, "ctx", None)
        path = context.command_path if context else "effcli"
        text = error.format_message()  # empty where the help was asked for by giving no command
        text = f"{text.rstrip('.')}. See `{path} --help`." if text else ""
        if may_tell(text, 2) and text:
            _say(with_rank(text))
        return 2
    except Exception as error:
        text, exit_code = ending_of(error)
        if verbose and has_traceback(error) and reason_of_another() is None:
            sys.stderr.write(masked(traceback.format_exc()))
        if may_tell(text, exit_code):
            _say(with_rank(text))
        return exit_code
    return code if isinstance(code, int) else 0


def interrupt_on_signals() -> None:
    """Make SIGINT and SIGTERM end the process with one line; while a run trains, its session has its own handlers."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _interrupt)


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Say so, and raise what hardly any library catches, as datasets does with all exceptions of a loader."""
    if is_ending():  # the launcher stops all processes when one has ended, and this one is about to say why
        return
    if is_main():
        _say(INTERRUPTED)
    interrupt(number)


def _say(text: str) -> None:
    text = plain(masked(" ".join(text.split())))
    if len(text) > MAX_ERROR_CHARACTERS:  # what was given is in the middle, what to type next at the end
        text = f"{text[: MAX_ERROR_CHARACTERS * 3 // 4]} ... {text[-MAX_ERROR_CHARACTERS // 4 :]}"
    sys.stderr.write(f"effcli: error: {text}\n")
