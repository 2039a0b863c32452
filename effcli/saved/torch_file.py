"""One file that `torch.save` or pickle wrote, read into plain values and mapped tensors."""

from __future__ import annotations

import io
import warnings
from dataclasses import dataclass
from typing import Any

import torch

from effcli.errors import DataError
from effcli.saved.archive import ZIP_START, Archive, ByteRange, read_archive
from effcli.saved.checks import MAX_PICKLE_BYTES, RefusedPickleError, checked_size
from effcli.saved.mapped import MappedFile, Section
from effcli.saved.pickle_reader import Machine
from effcli.saved.safe_text import safe
from effcli.saved.tensors import CONSTANTS, SavedStorage, StorageType, tensor_functions

_MAGIC = 0x1950A86A20F9469CFC6C
"""First pickle of the format before the zip archives (torch/serialization.py, `MAGIC_NUMBER`)."""
_PICKLE_STARTS = (b"\x80", b"}", b"(", b"]")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedFile:
    """What a file holds; `format` says in words how, `classes` whose instances were read as their attributes."""

    value: Any
    format: str
    classes: frozenset[str]


class OtherKindError(DataError):
    """A file that neither torch nor pickle wrote."""


def load_torch_file(file: MappedFile) -> LoadedFile:
    """Return what a file of torch or pickle holds; no byte of a tensor is read.

    Raises:
        OtherKindError: it is of another kind.
        DataError: it is damaged, or asks for code to be run.
    """
    what = f"'{file.path}'"
    section = Section(file)
    start = section.read(16)
    section.seek(0)
    if start.startswith(ZIP_START):
        return load_archive(section, what)
    if len(start) > 8 and start[8:9] == b"{" and int.from_bytes(start[:8], "little") < file.num_bytes:
        raise OtherKindError(f"{what} is a safetensors file: it holds weights and no optimizer state")
    if not start.startswith(_PICKLE_STARTS):
        raise OtherKindError(f"{what} is no file that torch.save wrote; it begins with {safe(repr(start), 40)}")
    return _load_older(section, what)


def load_archive(section: Section, what: str) -> LoadedFile:
    """Return what a zip archive of `torch.save` holds, whether it is a file or lies within one.

    Raises:
        DataError: see `load_torch_file`.
    """
    archive = read_archive(section, what)
    pickle = archive.pickle
    if pickle.num_bytes > MAX_PICKLE_BYTES:
        raise DataError(f"{what} is not read: its pickle is larger than {MAX_PICKLE_BYTES >> 20} MiB")
    storages = _ArchiveStorages(section.file, archive)
    content = io.BytesIO(section.file.content[pickle.offset : pickle.offset + pickle.num_bytes])
    value, classes = run_pickle(content, storages, what)
    return LoadedFile(value=value, format="torch file", classes=classes)


def run_pickle(content: Any, storages: Any, what: str) -> tuple[Any, frozenset[str]]:
    """Return the value of the pickle at the position of `content`, and whose instances it holds.

    `storages` turns a storage's persistent id into a mapped storage; None where the pickle may refer to none.

    Raises:
        DataError: it is damaged or asks for code to be run.
    """
    machine = Machine(tensor_functions(lambda: machine), CONSTANTS, storages)
    try:
        return machine.run(content), frozenset(machine.classes)
    except RefusedPickleError as error:
        raise DataError(
            f"{what} was not read: {error}; effcli reads tensors and plain values and runs nothing"
        ) from error


class _ArchiveStorages:
    """The storages of an archive, each mapped once however many tensors lie on it."""

    def __init__(self, file: MappedFile, archive: Archive) -> None:
        self._file = file
        self._archive = archive
        self._mapped: dict[str, torch.UntypedStorage] = {}

    def __call__(self, persistent_id: Any) -> SavedStorage:
        key, dtype, num_bytes = described(persistent_id)
        place = self._archive.storages.get(key)
        if place is None or place.num_bytes < num_bytes:
            raise RefusedPickleError("it holds a tensor whose bytes are missing")
        if key not in self._mapped:
            self._mapped[key] = map_storage(self._file, ByteRange(offset=place.offset, num_bytes=num_bytes))
        return SavedStorage(storage=self._mapped[key], dtype=dtype)


