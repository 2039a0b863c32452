"""Tokenised rows: what is skipped and cut is counted, and the cache notices every change."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from effcli.data.tokenise import texts, tokenise
from effcli.errors import DataError
from tests.prepared import END, START, UNKNOWN, chosen, tokenised, word_tokenizer


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_rows_become_token_ids_with_labels(tmp_path: Path) -> None:
    prepared = tokenised(write(tmp_path / "t.jsonl", [{"text": "a b", "label": "x"}, {"text": "c", "label": "y"}]))
    assert prepared.train[:] == {
        "input_ids": [[START, 4, 5, END], [START, 6, END]],
        "attention_mask": [[1, 1, 1, 1], [1, 1, 1]],
        "labels": [0, 1],
    }
    assert (prepared.train_rows, prepared.eval_rows, prepared.longest, prepared.num_tokens) == (2, 0, 4, 7)
    assert (prepared.skipped_rows, prepared.truncated_rows, prepared.eval) == (0, 0, None)


def test_a_text_of_eighty_words_is_cut_and_counted(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    rows = [{"text": "a b c", "label": 0}, {"text": "b " * 80, "label": 1}]
    prepared = tokenised(write(tmp_path / "t.jsonl", rows))
    assert (prepared.truncated_rows, prepared.longest) == (1, 64)
    assert prepared.train[1]["input_ids"] == [START, *[5] * 62, END]
    assert capfd.readouterr() == ("", "")


def test_a_text_that_just_fits_is_not_counted_as_cut(tmp_path: Path) -> None:
    rows = [{"text": "a " * 62, "label": 0}, {"text": "b", "label": 1}]
    assert tokenised(write(tmp_path / "t.jsonl", rows)).truncated_rows == 0


def test_of_a_pair_the_longer_text_is_cut(tmp_path: Path) -> None:
    rows = [{"sentence1": "a b", "sentence2": "c " * 20, "label": 0}, {"sentence1": "a", "sentence2": "b", "label": 1}]
    prepared = tokenised(write(tmp_path / "t.jsonl", rows), max_length=10, tokenizer=word_tokenizer(types=True))
    assert prepared.train[0]["input_ids"] == [START, 4, 5, END, *[6] * 5, END]
    assert prepared.train[0]["token_type_ids"] == [0] * 4 + [1] * 6
    assert prepared.truncated_rows == 1


def test_blank_rows_are_skipped_and_counted_in_both_splits(tmp_path: Path) -> None:
    rows = [{"text": text, "label": label} for text, label in (("a", 0), ("", 1), ("  ", 0), (None, 1), ("b", 1))]
    prepared = tokenised(write(tmp_path / "t.jsonl", rows), write(tmp_path / "v.jsonl", rows[:2]))
    assert (prepared.train_rows, prepared.eval_rows, prepared.skipped_rows) == (2, 1, 4)
    assert prepared.train["labels"][:] == [0, 1]


def test_a_language_model_skips_rows_of_one_token_and_stores_no_labels(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", [{"text": "a b"}, {"text": "a"}, {"text": "a b c"}])
    prepared = tokenised(path, is_decoder=True, tokenizer=word_tokenizer(special=False))
    assert prepared.train[:]["input_ids"] == [[4, 5], [4, 5, 6]]
    assert prepared.train.column_names == ["input_ids", "attention_mask"]
    assert (prepared.skipped_rows, prepared.num_tokens) == (1, 5)


def test_nothing_left_is_an_error(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", [{"text": "", "label": 0}, {"text": " ", "label": 1}])
    with pytest.raises(DataError, match="none of the 2 rows has text in column 'text'"):
        tokenised(path)


def test_a_length_without_room_for_text_is_an_error(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", [{"text": "a", "label": 0}, {"text": "b", "label": 1}])
    with pytest.raises(DataError, match="use --max-length 4 or more"):
        tokenised(path, max_length=2)


def test_numbers_are_read_as_text(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", [{"text": 7, "label": 0}, {"text": 8, "label": 1}])
    assert tokenised(path).train[0]["input_ids"] == [START, UNKNOWN, END]
    assert list(texts(*chosen(path))) == ["7", "8"]


def test_texts_are_those_of_the_training_rows_in_order(tmp_path: Path) -> None:
    rows = [{"sentence1": "a", "sentence2": "b", "label": 0}, {"sentence1": "", "sentence2": "c", "label": 1}]
    assert list(texts(*chosen(write(tmp_path / "t.jsonl", rows)))) == ["a", "b", "c"]


def test_scores_are_stored_as_scores(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", [{"text": "a", "label": 0.5}, {"text": "b", "label": 2}])
    assert tokenised(path).train["labels"][:] == [0.5, 2.0]


def test_the_cache_notices_another_length_label_or_text(tmp_path: Path) -> None:
    rows = [{"text": "a b c", "label": "x"}, {"text": "b", "label": "y"}]
    path = write(tmp_path / "t.jsonl", rows)
    assert tokenised(path).longest == 5
    assert tokenised(path, max_length=4).longest == 4
    assert tokenised(path, tokenizer=word_tokenizer(special=False)).longest == 3
    write(path, [{"text": "a b c", "label": "y"}, {"text": "b", "label": "w"}])
    assert tokenised(path).train["labels"][:] == [1, 0]
    assert tokenised(path).train.cache_files == tokenised(path).train.cache_files != []


def test_the_tokenizer_is_left_without_truncation(tmp_path: Path) -> None:
    raw, problem = chosen(write(tmp_path / "t.jsonl", [{"text": "a " * 9, "label": label} for label in (0, 1)]))
    tokenizer = word_tokenizer()
    prepared = tokenise(raw, problem, tokenizer, max_length=4)
    assert prepared.truncated_rows == 2
    assert tokenizer.backend_tokenizer.truncation is None


@pytest.mark.parametrize("form", ["csv", "tsv", "jsonl", "json", "parquet", "disk"])
def test_all_forms_give_the_same_tokens(tmp_path: Path, form: str) -> None:
    from datasets import Dataset

    rows = [{"text": "a, b", "label": "y"}, {"text": "c", "label": "x"}]
    path = tmp_path / f"t.{form}"
    if form in {"csv", "tsv"}:
        path.write_text('text,label\n"a, b",y\nc,x\n' if form == "csv" else "text\tlabel\na, b\ty\nc\tx\n")
    elif form in {"jsonl", "json"}:
        path.write_text(json.dumps(rows) if form == "json" else "\n".join(map(json.dumps, rows)))
    elif form == "parquet":
        Dataset.from_list(rows).to_parquet(str(path))
    else:
        Dataset.from_list(rows).save_to_disk(str(path))
    before = sorted(tmp_path.rglob("*"))
    assert tokenised(path).train[:] == {
        "input_ids": [[START, 4, UNKNOWN, 5, END], [START, 6, END]],
        "attention_mask": [[1] * 5, [1] * 3],
        "labels": [1, 0],
    }
    assert sorted(tmp_path.rglob("*")) == before
