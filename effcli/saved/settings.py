"""Settings that were pickled as one object, such as Trainer's `training_args.bin`, read as what they store."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from effcli.errors import DataError
from effcli.saved.archive import read_archive
from effcli.saved.checks import RefusedPickleError
from effcli.saved.mapped import Section, map_file
from effcli.saved.pickle_reader import Machine
from effcli.saved.plain_values import PLAIN
from effcli.saved.stand_ins import SavedObject

_MAX_BYTES = 1_000_000  # of the pickle, which takes a few thousand


def read_settings(path: Path) -> dict[str, Any]:
    """Return the attributes of the object that an archive of `torch.save` holds; nothing that it names is run.

    A member of an enum, which is pickled as a call of its class, becomes its value.

    Raises:
        DataError: it is damaged, or holds something else.
    """
    what = f"'{path}'"
    section = Section(map_file(path))
    place = read_archive(section, what).pickle
    if place.num_bytes > _MAX_BYTES:
        raise DataError(f"{what} holds something else than settings")
    section.seek(place.offset)
    try:
        value = Machine(PLAIN, {}, unknown=_not_made).run(io.BytesIO(section.read(place.num_bytes)))
    except RefusedPickleError as error:
        raise DataError(f"{what} was not read: {error}") from error
    if not isinstance(value, SavedObject):
        raise DataError(f"{what} holds something else than settings")
    return vars(value)


def _not_made(arguments: tuple[Any, ...]) -> Any:
    """Return what stands for a call: its lone argument, or all of them."""
    return arguments[0] if len(arguments) == 1 else arguments
