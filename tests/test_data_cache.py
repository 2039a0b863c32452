"""What is kept between runs is used again, and never believed where it is damaged, old, or could not be written."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pytest
from datasets import Dataset

from effcli.data import csv_rows
from effcli.data import tokenise as tokenising
from effcli.data.encode import encode_batch
from effcli.data.source import load_tables
from effcli.errors import DataError, WriteError
from effcli.spec import DataSpec
from tests.prepared import tokenised
from tests.small_disks import files_of_at_most


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    return tmp_path / "cache" / "effcli"


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "d.csv"
    path.write_text("text,label\n" + "".join(f"{'a b c ' * (index % 5 + 1)},{index % 2}\n" for index in range(600)))
    return path


def the_file(folder: Path, pattern: str) -> Path:
    (found,) = folder.rglob(pattern)
    return found


def message_on_a_full_disk(data: Path) -> str:
    with files_of_at_most(2000), pytest.raises(WriteError) as caught:
        tokenised(data)
    return str(caught.value)


def first_rows(stored: Path, num_rows: int) -> bytes:
    """Return an Arrow stream of the first rows of a file, written to its end."""
    table = pa.ipc.open_stream(stored.read_bytes()).read_all()
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table.slice(0, num_rows))
    return sink.getvalue().to_pybytes()


def test_a_second_run_tokenises_nothing(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts: list[int] = []

    def counted(batch: dict[str, list[Any]], **options: Any) -> dict[str, list[Any]]:
        counts.append(len(batch["text"]))
        return encode_batch(batch, **options)

    monkeypatch.setattr(tokenising, "encode_batch", counted)
    first = tokenised(data)
    assert sum(counts) == 600
    assert max(counts) == tokenising.ROWS_AT_ONCE
    counts.clear()
    assert tokenised(data).train[:] == first.train[:]
    assert counts == []


def test_a_copy_under_another_name_is_the_same_data(data: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy.csv"
    copy.write_bytes(data.read_bytes())
    assert tokenised(data).train.cache_files == tokenised(copy).train.cache_files


@pytest.mark.parametrize("kept", [0, 7, 1000, -9, -1])
@pytest.mark.parametrize("pattern", ["tokens-*.arrow", "generator-train.arrow"])
def test_a_file_that_was_not_written_to_its_end_is_made_again(data: Path, cache: Path, pattern: str, kept: int) -> None:
    whole = tokenised(data).train[:]
    if pattern != "tokens-*.arrow":
        the_file(cache, "tokens-*.arrow").unlink()
    stored = the_file(cache, pattern)
    stored.write_bytes(stored.read_bytes()[:kept])
    assert tokenised(data).train[:] == whole


def test_token_ids_that_break_off_between_two_batches_are_made_again(data: Path, cache: Path) -> None:
    whole = tokenised(data).train[:]
    tokens = the_file(cache, "tokens-*.arrow")
    tokens.write_bytes(first_rows(tokens, 590)[:-8])  # pyarrow reads this without complaint
    assert tokenised(data).train[:] == whole


def test_rows_that_end_too_early_though_in_good_order_are_read_again(data: Path, cache: Path) -> None:
    whole = tokenised(data)
    the_file(cache, "tokens-*.arrow").unlink()
    rows = the_file(cache, "generator-train.arrow")
    rows.write_bytes(first_rows(rows, 590))
    assert tokenised(data).train_rows == whole.train_rows == 600


def test_a_damaged_description_of_the_rows_is_made_again(data: Path, cache: Path) -> None:
    tokenised(data)
    the_file(cache, "dataset_info.json").write_text("{")
    assert tokenised(data).train_rows == 600


def test_what_a_killed_run_left_is_no_hindrance(data: Path, cache: Path) -> None:
    whole = tokenised(data).train[:]
    rows = the_file(cache, "generator-train.arrow").parent
    half_written = rows.with_name(rows.name + ".incomplete")
    rows.rename(half_written)
    (half_written / "generator-train.arrow").write_bytes(b"half")
    tokens = the_file(cache, "tokens-*.arrow")
    (cache / "writing-1234").mkdir()
    tokens.rename(cache / "writing-1234" / tokens.name)
    assert tokenised(data).train[:] == whole


def test_a_damaged_copy_of_a_parquet_file_is_not_blamed_on_the_file(data: Path, tmp_path: Path, cache: Path) -> None:
    rows = [{"text": "a b", "label": 0}, {"text": "c", "label": 1}]
    Dataset.from_list(rows).to_parquet(str(tmp_path / "d.parquet"))
    whole = tokenised(tmp_path / "d.parquet").train[:]
    stored = the_file(cache, "parquet-train.arrow")
    stored.write_bytes(stored.read_bytes()[:-20])
    the_file(cache, "tokens-*.arrow").unlink()
    assert tokenised(tmp_path / "d.parquet").train[:] == whole


# datasets loses sight of its half-written file, which Python closes some time later and complains about.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("done_before", ["nothing", "rows"])
def test_a_full_disk_is_told_as_such_and_leaves_nothing_behind(data: Path, cache: Path, done_before: str) -> None:
    if done_before == "rows":
        load_tables(DataSpec(train=str(data)), seed=42)
    message = message_on_a_full_disk(data)
    gc.collect()
    assert f"the cache folder '{cache.parent}' cannot be written" in message
    assert "HF_DATASETS_CACHE" in message
    assert not [*cache.glob("tokens-*"), *cache.glob("writing-*")]
    assert tokenised(data).train_rows == 600


def test_a_full_disk_is_not_blamed_on_a_parquet_file(tmp_path: Path) -> None:
    path = tmp_path / "d.parquet"
    Dataset.from_list([{"text": "a b" * 9, "label": index % 2} for index in range(900)]).to_parquet(str(path))
    assert "cannot be written" in message_on_a_full_disk(path)


def test_a_folder_of_our_own_that_cannot_be_written_is_replaced(data: Path, cache: Path) -> None:
    cache.parent.mkdir()
    cache.write_text("a file, not a folder")
    assert tokenised(data).train_rows == 600


def test_a_file_that_changes_while_it_is_read_is_refused(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read_and_grow(path: Path, **options: Any) -> csv_rows.CsvLayout:
        layout = read_layout(path, **options)
        with path.open("a") as file:
            file.write("a,1\n")
        os.utime(path, ns=(1, 1))
        return layout

    read_layout = csv_rows.read_layout
    monkeypatch.setattr(csv_rows, "read_layout", read_and_grow)
    with pytest.raises(DataError, match=r"d\.csv' changed while it was read"):
        load_tables(DataSpec(train=str(data)), seed=42)
    monkeypatch.undo()


def test_nothing_is_written_beside_the_data_of_the_user(tmp_path: Path) -> None:
    rows = [{"text": "a b", "label": "x"}, {"text": "c", "label": "y"}] * 3
    Dataset.from_list(rows).save_to_disk(str(tmp_path / "saved"))
    before = sorted((tmp_path / "saved").rglob("*"))
    assert tokenised(tmp_path / "saved", eval_fraction=0.3, limit_rows=5).eval_rows == 2
    assert sorted((tmp_path / "saved").rglob("*")) == before
