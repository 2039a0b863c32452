"""Whatever bytes a data file holds: it is read, or refused with an error of ours in one line."""

from __future__ import annotations

import json
import tempfile
from io import BytesIO
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import strategies as st

from effcli.data.tokenise import texts, tokenise
from effcli.data.tokenizer import build_tokenizer
from tests.fuzzing import changed_bytes, fuzz, mutated, thorough
from tests.prepared import chosen

CSV = [
    "sentence,label\none two,0\nthree,1\nfour five six,0\n",
    'a;b\n"x; y";1\n"z ""q""";2\n',
    "text\tlabel\nx\tpos\ny\tneg\n",
    "sentence1,sentence2,label\n1,2,0.5\n3,4,1.5\n",
    "text,label\nnull,NA\nNone,nan\n",
]
JSON = [
    '{"text": "a b", "label": 1}\n{"text": "c", "label": 0}\n',
    '[{"text": "a", "label": "x"}, {"text": null, "label": "y"}]',
    '{"text": ["a"], "label": {"b": 1.5}}\n',
    '{"text": "a", "label": true}\n{"text": "b", "label": false}\n',
]
PIECES = [
    "\n", "\r", "\r\n", ",", ";", "\t", "|", '"', "'", "\x00", "\ufeff", "\u2028", "1e999", "-1", "nan", "null", "é",
    "{", "}", "[", "]", ":", "\\", "\\ud800", "9" * 25, "-0", "true", "label", "text", "\x0c", "\x1f", " ",
]  # fmt: skip


def parquet(columns: dict[str, list[Any]]) -> bytes:
    buffer = BytesIO()
    pq.write_table(pa.table(columns), buffer)
    return buffer.getvalue()


PARQUET = [
    parquet({"text": ["a b", "c", None], "label": [0, 1, 0]}),
    parquet({"text": [["x"], []], "label": [1.5, None]}),
    parquet({"text": [b"x", b"y"], "label": ["p", "q"]}),
    parquet({"label": [0]}),
    parquet({}),
]
CELLS = st.one_of(st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.floats(), st.text(max_size=6),
    st.sampled_from(["", "-1", "nan", "1,5", "x"]), st.lists(st.integers(0, 9), max_size=2))  # fmt: skip
ROWS = st.lists(st.dictionaries(st.sampled_from(["text", "label", "a", "", "labels"]), CELLS, max_size=3), max_size=5)


def as_json_lines(rows: list[dict[str, Any]]) -> bytes:
    return "\n".join(map(json.dumps, rows)).encode()


def written(texts: list[str]) -> st.SearchStrategy[bytes]:
    """Return files that are texts with a few places replaced."""
    return mutated(texts, PIECES).map(lambda text: text.encode("utf-8", "ignore"))


DATA: dict[str, st.SearchStrategy[bytes]] = {
    ".csv": st.one_of(st.binary(max_size=30), written(CSV)),
    ".tsv": st.one_of(st.binary(max_size=30), written(CSV)),
    ".json": st.one_of(ROWS.map(lambda rows: json.dumps(rows).encode()), written(JSON)),
    ".jsonl": st.one_of(ROWS.map(as_json_lines), changed_bytes([text.encode() for text in JSON])),
    ".parquet": st.one_of(st.binary(max_size=30), changed_bytes(PARQUET)),
    ".txt": st.binary(max_size=30),
}  # fmt: skip
SETTINGS = st.fixed_dictionaries(
    {},
    optional={
        "text_columns": st.sampled_from([("text",), ("a",), ("text", "a"), ("label",)]),
        "label_column": st.sampled_from(["label", "a", "text2", ""]),
        "delimiter": st.sampled_from([",", ";", "\t", "x", '"', "\n", "\r", "\x00", "\u2028", " "]),
        "encoding": st.sampled_from(
            ["utf-8", "latin-1", "utf-16", "ascii", "cp1252", "utf-7", "idna", "base64", "rot13"]
        ),
        "limit_rows": st.sampled_from([1, 2, 100]),
    },
)


@thorough
@pytest.mark.parametrize("suffix", DATA)
def test_any_data_file_is_read_or_refused(suffix: str, factor: int, tmp_path: Path) -> None:
    def read(drawn: tuple[bytes, dict[str, Any], str | None]) -> None:
        content, settings, task = drawn
        with tempfile.NamedTemporaryFile(dir=tmp_path, suffix=suffix) as file:
            file.write(content)
            file.flush()
            raw, problem = chosen(Path(file.name), task=task, is_decoder=task == "causal-lm", **settings)
            tokenizer = build_tokenizer(texts(raw, problem), vocab_size=50, model_type="distilbert", max_length=16)
            tokenise(raw, problem, tokenizer, max_length=16)

    tasks = st.sampled_from([None, "classification", "causal-lm"])
    few = {".parquet": 15, ".txt": 5}.get(suffix, 20)
    fuzz(st.tuples(DATA[suffix], SETTINGS, tasks), read, examples=few * factor)
