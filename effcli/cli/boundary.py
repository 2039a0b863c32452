"""The one place where exceptions become a line on stderr and an exit code."""

from __future__ import annotations

import errno
import os
import signal
import sys
import traceback
from collections.abc import Callable
from types import FrameType

import typer

from effcli.errors import EffcliError, UsageError, WriteError
from effcli.files import NO_ROOM, refused_write
from effcli.interruption import forget_interruption, interrupt
from effcli.masking import masked
from effcli.report.text import plain
from effcli.units import cut

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
    except EffcliError as error:
        if verbose and error.__cause__ is not None:
            _show_traceback()
        _say(str(error))
        return error.exit_code
    except typer.TyperException as error:
        context = getattr(error, "ctx", None)
        path = context.command_path if context else "effcli"
        if text := error.format_message():  # empty where the help was asked for by giving no command
            _say(f"{text.rstrip('.')}. See `{path} --help`.")
        return 2
    except Exception as error:
        if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:  # whichever flag was given as a path
            _say(f"'{cut(str(error.filename))}' is too long for the name of a file or folder; give a shorter one")
            return UsageError.exit_code
        number = refused_write(error)
        if number is None or number not in NO_ROOM | {errno.EROFS}:  # others may come of reading
            return _fault(error, verbose)
        _say(f"could not write the output: {os.strerror(number)}")
        return WriteError.exit_code
    return code if isinstance(code, int) else 0


def interrupt_on_signals() -> None:
    """Make SIGINT and SIGTERM end the process with one line; while a run trains, its session has its own handlers."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _interrupt)


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Say so, and raise what hardly any library catches, as datasets does with all exceptions of a loader."""
    _say("interrupted; what was saved before is intact")
    interrupt(number)


def _fault(error: Exception, verbose: bool) -> int:
    if verbose:
        _show_traceback()
    _say(f"unexpected fault, {type(error).__name__}: {error} (a bug of effcli; --verbose shows where)")
    return 1


def _say(text: str) -> None:
    text = plain(masked(" ".join(text.split())))
    if len(text) > MAX_ERROR_CHARACTERS:  # what was given is in the middle, what to type next at the end
        text = f"{text[: MAX_ERROR_CHARACTERS * 3 // 4]} ... {text[-MAX_ERROR_CHARACTERS // 4 :]}"
    sys.stderr.write(f"effcli: error: {text}\n")


def _show_traceback() -> None:
    sys.stderr.write(masked(traceback.format_exc()))
