"""The standard streams of a command: made to bear a lost reader, a full disk and being closed, and free of advice."""

from __future__ import annotations

import io
import logging
import os
import sys
from typing import Any, TextIO

from effcli.errors import WriteError


class _Lasting(io.FileIO):
    """A descriptor that drops what nobody reads any more; other failures to write are told once, or never."""

    def __init__(self, descriptor: int, *, tell: bool) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self._tell = tell

    def write(self, data: Any, /) -> int | None:  # type: ignore[override]  # None in the stubs of FileIO too
        """Return how many bytes, of what the buffer hands on, are written or dropped.

        Raises:
            WriteError: the system refused for the first time; the flush at exit, which comes again, is spared.
        """
        try:
            return super().write(data)
        except OSError as error:
            if self._tell and not isinstance(error, BrokenPipeError):
                self._tell = False
                raise WriteError(f"could not write the output: {error.strerror}") from error
            return memoryview(data).nbytes


def bear_lost_streams() -> None:
    """Replace stdout and stderr by streams that end no command because its reader went.

    stderr drops all that it cannot write: no run should end for its progress. stdout tells other failures, since
    results must not be lost in silence. rich (15) and typer (0.29) end the process with 1 where a pipe breaks, so that
    must not come to them.
    """
    sys.stdout = _lasting(sys.stdout, 1, os.O_RDONLY, tell=True)
    sys.stderr = _lasting(sys.stderr, 2, os.O_WRONLY, tell=False)


def leave_out_advice() -> None:
    """Keep what libraries advise off stderr, where nobody can follow it; to be called before torch is imported.

    On processors with bfloat16 products bitsandbytes asks for a package that multiplies 4-bit weights, of which none
    are trained here (bitsandbytes/backends/cpu/ops.py, 0.50.2). Each replica of a model that could not be traced looks
    for parameters without gradient, and says where it found none (torch/csrc/distributed/c10d/reducer.cpp, 2.13).
    """
    logging.getLogger("bitsandbytes.backends.cpu").setLevel(logging.ERROR)
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


def is_terminal(stream: TextIO) -> bool:
    """Return whether a stream is a terminal that understands control characters."""
    return stream.isatty() and os.environ.get("TERM", "").lower() not in ("dumb", "unknown")


def _lasting(stream: TextIO | None, descriptor: int, access: int, *, tell: bool) -> TextIO:
    """Return a stream to a descriptor; one that is closed becomes the null device's, opened for `access`.

    Left closed, its number would go to the next file that is opened, and with it what a library in C prints.
    """
    if stream is None:
        opened = os.open(os.devnull, access)
        if opened != descriptor:
            os.dup2(opened, descriptor)
    encoding, errors = (stream.encoding, stream.errors) if stream else (None, None)
    return io.TextIOWrapper(
        io.BufferedWriter(_Lasting(descriptor, tell=tell)),
        encoding=encoding,
        errors=errors,
        line_buffering=descriptor == 2 or os.isatty(descriptor),
    )