def described(persistent_id: Any) -> tuple[str, torch.dtype, int]:
    """Return key, dtype and bytes of the storage that a persistent id stands for.

    Raises:
        RefusedPickleError: it stands for something else.
    """
    if not isinstance(persistent_id, tuple) or len(persistent_id) < 5 or persistent_id[0] != "storage":
        raise RefusedPickleError("its pickle refers to something outside it that is no tensor")
    _, kind, key, _, count = persistent_id[:5]
    if not isinstance(kind, StorageType) or not isinstance(key, str):
        raise RefusedPickleError("it holds a storage of an unknown kind")
    return key, kind.dtype, checked_size(count) * kind.dtype.itemsize


def map_storage(file: MappedFile, place: ByteRange) -> torch.UntypedStorage:
    """Return a storage on bytes of a mapped file; none of them is read."""
    if place.num_bytes == 0:
        return torch.UntypedStorage(0)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given buffer is not writable")  # nothing is written to it
        mapped = torch.frombuffer(file.content, dtype=torch.uint8, count=place.num_bytes, offset=place.offset)
    return mapped.untyped_storage()


class _LaterStorages:
    """The storages of the older format, which lie behind its pickles, in the order of their keys.

    The first reading of the main pickle only notes their sizes: where they lie is not known yet.
    """

    def __init__(self, file: MappedFile) -> None:
        self._file = file
        self._sizes: dict[str, tuple[torch.dtype, int]] = {}
        self._mapped: dict[str, torch.UntypedStorage] = {}

    def __call__(self, persistent_id: Any) -> SavedStorage:
        key, dtype, num_bytes = described(persistent_id)
        if len(persistent_id) > 5 and persistent_id[5] is not None:
            raise RefusedPickleError("it holds storages that are parts of others, which torch wrote before 1.0")
        self._sizes[key] = (dtype, num_bytes)
        storage = self._mapped.get(key)
        if storage is None:
            storage = torch.UntypedStorage(num_bytes, device="meta")
        return SavedStorage(storage=storage, dtype=dtype)

    def place(self, keys: Any, section: Section) -> None:
        """Map the storages that lie from where the section stands, each behind the number of its elements."""
        for key in keys if isinstance(keys, list) else ():
            dtype, num_bytes = self._sizes[key]
            count = int.from_bytes(section.read(8), "little")
            offset = section.start + section.tell()
            if count * dtype.itemsize != num_bytes or offset + num_bytes > self._file.num_bytes:
                raise RefusedPickleError("it is cut short or damaged")
            self._mapped[key] = map_storage(self._file, ByteRange(offset=offset, num_bytes=num_bytes))
            section.seek(section.tell() + num_bytes)
        if self._mapped.keys() != self._sizes.keys():
            raise RefusedPickleError("it is cut short or damaged")


def _load_older(section: Section, what: str) -> LoadedFile:
    """Return what a file of the format before the zip archives holds, or a plain pickle."""
    first, classes = run_pickle(section, None, what)
    if first != _MAGIC:
        return LoadedFile(value=first, format="plain pickle", classes=classes)
    run_pickle(section, None, what)  # version of the format
    run_pickle(section, None, what)  # sizes of C's types
    main = section.tell()
    storages = _LaterStorages(section.file)
    run_pickle(section, storages, what)
    try:
        storages.place(run_pickle(section, None, what)[0], section)
    except (RefusedPickleError, KeyError, TypeError) as error:
        raise DataError(f"{what} is cut short or damaged") from error
    section.seek(main)
    value, classes = run_pickle(section, storages, what)
    return LoadedFile(value=value, format="torch file (older format)", classes=classes)
