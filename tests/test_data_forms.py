"""Foreign, damaged and oddly written files: read as they were meant, or refused with the place and the way out."""

from __future__ import annotations

import datetime as dt
import decimal
import gzip
import json
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from effcli.errors import DataError
from tests.prepared import chosen


def written(folder: Path, content: str | bytes, name: str = "d.csv") -> Path:
    path = folder / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def parquet(folder: Path, **columns: Any) -> Path:
    pq.write_table(pa.table(columns), folder / "d.parquet")
    return folder / "d.parquet"


def failure(path: Path, evaluation: Path | None = None, **fields: Any) -> str:
    with pytest.raises(DataError) as caught:
        chosen(path, evaluation, **fields)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500
    return str(caught.value)


def labels_of(path: Path, evaluation: Path | None = None, **fields: Any) -> tuple[str, ...]:
    labels = chosen(path, evaluation, **fields)[1].labels
    assert labels is not None
    return labels.names


def csv(folder: Path, *labels: str, header: str = "text,label", name: str = "d.csv") -> Path:
    return written(folder, header + "\n" + "".join(f"row {i},{label}\n" for i, label in enumerate(labels)), name)


GZIPPED = gzip.compress(b"text,label\na,1\n", mtime=0)  # of no time, so that every process collects the same tests
FAULTY_FILES = [
    (b"text,label\na\0b,1\nc,0\n", "d.csv", ["line 2: a NUL byte", "damaged"]),
    ("text,label\na,1\n".encode("utf-16-le"), "d.csv", ["line 1: a NUL byte", "--encoding utf-16-le"]),
    ("text,label\na,1\n".encode("utf-16-be"), "d.csv", ["line 1: a NUL byte", "--encoding utf-16-be"]),
    ("text,label\na,1\n".encode("utf-32"), "d.csv", ["--encoding utf-32"]),
    (b"text,label\na,1\n\x93hi\x94,1\n", "d.csv", ["line 3", "byte 0x93", "--encoding cp1252"]),
    (b"text,label\ra,1\rcaf\xe9,0\r", "d.csv", ["line 3", "--encoding latin-1"]),
    (b"text,label\r\na,1\r\n" * 9000 + b"\xe9", "d.csv", ["line 18001"]),
    (GZIPPED, "d.csv", ["d.csv' is no text but a gzip file; unpack it"]),
    (GZIPPED, "d.csv.gz", ["is none of .csv, .tsv"]),
    (b"PK\x03\x04\xff\xff", "d.csv", ["a zip file or a spreadsheet"]),
    (b"PAR1\xff\xff", "d.jsonl", ["a Parquet file; let its name end in .parquet"]),
    ('label,text\n1, "a, b"\n0,"c"\n', "d.csv", ["line 2", "remove the spaces before the quote mark"]),
    ("text,label,\na,1\nb,0\n", "d.csv", ["line 2: 2 fields where the header has 3 (text, label, column_3)"]),
    ("text:label\na:1\n", "d.csv", ["found: text:label; if this is more than one", "--delimiter"]),
    ("text,label\na,1\n", "d.tsv", ["found: text,label; if this is more than one", "--delimiter"]),
    ("nice film,1\nbad film,0\n", "d.csv", ["the first line must hold the names of the columns"]),
    ("Review Text,My Label\na,1\nb,0\n", "d.csv", ["use --label-column 'My Label'"]),
    ('{"text": "a\\ud800", "label": 1}\n', "d.jsonl", ["line 1: column 'text' holds half a surrogate pair"]),
    ('{"text": "a", "m": {"k": "\\ud800"}}\n', "d.jsonl", ["line 1: column 'm' holds half a surrogate pair"]),
    ('{"text": "a", "__line__": 1}\n', "d.jsonl", ["the column name '__line__' is reserved; rename it"]),
    ("text,__line__\na,1\n", "d.csv", ["the column name '__line__' is reserved; rename it"]),
    ('{"te\\u0000xt": "a", "label": 1}\n', "d.jsonl", ["the column name 'te\\x00xt' is no text"]),
    ('{"text":' + "[" * 100_000 + "]" * 100_000 + "}\n", "d.jsonl", ["line 1: malformed JSON"]),
    ('[{"text": "a"},\n{"text": "b"}] x', "d.json", ["line 2: text after the end of the list"]),
    ("[ ]", "d.json", ["is empty"]),
    ("[" + "1," * 200_000 + "1]", "d.json", ["line 1: not an object"]),
]


