"""Reads saved records and comparisons, and refuses in one line what is neither. No torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from effcli.errors import DataError
from effcli.measure.comparison_record import ComparisonRecord
from effcli.measure.record import SCHEMA_VERSION, RunRecord
from effcli.run_folder import COMPARISON, RECORD
from effcli.units import GIB, cut, format_bytes, listed

LARGEST_BYTES = GIB // 2
"""A record of 100,000 updates takes some 20 MB; what is far larger is something else."""
WANTED = f"give {RECORD} of a run, {COMPARISON} of a comparison, or a folder that holds one"


class NotARecordError(DataError):
    """A file is no record of effcli that this version reads; `reason` says so without asking for another file."""

    def __init__(self, reason: str, hint: str = WANTED) -> None:
        super().__init__(f"{reason}; {hint}")
        self.reason = reason if hint is WANTED else str(self)


def read_document(path: Path) -> RunRecord | ComparisonRecord:
    """Return the record or the comparison that is saved at `path`, a file or the folder of a run or a comparison.

    Raises:
        DataError: there is none, it cannot be read, or it is something else.
    """
    file = _file_in(path) if path.is_dir() else path
    document = _document(file)
    kind = _kind(document, file)
    try:
        found = kind.model_validate(document)
    except ValidationError as error:
        fault = error.errors(include_url=False, include_input=False, include_context=False)[0]
        field = ".".join(map(str, fault["loc"]))
        raise NotARecordError(
            f"'{file}' is not a record of effcli: {error.error_count()} of its fields do not fit, "
            f"such as {cut(field)}: {fault['msg']}"
        ) from error
    if isinstance(found, ComparisonRecord):
        for run in document["runs"] if found.runs else ():
            _check_version(run.get("schema_version", SCHEMA_VERSION), file)
        _check_places(found, file)
    return found


def read_record(path: Path) -> RunRecord:
    """Return the record of one run that is saved at `path`.

    Raises:
        DataError: see `read_document`; or it is a comparison.
    """
    found = read_document(path)
    if isinstance(found, ComparisonRecord):
        raise NotARecordError(f"'{path}' is the record of a comparison", "give that of one of its runs")
    return found


def _file_in(folder: Path) -> Path:
    for name in (COMPARISON, RECORD):
        if (folder / name).is_file():
            return folder / name
    inside = sorted(str(file.parent) for file in folder.glob(f"*/{RECORD}"))
    hint = f"there are runs inside it: {listed(inside)}" if inside else "give the folder of a run or of a comparison"
    raise DataError(f"'{folder}' holds neither {RECORD} nor {COMPARISON}; {hint}")


def _document(file: Path) -> Mapping[str, Any]:
    """Return the JSON object in a file."""
    try:
        if file.exists() and not file.is_file():
            raise NotARecordError(f"'{file}' is neither a file nor a folder")
        if (num_bytes := file.stat().st_size) > LARGEST_BYTES:
            raise NotARecordError(f"'{file}' is not a record of effcli: it is {format_bytes(num_bytes)} large")
        content = file.read_bytes()
    except OSError as error:
        raise NotARecordError(f"cannot read the record '{file}': {error.strerror}") from error
    try:
        document = json.loads(content)
    except (ValueError, RecursionError) as error:
        why = str(error).partition("\n")[0]
        raise NotARecordError(
            f"'{file}' is not a record of effcli: it is cut off or no JSON ({cut(why, 80)})"
        ) from error
    if not isinstance(document, dict):
        raise NotARecordError(f"'{file}' is not a record of effcli: it holds no JSON object")
    return document


def _kind(document: Mapping[str, Any], file: Path) -> type[RunRecord] | type[ComparisonRecord]:
    """Return what a document claims to be."""
    command = document.get("command")
    if not isinstance(command, str):
        raise NotARecordError(f"'{file}' is not a record of effcli: it names no command")
    _check_version(document.get("schema_version"), file)
    if "attempts" in document:
        return ComparisonRecord
    if "spec" in document:
        return RunRecord
    raise NotARecordError(
        f"'{file}' holds what `effcli {cut(command)}` says, which is no run",
        "give a record of `effcli train` or `effcli compare`",
    )


def _check_version(version: Any, file: Path) -> None:
    if type(version) is not int:  # for true and 1.0 are equal to 1
        shown = cut(json.dumps(version))
        raise NotARecordError(f"'{file}' is not a record of effcli: its schema version is {shown}, no whole number")
    if version != SCHEMA_VERSION:
        raise NotARecordError(
            f"'{file}' is of schema version {version}, and this effcli reads {SCHEMA_VERSION}",
            "type: pip install --upgrade effcli",
        )


def _check_places(found: ComparisonRecord, file: Path) -> None:
    """Refuse a comparison whose attempts name runs that it does not hold."""
    for attempt in found.attempts:
        if attempt.run is not None and not 0 <= attempt.run < len(found.runs):
            raise NotARecordError(
                f"'{file}' is damaged: '{cut(attempt.name)}' is said to be run {attempt.run} of {len(found.runs)}"
            )
