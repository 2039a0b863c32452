"""Local data: CSV, TSV, JSON lines, Parquet and `save_to_disk` folders as `datasets.Dataset`."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from effcli.data import csv_rows, json_rows
from effcli.data.cache import cache_folder
from effcli.data.places import LINE_COLUMN
from effcli.errors import DataError, nearest

if TYPE_CHECKING:
    from datasets import Dataset, Features

SUFFIXES = (".csv", ".tsv", ".json", ".jsonl", ".ndjson", ".parquet")
OTHER_SUFFIXES = (".txt", ".gz", ".zip", ".zst", ".xlsx", ".xls", ".arrow", ".pkl", ".pq", ".yaml", ".xml")
FORMAT_VERSION = 1
"""Part of the cache key: raise it when rows of the same file are read differently than before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """One split. `written_numbers` are text columns in which numbers mean numbers, as in a CSV file."""

    rows: Dataset
    name: str
    written_numbers: frozenset[str] = frozenset()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Splits:
    """The splits of one source, by name; a file has the one split `train`."""

    tables: dict[str, Table]
    name: str


def is_path_like(name: str) -> bool:
    """Return whether `name` can only be meant as a local path, so that no network is tried for it."""
    return name.startswith((".", "/", "~")) or "\\" in name or name.lower().endswith(SUFFIXES + OTHER_SUFFIXES)


def missing_path(name: str, path: Path) -> DataError:
    """Return the error for a path that does not exist, with the nearest name in its folder."""
    if "://" in name:
        return DataError(f"'{name}' is an address, from which nothing is read; download the file and name it")
    folder = path.parent
    if not folder.is_dir():
        return DataError(f"no such file or folder: '{name}' (the folder '{folder}' does not exist)")
    names = sorted(entry.name for entry in folder.iterdir())
    return DataError(f"no such file or folder: '{name}'.{nearest(path.name, names)}".removesuffix("."))


def load_local(name: str, path: Path, *, delimiter: str | None, encoding: str) -> Splits:
    """Return the splits of an existing file or folder.

    Raises:
        DataError: the file cannot be read, is malformed or empty, or is of a kind that is not supported.
    """
    if path.is_dir():
        return _load_folder(name, path)
    suffix = path.suffix.lower()
    if suffix in {".csv", ".tsv"} or (suffix == ".txt" and delimiter is not None):
        table = _load_csv(name, path, delimiter, encoding)
    elif suffix in {".json", ".jsonl", ".ndjson"}:
        table = _load_json(name, path, encoding)
    elif suffix == ".parquet":
        table = _load_parquet(name, path)
    else:
        hint = "; add --delimiter to read it as columns" if suffix == ".txt" else ""
        raise DataError(f"'{name}' is none of {', '.join(SUFFIXES)} or a save_to_disk folder{hint}")
    return Splits(tables={"train": table}, name=name)


def _load_csv(name: str, path: Path, delimiter: str | None, encoding: str) -> Table:
    from datasets import Features, Value

    layout = csv_rows.read_layout(path, delimiter=delimiter, encoding=encoding)
    features = Features({**dict.fromkeys(layout.columns, Value("string")), LINE_COLUMN: Value("int64")})
    rows = _from_rows(path, layout, csv_rows.csv_rows, features)
    return Table(rows=rows, name=name, written_numbers=layout.written_numbers, notes=layout.notes)


def _load_json(name: str, path: Path, encoding: str) -> Table:
    from datasets import Features, Json, Value

    layout = json_rows.read_layout(path, encoding=encoding)
    types = {"text": Value("string"), "bool": Value("bool"), "int": Value("int64"), "float": Value("float64")}
    columns = {column: types.get(kind, Json()) for column, kind in layout.kinds.items()}
    rows = _from_rows(path, layout, json_rows.json_rows, Features({**columns, LINE_COLUMN: Value("int64")}))
    return Table(rows=rows, name=name)


def _from_rows(
    path: Path, layout: Any, read: Callable[[Path, Any], Iterator[dict[str, Any]]], features: Features
) -> Dataset:
    """Return the rows written to the Arrow cache, keyed by path, size, time of change and layout."""
    from datasets import Dataset

    stat = path.stat()
    key = (FORMAT_VERSION, str(path.resolve()), stat.st_size, stat.st_mtime_ns, _stable(layout))
    dataset: Dataset = Dataset.from_generator(
        read,
        features=features,
        cache_dir=str(cache_folder()),
        gen_kwargs={"path": path, "layout": layout},
        fingerprint=hashlib.sha256(repr(key).encode()).hexdigest()[:32],
    )
    return dataset


def _stable(layout: Any) -> list[str]:
    """Return the layout's fields in a form that is the same in every process (sets are not)."""
    values = [getattr(layout, field) for field in layout.__slots__]
    return [repr(sorted(value)) if isinstance(value, frozenset) else repr(value) for value in values]


def _load_parquet(name: str, path: Path) -> Table:
    import pyarrow as pa
    from datasets import Dataset
    from datasets.exceptions import DatasetGenerationError

    try:
        rows: Dataset = Dataset.from_parquet(str(path), cache_dir=str(cache_folder()))
    except (DatasetGenerationError, pa.ArrowException, OSError, ValueError) as error:
        raise DataError(f"'{name}' is not a readable Parquet file; check that it was written completely") from error
    if not len(rows):
        raise DataError(f"'{name}' has columns ({', '.join(rows.column_names)}) but no rows")
    return Table(rows=rows, name=name)


def _load_folder(name: str, path: Path) -> Splits:
    from datasets import DatasetDict, load_from_disk

    if not any((path / marker).is_file() for marker in ("dataset_dict.json", "state.json")):
        files = sorted(entry.name for entry in path.iterdir() if entry.suffix.lower() in SUFFIXES)
        hint = f"; name a file in it, such as --data {path / files[0]}" if files else ""
        raise DataError(f"the folder '{name}' was not written by datasets' save_to_disk{hint}")
    try:
        loaded = load_from_disk(str(path))
    except (OSError, ValueError, KeyError, IndexError) as error:
        raise DataError(f"the save_to_disk folder '{name}' is empty, damaged or incomplete; save it again") from error
    if not isinstance(loaded, DatasetDict):
        return Splits(tables={"train": Table(rows=loaded, name=name)}, name=name)
    tables = {split: Table(rows=rows, name=f"{name}, split {split}") for split, rows in loaded.items()}
    return Splits(tables=tables, name=name)