@pytest.mark.parametrize(("content", "name", "words"), FAULTY_FILES)
def test_a_faulty_file_is_refused_with_the_place_and_the_way_out(
    content: str | bytes, name: str, words: list[str], tmp_path: Path
) -> None:
    message = failure(written(tmp_path, content, name))
    assert all(word in message for word in words), message


@pytest.mark.parametrize("mark", [b"\xef\xbb\xbf", b""])
@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
def test_marks_line_ends_and_separators_may_be_any(tmp_path: Path, mark: bytes, end: str, delimiter: str) -> None:
    lines = (delimiter.join(cells) for cells in (("text", "label"), ("café", "x"), ('"b, c; d|e\tf"', "y"), ("", "x")))
    raw, problem = chosen(written(tmp_path, mark + (end.join(lines) + end).encode()))
    assert raw.train["text"][:] == ["café", "b, c; d|e\tf", ""]
    assert problem.labels is not None
    assert problem.labels.names == ("x", "y")


WORDS = ["null", "NA", "None", "nan", "N/A", "NULL", "#N/A", "<NA>"]


@pytest.mark.parametrize("form", ["csv", "tsv", "jsonl", "json", "parquet"])
def test_words_for_nothing_are_texts_and_class_names_in_every_form(tmp_path: Path, form: str) -> None:
    rows = [{"text": word, "label": word} for word in WORDS]
    if form == "parquet":
        path = parquet(tmp_path, text=WORDS, label=WORDS)
    elif form in {"jsonl", "json"}:
        content = json.dumps(rows) if form == "json" else "\n".join(map(json.dumps, rows))
        path = written(tmp_path, content, f"d.{form}")
    else:
        mark = "," if form == "csv" else "\t"
        path = written(tmp_path, "\n".join([f"text{mark}label", *(f"{w}{mark}{w}" for w in WORDS)]), f"d.{form}")
    raw, problem = chosen(path)
    assert raw.train["text"][:] == WORDS
    assert problem.labels is not None
    assert problem.labels.names == tuple(sorted(WORDS))


def test_a_missing_value_of_a_parquet_file_is_no_word(tmp_path: Path) -> None:
    path = parquet(tmp_path, text=["a", None, "null"], label=["x", "y", None])
    assert "row 3: the label in column 'label' is empty" in failure(path)


def test_truth_values_are_one_pair_of_classes_however_they_are_written(tmp_path: Path) -> None:
    train = csv(tmp_path, "True", "false", " TRUE", "False ")
    assert labels_of(train) == ("false", "true")
    rows = [{"text": "a", "label": True}, {"text": "b", "label": False}]
    as_json = written(tmp_path, "\n".join(map(json.dumps, rows)), "v.jsonl")
    assert labels_of(train, as_json) == labels_of(as_json, train) == ("false", "true")


def test_labels_that_differ_in_case_alone_are_said(tmp_path: Path) -> None:
    _, problem = chosen(csv(tmp_path, "Yes", "no", "yes"))
    assert "Labels of column 'label' differ in case alone, and are classes of their own: Yes, yes." in problem.notes


def test_a_label_in_another_case_is_recognised_but_not_taken(tmp_path: Path) -> None:
    message = failure(csv(tmp_path, "pos", "neg"), csv(tmp_path, "Pos", name="v.csv"))
    assert "known: neg, pos, of which 'pos' may be meant" in message


def test_decimal_commas_are_asked_about(tmp_path: Path) -> None:
    path = written(tmp_path, "text;label\na;3\nb;3,5\nc;1,25\n")
    assert "line 3: the label '3,5' is a number with a decimal comma; write 3.5, or use --task" in failure(path)
    path.write_text("text;label\na;3,5\nb;1,25\n")
    assert labels_of(path, task="classification") == ("1,25", "3,5")


