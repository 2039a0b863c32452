"""Files of a model that cannot be used, told in one line that names the model and the part."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from effcli.errors import EffcliError, UsageError, first_line

FLAG = "--trust-remote-code"
TRUST = "trust_remote_code"
"""Keyword of transformers, which also names it where it refuses to run code."""


@contextmanager
def unusable(name: str, part: str) -> Iterator[None]:
    """Turn whatever a library raises over a user's model files into one line that names model and part.

    Raises:
        UsageError: the files are damaged, or their values do not fit the architecture.
    """
    try:
        yield
    except EffcliError:
        raise
    except Exception as error:  # parsers, validators and deserialisers raise their own kinds
        if isinstance(error, MemoryError) or "OutOfMemory" in type(error).__name__:
            raise
        reason = first_line(error)
        if TRUST in str(error):
            raise untrusted(name, part) from error
        if "weights_only" in reason:  # torch advises to switch its safety off
            reason = "they are not readable"
        raise UsageError(f"--model '{name}': its {part} cannot be used: {reason}") from error


def untrusted(name: str, part: str) -> UsageError:
    """Return the error for a part of a model that cannot be used without running code that comes with it."""
    return UsageError(
        f"--model '{name}': its {part} needs Python code that comes with the model, and such code can do anything that "
        f"you can; read it, then add {FLAG} if you trust it, or give another model"
    )
