"""What is kept between runs: where it lies, and what is done with damaged copies."""

from __future__ import annotations

import atexit
import functools
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from effcli.errors import EffcliError, WriteError, chain
from effcli.files import refused_write

if TYPE_CHECKING:
    from datasets import Dataset

END_OF_STREAM = b"\xff\xff\xff\xff\x00\x00\x00\x00"
"""Last bytes of a whole Arrow stream (Arrow columnar format 1.5, "IPC Streaming Format"): it is written on closing."""


def cache_folder() -> Path:
    """Return the cache folder of `datasets`, or a temporary one, removed at exit, where that cannot be written."""
    import datasets

    return _usable(Path(datasets.config.HF_DATASETS_CACHE).expanduser())


def own_folder() -> Path:
    """Return the folder for what nobody else reads: files as tables, and token ids."""
    return _usable(cache_folder() / "effcli")


@functools.cache
def _usable(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError:
        temporary = Path(tempfile.mkdtemp(prefix="effcli-"))
        atexit.register(shutil.rmtree, temporary, ignore_errors=True)
        return temporary


def content_key(path: Path, *parts: object) -> str:
    """Return 32 hexadecimal digits that differ where the bytes of the file or one of `parts` do.

    Neither size nor time of change tells of every change: an editor may keep both.
    """
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256")
    digest.update(repr(parts).encode())
    return digest.hexdigest()[:32]


def kept(key: str, load: Callable[[str], Dataset], *, num_rows: int | None = None) -> Dataset:
    """Return what `load` makes in the cache folder that it is given, or finds there from an earlier run.

    A copy that cannot be read, or has not `num_rows` rows, is made once more. `datasets` itself takes care of runs
    side by side (by a lock) and of those that were killed (it moves a folder when it is whole).

    Raises:
        WriteError: the cache folder is full or read-only.
        Exception: whatever `load` raises on a fresh folder; an error of ours comes as it was raised.
    """
    folder = own_folder() / key
    if folder.exists():
        try:
            found = load(str(folder))
            if num_rows is None or len(found) == num_rows:
                return found
        except Exception:  # whatever the damage leads to: datasets, pyarrow and json have no exception in common
            pass
        shutil.rmtree(folder, ignore_errors=True)
    with writing_cache():
        return load(str(folder))


def kept_file(name: str, make: Callable[[Path], None]) -> Dataset:
    """Return the rows of an Arrow file in the cache, which `make` writes where there is none that is whole.

    It is written in a folder of its own and moved when it is whole, so that runs side by side and runs that were killed
    leave each other alone, and a full disk is not filled by what is left of a file.

    Raises:
        WriteError: the cache folder is full or read-only.
        Exception: whatever `make` raises; an error of ours comes as it was raised.
    """
    from datasets import Dataset

    path = own_folder() / name
    if _is_whole(path):
        try:
            return Dataset.from_file(str(path))
        except Exception:  # see `kept`
            pass
    with writing_cache(), tempfile.TemporaryDirectory(dir=path.parent, prefix="writing-") as folder:
        made = Path(folder) / name
        make(made)
        made.replace(path)
        return Dataset.from_file(str(path))


def _is_whole(path: Path) -> bool:
    """Return whether an Arrow stream was written to its end."""
    try:
        with path.open("rb") as file:
            file.seek(-len(END_OF_STREAM), os.SEEK_END)
            return file.read() == END_OF_STREAM
    except OSError:
        return False


@contextmanager
def writing_cache() -> Iterator[None]:
    """Tell a cache that cannot be written from other faults, and errors of ours from those that wrap them.

    Raises:
        WriteError: the cache folder is full or read-only.
    """
    try:
        yield
    except Exception as error:
        ours = next((link for link in chain(error) if isinstance(link, EffcliError)), None)
        if ours is not None:
            raise ours from error
        number = refused_write(error)
        if number is not None:
            raise WriteError(
                f"the cache folder '{cache_folder()}' cannot be written ({os.strerror(number)}); free space there, "
                "or name another folder by the environment variable HF_DATASETS_CACHE"
            ) from error
        raise
