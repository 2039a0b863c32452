"""The lock of a run folder: one process trains in it at a time."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from types import TracebackType

from effcli.errors import UsageError
from effcli.files import DRAFT

LOCK = f"{DRAFT}lock"
"""Named as what goes when the run ends: what a kill leaves of it holds nobody up."""


class RunLock:
    """Holds a run folder from where it exists to the end of the run; the system lets go when the process is gone.

    The lock is advisory and of the process alone (POSIX, `fcntl.lockf`): one of `fcntl.flock` would pass to data
    workers, which outlive a killed run by seconds. Where the file system has none, or cannot be written to, the run
    goes on without.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file: int | None = None

    def __enter__(self) -> RunLock:
        """Take the lock where the folder exists; see `take`."""
        if self._folder.is_dir():
            self.take()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Let go; the file goes first, so that nobody is held up by one that another has removed."""
        if self._file is not None:
            (self._folder / LOCK).unlink(missing_ok=True)
            os.close(self._file)
            self._file = None

    def take(self) -> None:
        """Take the lock of the folder, which exists by now, unless it is held already.

        Raises:
            UsageError: another process trains in the folder.
        """
        path = self._folder / LOCK
        while self._file is None:
            try:
                file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
            except OSError:
                return
            if not _locked(file):
                os.close(file)
                raise UsageError(
                    f"--out '{self._folder}': another process trains in it; wait for its end, stop it, or choose "
                    "another folder"
                )
            if _is_at(file, path):
                self._file = file
            else:  # the run that held it has ended and removed it
                os.close(file)


def _locked(file: int) -> bool:
    """Return whether the lock of a file was taken, or there are no locks here; False where another process has it."""
    try:
        import fcntl  # not on Windows

        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except ImportError:
        return True
    except OSError as error:
        return error.errno not in (errno.EACCES, errno.EAGAIN)
    return True


def _is_at(file: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file), path.stat())
    except OSError:
        return False
