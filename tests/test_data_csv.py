"""Strict reading of CSV, TSV and JSON lines: values stay as written, faults have their line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from effcli.data.csv_rows import csv_rows, read_layout
from effcli.data.json_rows import json_rows
from effcli.data.json_rows import read_layout as read_json_layout
from effcli.errors import DataError


def read(path: Path, *, delimiter: str | None = None, encoding: str = "utf-8") -> list[dict[str, str | int]]:
    return list(csv_rows(path, read_layout(path, delimiter=delimiter, encoding=encoding)))


def written(folder: Path, content: str | bytes, name: str = "f.csv") -> Path:
    path = folder / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def failure(path: Path, **options: str) -> str:
    with pytest.raises(DataError) as caught:
        read(path, **options)
    message = str(caught.value)
    assert "\n" not in message
    return message


def json_failure(path: Path) -> str:
    with pytest.raises(DataError) as caught:
        read_json_layout(path, encoding="utf-8")
    return str(caught.value)


def test_a_byte_order_mark_is_no_part_of_the_first_name(tmp_path: Path) -> None:
    path = written(tmp_path, b"\xef\xbb\xbfsentence,label\nhello,1\n")
    assert read(path) == [{"sentence": "hello", "label": "1", "__line__": 2}]


def test_semicolons_are_recognised_and_said(tmp_path: Path) -> None:
    path = written(tmp_path, "sentence;label\nwell, well;1\n")
    assert read(path) == [{"sentence": "well, well", "label": "1", "__line__": 2}]
    assert read_layout(path, delimiter=None, encoding="utf-8").notes == (
        f"The fields of '{path}' are separated by ';'.",
    )


def test_an_unquoted_comma_is_an_error_with_line_columns_and_hints(tmp_path: Path) -> None:
    message = failure(written(tmp_path, "sentence,label\nfine,0\nhello, world,1\n"))
    assert "line 3: 3 fields where the header has 2 (sentence, label)" in message
    assert "quotes" in message
    assert "--delimiter" in message


def test_latin_1_is_an_error_with_line_and_hint_and_reads_when_told(tmp_path: Path) -> None:
    path = written(tmp_path, b"sentence,label\nfine,0\ncaf\xe9,1\n")
    assert "line 3: the text is not utf-8 (byte 0xe9); use --encoding latin-1" in failure(path)
    assert read(path, encoding="latin-1")[1]["sentence"] == "café"


def test_the_line_of_a_wrong_byte_is_right_far_into_the_file(tmp_path: Path) -> None:
    path = written(tmp_path, b"sentence,label\n" + "añb,1\n".encode() * 50_000 + b"caf\xe9,1\n")
    assert "line 50002" in failure(path)


def test_utf_16_is_recognised_by_its_mark(tmp_path: Path) -> None:
    path = written(tmp_path, "text,label\nna\u00efve,1\n".encode("utf-16"))
    assert "--encoding utf-16" in failure(path)
    assert read(path, encoding="utf-16")[0]["text"] == "na\u00efve"


def test_an_unknown_encoding_is_named(tmp_path: Path) -> None:
    for name in ("utf-9", "base64"):
        assert f"unknown encoding '{name}'" in failure(written(tmp_path, "text\na\n"), encoding=name)


def test_lines_are_counted_through_quoted_cells_that_span_lines(tmp_path: Path) -> None:
    path = written(tmp_path, 'text,label\n"one\ntwo",0\n\nthree,1\n')
    assert [row["__line__"] for row in read(path)] == [2, 5]
    assert read(path)[0]["text"] == "one\ntwo"
    assert "line 5" in failure(written(tmp_path, 'text,label\n"one\ntwo",0\n\nthree,1,2\n'))


def test_a_quote_that_is_never_closed_is_named_where_it_opens(tmp_path: Path) -> None:
    message = failure(written(tmp_path, 'text,label\nfine,0\n"open,1\nmore,0\n'))
    assert "line 3: a quoted field is never closed" in message


@pytest.mark.parametrize("word", ["null", "NA", "None", "nan", "", " padded "])
def test_words_for_nothing_stay_text(tmp_path: Path, word: str) -> None:
    assert read(written(tmp_path, f"text,label\n{word},1\n"))[0]["text"] == word


@pytest.mark.parametrize("content", ["", "\n\n"])
def test_an_empty_file_is_an_error(tmp_path: Path, content: str) -> None:
    assert "is empty" in failure(written(tmp_path, content))


def test_a_header_alone_is_an_error(tmp_path: Path) -> None:
    assert "has a header (text, label) but no rows" in failure(written(tmp_path, "text,label\n"))


def test_a_column_name_used_twice_is_an_error(tmp_path: Path) -> None:
    assert "the column name 'text' is used twice" in failure(written(tmp_path, "text,label,text\na,1,b\n"))


def test_a_column_without_a_name_gets_one(tmp_path: Path) -> None:
    assert read(written(tmp_path, ",text\n0,a\n")) == [{"column_1": "0", "text": "a", "__line__": 2}]


def test_a_tab_separated_file_without_quoting_keeps_its_quote_marks(tmp_path: Path) -> None:
    path = written(tmp_path, 'text\tlabel\n"half a quote\t1\nplain\t0\nand "closed"\t1\n', "f.tsv")
    assert [row["text"] for row in read(path)] == ['"half a quote', "plain", 'and "closed"']
    assert "Quote marks" in read_layout(path, delimiter=None, encoding="utf-8").notes[0]


def test_a_tab_separated_file_with_quoting_is_unquoted(tmp_path: Path) -> None:
    path = written(tmp_path, 'text\tlabel\n"a\tb"\t1\n"c ""d"""\t0\n', "f.tsv")
    assert [row["text"] for row in read(path)] == ["a\tb", 'c "d"']


