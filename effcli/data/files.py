"""Local data: CSV, TSV, JSON lines, Parquet and `save_to_disk` folders as `datasets.Dataset`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from effcli.data import csv_rows, json_rows
from effcli.data.cache import content_key, kept
from effcli.data.places import LINE_COLUMN, check_column_names
from effcli.errors import DataError, first_line, nearest
from effcli.files import at_home

if TYPE_CHECKING:
    from datasets import Dataset, Features

SUFFIXES = (".csv", ".tsv", ".json", ".jsonl", ".ndjson", ".parquet")
OTHER_SUFFIXES = (".txt", ".gz", ".zip", ".zst", ".xlsx", ".xls", ".arrow", ".pkl", ".pq", ".yaml", ".xml")
FORMAT_VERSION = 2
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


def refuse_missing(name: str) -> None:
    """Raise where a name can only be meant as a local path and nothing is there.

    Raises:
        DataError: with the nearest name that is there.
    """
    path = at_home(name)
    if is_path_like(name) and not path.exists():
        raise missing_path(name, path)


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
    if not path.is_file():  # a pipe would be waited for, and gives its rows only once
        raise DataError(f"'{name}' is not a regular file; write what it gives to a file and name that")
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

    with _unchanged(path):
        layout = csv_rows.read_layout(path, delimiter=delimiter, encoding=encoding)
        features = Features({**dict.fromkeys(layout.columns, Value("string")), LINE_COLUMN: Value("int64")})
        how = (layout.delimiter, layout.quoted, layout.encoding)
        rows = _from_rows(path, layout, csv_rows.csv_rows, features, how)
    return Table(rows=rows, name=name, written_numbers=layout.written_numbers, notes=layout.notes)


def _load_json(name: str, path: Path, encoding: str) -> Table:
    from datasets import Features, Json, Value

    types = {"text": Value("string"), "bool": Value("bool"), "int": Value("int64"), "float": Value("float64")}
    with _unchanged(path):
        layout = json_rows.read_layout(path, encoding=encoding)
        columns = {column: types.get(kind, Json()) for column, kind in layout.kinds.items()}
        features = Features({**columns, LINE_COLUMN: Value("int64")})
        rows = _from_rows(path, layout, json_rows.json_rows, features, (layout.is_list, layout.encoding))
    return Table(rows=rows, name=name)


def _from_rows(
    path: Path,
    layout: csv_rows.CsvLayout | json_rows.JsonLayout,
    read: Callable[[Path, Any], Iterator[dict[str, Any]]],
    features: Features,
    how: tuple[object, ...],
) -> Dataset:
    """Return the rows of a text file, written to the cache where it does not hold them yet.

    `how` is what rows depend on beside the bytes of the file and the columns.
    """
    from datasets import Dataset

    key = content_key(path, FORMAT_VERSION, features, how)

    def load(folder: str) -> Dataset:
        rows: Dataset = Dataset.from_generator(
            read, features=features, cache_dir=folder, gen_kwargs={"path": path, "layout": layout}, fingerprint=key
        )
        return rows

    return kept(f"rows-{key}", load, num_rows=layout.num_rows)


@contextmanager
def _unchanged(path: Path) -> Iterator[None]:
    """Check that a file that is read more than once stays the same meanwhile.

    Raises:
        DataError: it was written to, or cannot be opened.
    """
    try:
        before = path.stat()
        yield
        after = path.stat()
    except OSError as error:
        raise DataError(f"cannot read '{path}': {error.strerror or first_line(error)}") from error
    if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
        raise DataError(f"'{path}' changed while it was read; start again when it is complete")


def _load_parquet(name: str, path: Path) -> Table:
    import pyarrow as pa
    import pyarrow.parquet as pq
    from datasets import Dataset
    from datasets.exceptions import DatasetGenerationError

    def load(folder: str) -> Dataset:
        rows: Dataset = Dataset.from_parquet(str(path), cache_dir=folder)
        rows._fingerprint = key  # its own one knows the path and not the content
        return rows

    try:
        with _unchanged(path):
            columns, num_rows = pq.read_schema(path).names, pq.read_metadata(path).num_rows
            check_column_names(columns, f"'{name}'")
            if not num_rows:
                raise DataError(f"'{name}' has columns ({', '.join(columns)}) but no rows")
            key = content_key(path, FORMAT_VERSION)
            rows = kept(f"rows-{key}", load, num_rows=num_rows)
    except (DatasetGenerationError, pa.ArrowException, OSError, ValueError) as error:
        raise DataError(f"'{name}' is not a readable Parquet file; check that it was written completely") from error
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
