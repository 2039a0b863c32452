"""Files mapped into memory, and sections of them that read like files."""

from __future__ import annotations

import errno
import io
import mmap
import os
import stat
from dataclasses import dataclass
from pathlib import Path

from effcli.errors import DataError

_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class MappedFile:
    """A regular file in memory as the system pages it in: reading a part costs that part, and nothing can be written.

    It may be larger than the memory.
    """

    path: Path
    content: mmap.mmap

    @property
    def num_bytes(self) -> int:
        """Return the size of the file in bytes."""
        return len(self.content)

    def forget(self) -> None:
        """Let go of the pages that were read; they are read again when they are needed."""
        self.content.madvise(mmap.MADV_DONTNEED)


def map_file(path: Path) -> MappedFile:
    """Return a regular file, mapped.

    Raises:
        DataError: there is none, it is empty, or it cannot be read.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise unreadable(path, error) from error
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise DataError(f"'{path}' is {_KINDS.get(stat.S_IFMT(status.st_mode), 'no file')}, no file to read")
        if status.st_size == 0:
            raise DataError(f"'{path}' is empty")
        content = mmap.mmap(descriptor, 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ)
        return MappedFile(path=path, content=content)
    except OSError as error:
        raise unreadable(path, error) from error
    finally:
        os.close(descriptor)


def unreadable(path: Path, error: OSError) -> DataError:
    """Return what to say of a path that the system does not let be read."""
    if error.errno == errno.ENOENT:
        return DataError(f"'{path}' does not exist")
    return DataError(f"'{path}' cannot be read: {error.strerror}")


class Section(io.RawIOBase):
    """Bytes `start` to `stop` of a mapped file, as a file of their own that can be read only."""

    def __init__(self, file: MappedFile, start: int = 0, stop: int | None = None) -> None:
        super().__init__()
        self.file = file
        self.start = start
        self.num_bytes = (file.num_bytes if stop is None else stop) - start
        self._position = 0

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def tell(self) -> int:
        """Return the position within the section."""
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move to a position, from the start, from here or from the end, and return it."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self.num_bytes}[whence]
        if base + offset < 0:
            raise OSError(errno.EINVAL, "a position before the start")
        self._position = base + offset
        return self._position

    def read(self, size: int | None = -1) -> bytes:
        """Return up to `size` bytes from here, all that are left where it is None or negative."""
        left = max(self.num_bytes - self._position, 0)
        count = left if size is None or size < 0 else min(size, left)
        begin = self.start + self._position
        self._position += count
        return self.file.content[begin : begin + count]

    def readline(self, size: int | None = -1) -> bytes:
        """Return the bytes up to and with the next line feed, at most a kilobyte or `size` of them."""
        line = self.read(1024 if size is None or size < 0 else size)
        end = line.find(b"\n") + 1
        if end:
            self._position -= len(line) - end
            return line[:end]
        return line
