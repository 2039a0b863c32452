"""What is said about an exception that ends a command, or a run in a process of its own, and its exit code."""

from __future__ import annotations

import errno
import os
import traceback

from effcli import hub
from effcli.errors import EffcliError, UsageError, WriteError
from effcli.files import NO_ROOM, refused_write
from effcli.units import cut


def ending_of(error: Exception) -> tuple[str, int]:
    """Return the text of an ending and its exit code: 1 for what nobody foresaw; secrets are not masked yet."""
    if isinstance(error, EffcliError):
        return str(error), error.exit_code
    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:  # whichever flag was given as a path
        name = cut(str(error.filename))
        return f"'{name}' is too long for the name of a file or folder; give a shorter one", UsageError.exit_code
    number = refused_write(error)
    if number is not None and number in NO_ROOM | {errno.EROFS}:  # others may come of reading
        return f"could not write the output: {os.strerror(number)}", WriteError.exit_code
    if isinstance(error, ValueError) and not hub.is_address(hub.endpoint()) and _is_of_the_hub(error):
        return f"{hub.not_an_address()}; unset {hub.ENDPOINT}", UsageError.exit_code
    return f"unexpected fault, {type(error).__name__}: {error} (a bug of effcli; --verbose shows where)", 1


def _is_of_the_hub(error: Exception) -> bool:
    """Return whether an exception came up in huggingface_hub, which cannot even be imported with some addresses."""
    frames = traceback.walk_tb(error.__traceback__)
    return any(frame.f_globals.get("__name__", "").partition(".")[0] == "huggingface_hub" for frame, _ in frames)


def has_traceback(error: Exception) -> bool:
    """Return whether a traceback says more than the text: of an unforeseen fault, or of an error that has a cause."""
    return error.__cause__ is not None if isinstance(error, EffcliError) else ending_of(error)[1] == 1