def test_the_delimiter_can_be_given(tmp_path: Path) -> None:
    assert read(written(tmp_path, "text\tlabel\na,b\t1\n"), delimiter="\t")[0]["text"] == "a,b"
    assert read(written(tmp_path, "a:b,c\n1:2,3\n"), delimiter=":")[0]["b,c"] == "2,3"


@pytest.mark.parametrize("delimiter", ["::", '"', "\n"])
def test_a_delimiter_that_cannot_be_one_is_refused(tmp_path: Path, delimiter: str) -> None:
    assert "--delimiter is" in failure(written(tmp_path, "a::b\n1::2\n"), delimiter=delimiter)


def test_very_long_cells_are_read(tmp_path: Path) -> None:
    assert len(str(read(written(tmp_path, "text,label\n" + "x" * 300_000 + ",1\n"))[0]["text"])) == 300_000


def test_numbers_in_quotes_are_told_from_numbers(tmp_path: Path) -> None:
    path = written(tmp_path, 'text,a,b\nx,1.5,"1.5"\ny,2,"2"\n')
    assert read_layout(path, delimiter=None, encoding="utf-8").written_numbers == {"text", "a"}


def test_json_lines_keep_types_and_absent_keys_are_missing(tmp_path: Path) -> None:
    rows = [{"text": "a", "label": 1, "score": 1}, {"text": "b", "label": 0, "score": 0.5, "tags": ["x"]}]
    path = written(tmp_path, "\n\n".join(map(json.dumps, rows)), "f.jsonl")
    layout = read_json_layout(path, encoding="utf-8")
    assert layout.kinds == {"text": "text", "label": "int", "score": "float", "tags": "nested"}
    assert next(iter(json_rows(path, layout))) == {"text": "a", "label": 1, "score": 1, "tags": None, "__line__": 1}
    assert list(json_rows(path, layout))[1]["__line__"] == 3


@pytest.mark.parametrize("indent", [None, 2])
def test_a_json_list_gives_its_items_with_their_lines(tmp_path: Path, indent: int | None) -> None:
    items = [{"text": "a [b], {c}", "label": 1}, {"text": "d", "label": 0}]
    path = written(tmp_path, json.dumps(items, indent=indent), "f.json")
    rows = list(json_rows(path, read_json_layout(path, encoding="utf-8")))
    assert [{"text": row["text"], "label": row["label"]} for row in rows] == items
    assert [row["__line__"] for row in rows] == ([1, 1] if indent is None else [2, 6])


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ('{"text": "a"}\n{"text": \n', "line 2: malformed JSON"),
        ('{"text": "a"}\n["b"]\n', "line 2: not an object"),
        ('{"a": 1}\n{"a": 2}\n{"a": "x"}\n', "line 3: column 'a' holds text, but a number in line 1"),
        ('{"a": 99999999999999999999}\n', "line 1: the number in column 'a' does not fit 64 bits"),
        ("\n", "is empty"),
    ],
)
def test_faults_in_json_lines_have_their_line(tmp_path: Path, content: str, expected: str) -> None:
    assert expected in json_failure(written(tmp_path, content, "f.jsonl"))


@pytest.mark.parametrize("content", ['[{"a": 1}\n{"a": 2}]', '[{"a": 1},\n', "[]"])
def test_a_damaged_or_empty_json_list_is_an_error(tmp_path: Path, content: str) -> None:
    assert "'" in json_failure(written(tmp_path, content, "f.json"))
