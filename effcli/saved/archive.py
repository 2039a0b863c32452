"""The zip archives that `torch.save` writes: where the pickle and each storage lie.

An archive holds `NAME/data.pkl`, `NAME/data/KEY` for each storage and `NAME/byteorder`, none of them compressed
(torch/serialization.py and caffe2/serialize/inline_container.cc, 2.13), so that storages can be mapped in place.
"""

from __future__ import annotations

import struct
import sys
import zipfile
from dataclasses import dataclass

from effcli.errors import DataError
from effcli.saved.mapped import Section
from effcli.saved.safe_text import safe

ZIP_START = b"PK\x03\x04"
_LOCAL_HEADER = struct.Struct("<4s5H3L2H")
_ENCRYPTED = 0x1


@dataclass(frozen=True, slots=True, kw_only=True)
class ByteRange:
    """Where an entry's bytes lie in the mapped file."""

    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Archive:
    """An archive of `torch.save`: the place of its pickle, and of its storages by key."""

    pickle: ByteRange
    storages: dict[str, ByteRange]


def read_archive(section: Section, what: str) -> Archive:
    """Return what an archive holds; `what` names it in messages.

    Raises:
        DataError: it is damaged, or not one that `torch.save` wrote.
    """
    try:
        with zipfile.ZipFile(section) as archive:
            entries = {entry.filename: entry for entry in archive.infolist()}
    except (zipfile.BadZipFile, struct.error, OSError, ValueError, NotImplementedError, EOFError) as error:
        raise DataError(f"{what} is cut short or damaged: its zip directory cannot be read") from error
    pickles = [name for name in entries if name.endswith("/data.pkl")]
    if len(pickles) != 1:
        raise DataError(f"{what} is a zip archive, but none that torch.save wrote: it has no data.pkl")
    root = pickles[0].removesuffix("data.pkl")
    if f"{root}constants.pkl" in entries:
        raise DataError(f"{what} is a TorchScript module, which holds code and weights but no optimizer state")
    places = {name.removeprefix(root): _place(section, entry, what) for name, entry in entries.items()}
    _check_byte_order(section, places, what)
    prefix = "data/"
    return Archive(
        pickle=places["data.pkl"],
        storages={name.removeprefix(prefix): place for name, place in places.items() if name.startswith(prefix)},
    )


def _place(section: Section, entry: zipfile.ZipInfo, what: str) -> ByteRange:
    """Return where the bytes of an entry lie, counted from the start of the mapped file."""
    if (
        entry.compress_type != zipfile.ZIP_STORED
        or entry.flag_bits & _ENCRYPTED
        or entry.compress_size != entry.file_size
    ):
        raise DataError(f"{what} is a zip archive with compressed entries, which torch.save never writes")
    section.seek(max(entry.header_offset, 0))
    header = section.read(_LOCAL_HEADER.size)
    if entry.header_offset < 0 or len(header) < _LOCAL_HEADER.size or not header.startswith(ZIP_START):
        raise DataError(f"{what} is cut short or damaged: an entry of its zip directory leads nowhere")
    name_length, extra_length = _LOCAL_HEADER.unpack(header)[-2:]
    begin = entry.header_offset + _LOCAL_HEADER.size + name_length + extra_length
    if begin + entry.file_size > section.num_bytes:
        raise DataError(f"{what} is cut short or damaged: an entry of its zip directory ends behind the file")
    return ByteRange(offset=section.start + begin, num_bytes=entry.file_size)


def _check_byte_order(section: Section, places: dict[str, ByteRange], what: str) -> None:
    place = places.get("byteorder")
    if place is None:
        return
    section.seek(place.offset - section.start)
    order = section.read(min(place.num_bytes, 16)).decode("ascii", "replace")
    if order != sys.byteorder:
        raise DataError(f"{what} was written on a {safe(order)}-endian machine, this one is {sys.byteorder}-endian")