@pytest.mark.parametrize("others", [["2,000"], ["5"], ["-12,345", "0"]])
def test_a_comma_that_may_set_thousands_apart_is_no_decimal_comma(others: list[str], tmp_path: Path) -> None:
    path = written(tmp_path, "\n".join(["text;label", "a;1,000", *(f"b;{label}" for label in others)]))
    message = failure(path)
    assert "line 2: the label '1,000' may mean 1000 or 1.000; write the one that is meant, or use --task" in message


@pytest.mark.parametrize("other", ["3,5", "0,125", "1234,500"])
def test_a_comma_means_what_another_label_shows(other: str, tmp_path: Path) -> None:
    message = failure(written(tmp_path, f"text;label\na;1,000\nb;{other}\n"))
    assert f"line 3: the label '{other}' is a number with a decimal comma" in message


def test_what_is_no_regular_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.csv")
    assert "pipe.csv' is not a regular file; write what it gives to a file" in failure(tmp_path / "pipe.csv")


def test_a_number_of_thousands_of_digits_is_a_word(tmp_path: Path) -> None:
    message = failure(csv(tmp_path, "9" * 5000, "1"))
    assert "is not a number, but others are (1)" in message


def test_a_column_in_another_case_is_suggested(tmp_path: Path) -> None:
    assert "Did you mean 'Target'?" in failure(csv(tmp_path, "a", "b", header="text,Target"), label_column="TARGET")


@pytest.mark.parametrize(
    ("labels", "names"),
    [
        (pa.array(["x", "y"]).dictionary_encode(), ("x", "y")),
        (pa.array(["x", "y"], pa.large_string()), ("x", "y")),
        (pa.array(["x", "y"], pa.string_view()), ("x", "y")),
        (pa.array([1, 0], pa.uint8()), ("0", "1")),
        (pa.array([decimal.Decimal("2.0"), decimal.Decimal("3.0")]), ("2", "3")),
        (pa.array([1.5, 2], pa.float64()), ()),
    ],
)
def test_labels_of_any_type_of_word_or_number_are_read(tmp_path: Path, labels: pa.Array, names: tuple[str]) -> None:
    assert labels_of(parquet(tmp_path, text=["a", "b"], label=labels)) == names


@pytest.mark.parametrize(
    ("labels", "kind"),
    [
        ([dt.date(2020, 1, 1), dt.date(2020, 1, 2)], "date32"),
        ([b"a", b"b"], "binary"),
        ([[1], [2]], "nested"),
    ],
)
def test_labels_of_other_types_are_refused_by_name(tmp_path: Path, labels: list[Any], kind: str) -> None:
    assert kind in failure(parquet(tmp_path, text=["a", "b"], label=labels))


def test_a_parquet_file_without_rows_or_with_a_name_used_twice_is_told_so(tmp_path: Path) -> None:
    assert "has columns (text, label) but no rows" in failure(parquet(tmp_path, text=[], label=[]))
    table = pa.table([["a"], ["b"], [1]], names=["text", "text", "label"])
    pq.write_table(table, tmp_path / "twice.parquet")
    assert "the column name 'text' is used twice" in failure(tmp_path / "twice.parquet")


def test_a_json_list_may_be_cut_anywhere_between_two_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"text": f"a\n{'[{' * index}", "label": index * 1111} for index in range(9)]
    path = written(tmp_path, json.dumps(rows, indent=1), "d.json")
    for size in (1, 2, 3, 7, 1000):
        monkeypatch.setattr("effcli.data.json_rows.PIECE_CHARACTERS", size)
        raw, _ = chosen(path)
        assert [{"text": row["text"], "label": row["label"]} for row in raw.train] == rows
        assert raw.train["__line__"][:] == list(range(2, 38, 4))
        path.write_text(path.read_text() + " ")  # other bytes, or it would be found in the cache
