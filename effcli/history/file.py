"""The file of the history: where it is, one line a run, and what is read of it. Needs nothing but the system."""

from __future__ import annotations

import errno
import os
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from effcli.files import at_home
from effcli.units import KIB

VARIABLE = "EFFCLI_HISTORY"
"""Environment variable that names another file, or says `OFF`."""

OFF = "off"

LARGEST_BYTES = 256 * KIB
"""A file that is larger is set aside for a new one, and the one set aside before is gone. A run takes 400 to 800."""

_OLDER = ".1"
_MOST_READ_BYTES = 4 * LARGEST_BYTES
"""What is read at the end of a file that has grown by other means."""


def history_file() -> Path | None:
    """Return the file that the history is kept in; None where it is kept nowhere.

    Raises:
        OSError: there is no home folder, or what is named can be no file.
    """
    named = os.environ.get(VARIABLE, "").strip()
    if named.lower() == OFF or named == os.devnull:
        return None
    path = at_home(named) if named else _state_folder() / "effcli" / "history.jsonl"
    if not path.name:  # such as "/" and "."
        raise IsADirectoryError(errno.EISDIR, f"{VARIABLE} names a folder, '{named}'")
    return path


def append(path: Path, line: bytes) -> None:
    """Add a line, which has no line break, in one write that others' writes cannot get into.

    A line that a crash has cut off before stays by itself.

    Raises:
        OSError: the system refused, or there is something else than a file.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    _set_aside_if_large(path)
    with _opened(path, os.O_RDWR | os.O_APPEND | os.O_CREAT) as file:
        content = (b"\n" if _is_cut_off(file) else b"") + line + b"\n"
        if os.write(file, content) < len(content):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def read_lines(path: Path) -> list[bytes]:
    """Return the lines that are kept, the oldest first, without empty ones; none where there is no file.

    Raises:
        OSError: the system refused, or there is something else than a file.
    """
    return [line for file in (_older(path), path) for line in _lines(file)]


def why(error: OSError) -> str:
    """Return the reason of the system in words that fit behind the name of the file."""
    if error.errno == errno.ELOOP:
        return "it is a symbolic link"
    return error.strerror or str(error)


def _state_folder() -> Path:
    """Return the folder for what programs keep of what they did: that of the XDG specification, or the system's own.

    Raises:
        OSError: there is no home folder.
    """
    named = os.environ.get("XDG_STATE_HOME", "")
    if os.path.isabs(named):  # the specification has relative ones ignored
        return Path(named)
    usual = {"win32": os.environ.get("LOCALAPPDATA") or "~/AppData/Local", "darwin": "~/Library/Application Support"}
    folder = at_home(usual.get(sys.platform, "~/.local/state"))
    if not folder.is_absolute():
        raise FileNotFoundError(errno.ENOENT, "no home folder is known")
    return folder


def _older(path: Path) -> Path:
    return path.with_name(f"{path.name}{_OLDER}")


def _set_aside_if_large(path: Path) -> None:
    """Give a file that is large enough another name, in which it replaces the one before it.

    Of processes that find it large at once, one does so. Lines of those that have opened it already come with it.
    """
    try:
        with _opened(path, os.O_RDWR) as file:
            if os.fstat(file).st_size <= LARGEST_BYTES or not _locked(file):
                return
            if os.path.samestat(os.fstat(file), path.stat()):  # else another process has done so meanwhile
                path.replace(_older(path))
    except FileNotFoundError:
        return


def _locked(file: int) -> bool:
    """Return whether the lock of an open file was taken, or there are no locks here; it goes when that is closed."""
    try:
        import fcntl  # not on Windows

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except ImportError:
        return True
    except OSError as error:
        return error.errno not in (errno.EACCES, errno.EAGAIN)
    return True


@contextmanager
def _opened(path: Path, flags: int) -> Iterator[int]:
    """Open a file that only its owner may read, neither through a link nor where a pipe or a device is in its place.

    Raises:
        OSError: the system refused, or there is something else than a file.
    """
    for name in ("O_NOFOLLOW", "O_NONBLOCK", "O_CLOEXEC", "O_BINARY"):  # no system has all of them
        flags |= getattr(os, name, 0)
    file = os.open(path, flags, 0o600)
    try:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise OSError(errno.EINVAL, "it is no file")
        yield file
    finally:
        os.close(file)


def _is_cut_off(file: int) -> bool:
    """Return whether the last line of an open file has no end."""
    if os.lseek(file, 0, os.SEEK_END) == 0:
        return False
    os.lseek(file, -1, os.SEEK_END)
    return os.read(file, 1) != b"\n"


def _lines(path: Path) -> list[bytes]:
    """Return the lines of one file; of one that is far too large, those at its end that are complete."""
    try:
        with _opened(path, os.O_RDONLY) as file:
            start = max(0, os.fstat(file).st_size - _MOST_READ_BYTES)
            os.lseek(file, start, os.SEEK_SET)
            content = _read(file, _MOST_READ_BYTES)
    except FileNotFoundError:
        return []
    if start:
        content = content.partition(b"\n")[2]
    return [line for line in content.split(b"\n") if line.strip()]


def _read(file: int, num_bytes: int) -> bytes:
    """Return at most so many bytes from where an open file stands."""
    parts: list[bytes] = []
    while num_bytes > 0 and (part := os.read(file, num_bytes)):
        parts.append(part)
        num_bytes -= len(part)
    return b"".join(parts)
