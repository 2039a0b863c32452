"""Files and folders that appear whole or not at all. No torch."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

from effcli.errors import WriteError, chain, first_line

DRAFT = ".writing-"
"""What the name of a file or folder begins with until it is complete."""

REPLACED = f"{DRAFT}replaced-"
"""What the name of a folder begins with for the moment in which another takes its place."""

NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""Numbers of the system's errors that a full disk, or a file that is too large for it, gives."""

NOT_WRITTEN = NO_ROOM | {errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO}
"""Numbers of the system's errors that tell a failure to write in code that mostly writes.

Beside `NO_ROOM` and EROFS they come of reading as well.
"""

_SYSTEM_ERROR = re.compile(r"\(os error (\d+)\)")


def at_home(path: Path | str) -> Path:
    """Return a path whose leading `~` is replaced by the home folder; one of a user who is not known stays as it is."""
    return Path(os.path.expanduser(path))  # pathlib's own raises for such a user


def write_text(path: Path, text: str) -> None:
    """Write a file of text in UTF-8; see `write_bytes`."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file, and the folders above it, whole or not at all.

    Raises:
        WriteError: the system refused, whatever its reason.
    """
    draft = path.with_name(f"{DRAFT}{path.name}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with draft.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
        _flush(path.parent)
    except BaseException as error:
        with contextlib.suppress(OSError):
            draft.unlink()
        if isinstance(error, OSError):
            raise _not_written(path, error.strerror or first_line(error)) from error
        raise


def write_folder(path: Path, fill: Callable[[Path], object]) -> None:
    """Let `fill` write into a folder that appears under its name only when `fill` has returned.

    A folder that has the name already stays until then.

    Raises:
        WriteError: the system refused to write (see `NOT_WRITTEN`); what else `fill` raises is passed on.
    """
    draft = path.with_name(f"{DRAFT}{path.name}")
    try:
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
        fill(draft)
        for written in (*draft.rglob("*"), draft):
            _flush(written)
        _take_place(draft, path)
        _flush(path.parent)
    except BaseException as error:
        shutil.rmtree(draft, ignore_errors=True)
        number = refused_write(error)
        if number is not None:
            raise _not_written(path, os.strerror(number)) from error
        raise


def remove_folder(path: Path) -> None:
    """Remove a folder so that what a kill leaves of it does not look complete; one that cannot be removed stays."""
    going = path.with_name(f"{REPLACED}{path.name}")
    with contextlib.suppress(OSError):
        path.rename(going)
    shutil.rmtree(going, ignore_errors=True)


def refused_write(error: BaseException) -> int | None:
    """Return the number of the system's error, one of `NOT_WRITTEN`, that an exception comes from; None where of none.

    What is written in Rust raises errors of its own, which end in the system's number (safetensors 0.8, tokenizers
    0.23); torch's writer, in C++, one that the system's error is the context of (2.13).
    """
    for link in chain(error):
        found = _SYSTEM_ERROR.search(str(link))
        number = int(found[1]) if found else getattr(link, "errno", None)
        if number in NOT_WRITTEN:
            return number
    return None


def _not_written(path: Path, why: str) -> WriteError:
    return WriteError(f"could not write '{path}': {why}")


def _take_place(draft: Path, path: Path) -> None:
    """Give the draft its name; a folder that has it goes only when the new one is there."""
    replaced = path.with_name(f"{REPLACED}{path.name}")
    if not path.exists():
        draft.rename(path)
        return
    shutil.rmtree(replaced, ignore_errors=True)
    path.rename(replaced)
    try:
        draft.rename(path)
    except BaseException:
        replaced.rename(path)
        raise
    shutil.rmtree(replaced, ignore_errors=True)


def _flush(path: Path) -> None:
    """Make sure that a file, or the names in a folder, are on the disk before a later step says so."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
