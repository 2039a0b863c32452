"""All forms of data give the same rows; what is missing is named, and nothing reaches for the network by mistake."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import datasets
import pytest
from datasets import ClassLabel, Dataset, DatasetDict, Features, Value
from datasets.exceptions import DatasetNotFoundError

from effcli.data.hub import hub_names
from effcli.data.source import RawTables, load_tables
from effcli.errors import DataError, UnreachableError
from effcli.spec import DataSpec

ROWS = [{"text": "a, b", "label": "x"}, {"text": 'say "c"', "label": "y"}, {"text": "NA", "label": "x"}]


def contents(rows: Dataset | None) -> list[dict[str, Any]]:
    assert rows is not None
    return [{key: row[key] for key in ("text", "label")} for row in rows]


def load(train: str | Path, **fields: Any) -> RawTables:
    return load_tables(DataSpec(train=str(train), **fields), seed=42)


def failure(train: str | Path, **fields: Any) -> str:
    with pytest.raises((DataError, UnreachableError)) as caught:
        load(train, **fields)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("the network was tried")

    monkeypatch.setattr(datasets, "load_dataset", refuse)


def write_form(folder: Path, form: str) -> Path:
    path = folder / f"f.{form}"
    if form == "csv":
        path.write_text('text,label\n"a, b",x\n"say ""c""",y\nNA,x\n')
    elif form == "tsv":
        path.write_text('text\tlabel\na, b\tx\nsay "c"\ty\nNA\tx\n')
    elif form == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    elif form == "json":
        path.write_text(json.dumps(ROWS))
    elif form == "parquet":
        Dataset.from_list(ROWS).to_parquet(str(path))
    elif form == "disk":
        Dataset.from_list(ROWS).save_to_disk(str(path))
    else:
        DatasetDict({"train": Dataset.from_list(ROWS)}).save_to_disk(str(path))
    return path


@pytest.mark.parametrize("form", ["csv", "tsv", "jsonl", "json", "parquet", "disk", "dict"])
def test_all_forms_give_the_same_rows(tmp_path: Path, form: str, capfd: pytest.CaptureFixture[str]) -> None:
    path = write_form(tmp_path, form)
    capfd.readouterr()
    raw = load(path)
    assert contents(raw.train) == ROWS
    assert raw.eval is None
    assert capfd.readouterr() == ("", "")


def test_the_built_in_pairs_have_named_classes_and_a_validation_split() -> None:
    raw = load_tables(DataSpec(), seed=42)
    assert raw.eval is not None
    assert raw.name == "built-in"
    assert raw.train.column_names == ["sentence1", "sentence2", "label"]
    assert raw.train.features["label"].names == ["not_equivalent", "equivalent"]
    assert not {*map(str, raw.train)} & {*map(str, raw.eval)}


def test_a_cache_that_cannot_be_written_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = tmp_path / "blocked"
    blocked.write_text("a file, not a folder")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", blocked / "cache")
    assert contents(load(write_form(tmp_path, "csv")).train) == ROWS
    assert contents(load(write_form(tmp_path, "parquet")).train) == ROWS


@pytest.mark.parametrize("form", ["csv", "jsonl", "parquet"])
def test_a_changed_file_is_read_anew_though_size_and_time_stay(tmp_path: Path, form: str) -> None:
    path = write_form(tmp_path, form)
    before = path.stat()
    assert contents(load(path).train)[2]["text"] == "NA"
    if form == "parquet":
        Dataset.from_list([{**row, "text": row["text"].replace("NA", "NB")} for row in ROWS]).to_parquet(str(path))
    else:
        path.write_text(path.read_text().replace("NA", "NB"))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    assert contents(load(path).train)[2]["text"] == "NB"


def test_a_limit_takes_the_first_rows_of_training_only(tmp_path: Path) -> None:
    path = write_form(tmp_path, "csv")
    raw = load(path, eval=str(path), limit_rows=2)
    assert contents(raw.train) == ROWS[:2]
    assert contents(raw.eval) == ROWS
    assert len(raw.whole_train) == 3


def test_the_validation_split_is_used_and_the_test_split_never(tmp_path: Path) -> None:
    def table(text: str) -> Dataset:
        return Dataset.from_list([{"text": text, "label": "x"}])

    splits = {name: table(name) for name in ("train", "test", "validation_matched")}
    DatasetDict(splits).save_to_disk(str(tmp_path / "three"))
    assert contents(load(tmp_path / "three").eval)[0]["text"] == "validation_matched"
    DatasetDict({name: splits[name] for name in ("train", "test")}).save_to_disk(str(tmp_path / "two"))
    raw = load(tmp_path / "two")
    assert raw.eval is None
    assert "no validation split" in raw.notes[0]
    raw = load(write_form(tmp_path, "csv"), eval=str(tmp_path / "three"))
    assert contents(raw.eval)[0]["text"] == "validation_matched"
    assert "no split 'validation'; found: train, test" in failure(tmp_path / "f.csv", eval=str(tmp_path / "two"))


