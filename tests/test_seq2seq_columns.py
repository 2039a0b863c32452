"""Source and target columns of encoder-decoders: guessed by name and said, or asked for in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from effcli.data.columns import Problem
from effcli.errors import DataError
from tests.prepared import chosen

TEXTS = ["one two", "three four five", "six", "seven eight", "nine ten one", "two"]


def problem(path: Path, columns: dict[str, list[Any]], **options: Any) -> Problem:
    rows = [dict(zip(columns, cells, strict=True)) for cells in zip(*columns.values(), strict=True)]
    path.write_text("\n".join(map(json.dumps, rows)))
    return chosen(path, is_encoder_decoder=True, **options)[1]


def texts(*names: str) -> dict[str, list[str]]:
    return {name: TEXTS[place:] + TEXTS[:place] for place, name in enumerate(names)}


@pytest.mark.parametrize(
    ("names", "source", "target"),
    [
        (("document", "summary"), "document", "summary"),
        (("highlights", "article", "id"), "article", "highlights"),
        (("id", "dialogue", "summary"), "dialogue", "summary"),
        (("Target", "Source"), "Source", "Target"),
        (("input", "output"), "input", "output"),
        (("question", "answer", "context"), "question", "answer"),
        (("text", "summary", "title"), "text", "summary"),
        (("text", "labels"), "text", "labels"),
        (("maintext", "summary"), "maintext", "summary"),
    ],
)
def test_usual_names_tell_source_and_target(names: tuple[str, ...], source: str, target: str, tmp_path: Path) -> None:
    found = problem(tmp_path / "d.jsonl", texts(*names))
    assert (found.task, found.text_columns, found.label_column) == ("seq2seq", (source,), target)
    assert (found.num_labels, found.labels, found.problem_type) == (0, None, None)
    assert f"Source text is read from column '{source}', target text from column '{target}'." in found.notes


@pytest.mark.parametrize(
    ("asked", "source", "target"),
    [
        ({"text_columns": ["english"]}, "english", "german"),
        ({"label_column": "german"}, "english", "german"),
        ({"text_columns": ["german"], "label_column": "english"}, "german", "english"),
    ],
)
def test_one_column_that_is_named_tells_the_other(
    asked: dict[str, Any], source: str, target: str, tmp_path: Path
) -> None:
    found = problem(tmp_path / "d.jsonl", texts("english", "german"), **asked)
    assert (found.text_columns, found.label_column) == ((source,), target)


def test_a_column_that_is_named_beats_the_usual_names(tmp_path: Path) -> None:
    found = problem(tmp_path / "d.jsonl", texts("document", "summary", "title"), label_column="title")
    assert (found.text_columns, found.label_column) == (("document",), "title")


@pytest.mark.parametrize(
    ("columns", "asked", "words"),
    [
        (texts("text"), {}, "found: text; use --text-column text --label-column NAME"),
        (texts("english", "german"), {}, "found: english, german; use --text-column english --label-column german"),
        (texts("a", "b", "c"), {"text_columns": ["b"]}, "use --text-column b --label-column a"),
        (texts("a", "b", "c"), {"text_columns": ["a", "b"]}, "reads one source column, but 2 are given"),
        (texts("document", "summary"), {"text_columns": ["documents"]}, "no 'documents' column in"),
        (texts("document", "summary"), {"label_column": "sumary"}, "Did you mean 'summary'?"),
        ({"document": TEXTS, "summary": [["nested"]] * 6}, {}, "the target column 'summary' holds nested"),
    ],
)
def test_what_cannot_be_told_is_asked_for_with_the_columns_that_were_found(
    columns: dict[str, list[Any]], asked: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(DataError) as caught:
        problem(tmp_path / "d.jsonl", columns, task="seq2seq", **asked)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("labels", "task"),
    [
        ([0, 1, 0, 1, 0, 1], "classification"),
        ([0.5, 1.5, 2.5, 0.25, 1.25, 2.25], "classification"),
        ([True, False, True, False, True, True], "classification"),
        (["pos", "neg", "pos", "neg", "neg", "pos"], "classification"),
        (TEXTS, "seq2seq"),
        (["a", "b", "a", "c", "d", "e"], "seq2seq"),
    ],
)
def test_a_label_column_of_classes_makes_a_classifier(labels: list[Any], task: str, tmp_path: Path) -> None:
    found = problem(tmp_path / "d.jsonl", {"text": TEXTS, "label": labels})
    assert found.task == task
    said = {
        "classification": "The task is classification, because column 'label' holds labels; to write text give",
        "seq2seq": "The task is seq2seq, because the model is an encoder-decoder.",
    }
    assert any(note.startswith(said[task]) for note in found.notes)


def test_few_texts_under_the_name_of_a_target_are_still_texts(tmp_path: Path) -> None:
    columns = {"question": TEXTS, "answer": ["yes", "no", "yes", "no", "no", "yes"]}
    assert problem(tmp_path / "d.jsonl", columns, label_column="answer").task == "seq2seq"


def test_what_is_asked_for_is_done_without_a_word(tmp_path: Path) -> None:
    columns = {"text": TEXTS, "label": ["pos", "neg", "pos", "neg", "neg", "pos"]}
    found = problem(tmp_path / "d.jsonl", columns, task="seq2seq", text_columns=["text"], label_column="label")
    assert (found.task, found.label_column, found.notes) == ("seq2seq", "label", ())


def test_a_checkpoint_with_a_classification_head_stays_a_classifier(tmp_path: Path) -> None:
    columns = {"text": TEXTS, "label": TEXTS[::-1]}
    found = problem(tmp_path / "d.jsonl", columns, architectures=("BartForSequenceClassification",))
    assert found.task == "classification"


def test_numbers_of_a_csv_file_are_classes_too(tmp_path: Path) -> None:
    path = tmp_path / "d.csv"
    path.write_text("text,label\n" + "".join(f"{text},{number}\n" for number, text in enumerate(TEXTS)))
    found = chosen(path, is_encoder_decoder=True)[1]
    assert (found.task, found.num_labels) == ("classification", 6)