def test_a_source_without_training_split_is_an_error(tmp_path: Path) -> None:
    DatasetDict({"test": Dataset.from_list(ROWS)}).save_to_disk(str(tmp_path / "d"))
    assert "has no split 'train'; found: test" in failure(tmp_path / "d")


@pytest.mark.usefixtures("no_network")
@pytest.mark.parametrize(
    "name", ["./nowhere", "../nowhere/x", "/no/such/f", "~/no-such-file", "nowhere.csv", "x/y.parquet"]
)
def test_a_path_that_does_not_exist_never_reaches_for_the_network(name: str) -> None:
    assert "no such file or folder" in failure(name)


@pytest.mark.usefixtures("no_network")
def test_the_nearest_file_is_suggested(tmp_path: Path) -> None:
    (tmp_path / "train.csv").touch()
    assert "Did you mean 'train.csv'?" in failure(tmp_path / "trian.csv")


@pytest.mark.usefixtures("no_network")
@pytest.mark.parametrize("name", ["f.txt", "f.xlsx", "f"])
def test_other_files_are_refused_with_the_list_of_kinds(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("text\na\n")
    assert ".csv, .tsv" in failure(tmp_path / name)


def test_a_folder_without_rows_is_an_error(tmp_path: Path) -> None:
    Dataset.from_dict({"text": [], "label": []}).save_to_disk(str(tmp_path / "d"))
    assert "empty" in failure(tmp_path / "d")
    empty = {"train": Dataset.from_list(ROWS), "validation": Dataset.from_list(ROWS).select([])}
    DatasetDict(empty).save_to_disk(str(tmp_path / "e"))
    assert "e'" in failure(tmp_path / "e")


def test_a_plain_folder_is_refused_with_a_file_to_use(tmp_path: Path) -> None:
    write_form(tmp_path, "csv")
    message = failure(tmp_path)
    assert "save_to_disk" in message
    assert "f.csv" in message


@pytest.mark.parametrize("name", ["f.parquet", "d"])
def test_damaged_files_are_errors_of_one_line(tmp_path: Path, name: str) -> None:
    if name == "d":
        (tmp_path / name).mkdir()
        (tmp_path / name / "state.json").write_text("{}")
    else:
        (tmp_path / name).write_bytes(b"PAR1 no")
    assert name in failure(tmp_path / name)


def test_being_offline_is_said_with_the_way_out() -> None:
    with pytest.raises(UnreachableError) as caught:
        load("glue/mrpc")
    assert caught.value.exit_code == 8
    assert "HF_HUB_OFFLINE is set" in str(caught.value)
    assert "--data train.csv" in str(caught.value)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (DatasetNotFoundError("Dataset 'o/n' is a gated dataset on the Hub. You must be authenticated."), "is gated"),
        (DatasetNotFoundError("Dataset 'o/n' doesn't exist on the Hub or cannot be accessed."), "was not found"),
        (ConnectionError("Couldn't reach"), "cannot be reached"),
        (ValueError("BuilderConfig 'z' not found. Available: ['b', 'c']"), "it has: b, c; use --data o/n/b"),
        (ValueError("Config name is missing.\nPlease pick one among: ['b', 'c']"), "use --data o/n/b"),
        (RuntimeError("Dataset scripts are no longer supported\nmore"), "no longer supported"),
    ],
)
def test_failures_of_the_hub_are_told_apart(monkeypatch: pytest.MonkeyPatch, error: Exception, expected: str) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(datasets, "load_dataset", fail)
    assert expected in failure("o/n")


def test_a_hub_data_set_gives_train_and_validation(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str | None]] = []

    def fake(name: str, config: str | None, **_: Any) -> DatasetDict:
        asked.append((name, config))
        features = Features({"text": Value("string"), "label": ClassLabel(names=["no", "yes"])})
        rows = Dataset.from_list([{"text": "a", "label": 1}], features=features)
        return DatasetDict({"train": rows, "validation": rows, "test": rows})

    monkeypatch.setattr(datasets, "load_dataset", fake)
    raw = load("glue/sst2")
    assert asked == [("nyu-mll/glue", "sst2")]
    assert len(raw.train) == 1
    assert raw.eval is not None
    assert raw.name == "glue/sst2"


def test_hub_names_are_read_as_owner_name_and_configuration() -> None:
    assert hub_names("glue/mrpc")[0] == ("nyu-mll/glue", "mrpc")
    assert hub_names("imdb") == (("imdb", None),)
    assert hub_names("owner/name") == (("owner/name", None),)
    assert hub_names("owner/name/config") == (("owner/name", "config"),)
    with pytest.raises(DataError, match="neither a local file or folder nor"):
        hub_names("what is this?")
