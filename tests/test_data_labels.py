"""Columns and labels: what is guessed is said, what cannot be guessed is asked, what is wrong is named."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from datasets import ClassLabel, Dataset, DatasetDict, Features, Value

from effcli.data.columns import Problem
from effcli.errors import DataError
from tests.prepared import chosen


def csv_file(path: Path, labels: Iterable[str], header: str = "text,label") -> Path:
    path.write_text(header + "\n" + "".join(f"row {i},{label}\n" for i, label in enumerate(labels)))
    return path


def problem_of(train: Path, evaluation: Path | None = None, **options: Any) -> Problem:
    return chosen(train, evaluation, **options)[1]


def failure(train: Path, evaluation: Path | None = None, **options: Any) -> str:
    with pytest.raises(DataError) as caught:
        problem_of(train, evaluation, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def encoded(problem: Problem, values: Iterable[Any]) -> list[int | float]:
    assert problem.labels is not None
    return [problem.labels.encode(value) for value in values]


def test_words_are_mapped_in_sorted_order_whatever_the_evaluation_holds(tmp_path: Path) -> None:
    train = csv_file(tmp_path / "t.csv", ["pos", "neg", "pos", "neg"])
    for labels in (["pos", "pos"], ["neg", "pos"], ["neg"]):
        problem = problem_of(train, csv_file(tmp_path / "v.csv", labels))
        assert problem.labels is not None
        assert problem.labels.names == ("neg", "pos")
        assert encoded(problem, ["neg", "pos"]) == [0, 1]
    assert (problem.num_labels, problem.problem_type) == (2, "single_label_classification")


def test_whole_numbers_from_zero_stay_as_they_are(tmp_path: Path) -> None:
    problem = problem_of(csv_file(tmp_path / "t.csv", ["2", "0", "1", "0"]))
    assert encoded(problem, ["0", "1", "2"]) == [0, 1, 2]
    assert not any("become classes" in note for note in problem.notes)


def test_numbers_from_one_are_mapped_and_said(tmp_path: Path) -> None:
    problem = problem_of(csv_file(tmp_path / "t.csv", ["1", "5", "3", "2", "4"]))
    assert encoded(problem, ["1", "2", "3", "4", "5"]) == [0, 1, 2, 3, 4]
    assert problem.num_labels == 5
    assert any("1, 2, 3, 4, 5" in note and "classes 0 to 4" in note for note in problem.notes)


def test_numbers_are_sorted_as_numbers(tmp_path: Path) -> None:
    problem = problem_of(csv_file(tmp_path / "t.csv", ["10", "9", "100"]))
    assert problem.labels is not None
    assert problem.labels.names == ("9", "10", "100")


def test_whole_floats_are_classes(tmp_path: Path) -> None:
    problem = problem_of(csv_file(tmp_path / "t.csv", ["0.0", "1.0", "1.0", "0.0"]))
    assert problem.num_labels == 2
    assert encoded(problem, ["0.0", "1", 1.0]) == [0, 1, 1]


def test_other_floats_are_a_regression_and_said(tmp_path: Path) -> None:
    problem = problem_of(csv_file(tmp_path / "t.csv", ["3.5", "1.25", "2", "4.0"]))
    assert (problem.num_labels, problem.problem_type) == (1, "regression")
    assert encoded(problem, ["3.5", "2"]) == [3.5, 2.0]
    assert any("regression" in note for note in problem.notes)


@pytest.mark.parametrize("form", ["csv", "jsonl"])
def test_many_numbers_written_as_text_are_asked_about(tmp_path: Path, form: str) -> None:
    path = tmp_path / f"t.{form}"
    values = [f"{i}.5" for i in range(21)]
    if form == "csv":
        csv_file(path, (f'"{value}"' for value in values))
    else:
        path.write_text("".join(json.dumps({"text": "a", "label": value}) + "\n" for value in values))
    message = failure(path)
    assert "21 different numbers written as text" in message
    assert "--task classification" in message
    assert problem_of(path, task="classification").num_labels == 21


def test_few_numbers_written_as_text_are_classes_in_numeric_order(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text("".join(json.dumps({"text": "a", "label": label}) + "\n" for label in ("10", "9.5", "9")))
    problem = problem_of(path)
    assert problem.labels is not None
    assert problem.labels.names == ("9", "9.5", "10")
    assert problem.problem_type == "single_label_classification"


def test_many_plain_floats_of_a_csv_are_scores(tmp_path: Path) -> None:
    assert problem_of(csv_file(tmp_path / "t.csv", [f"{i}.5" for i in range(30)])).problem_type == "regression"


def test_a_label_seen_only_in_evaluation_is_named_with_its_line(tmp_path: Path) -> None:
    train = csv_file(tmp_path / "t.csv", ["pos", "neg", "pos", "neg"])
    message = failure(train, csv_file(tmp_path / "v.csv", ["pos", "mixed"]))
    assert "v.csv', line 3: the label 'mixed' does not occur in the training data; known: neg, pos" in message


def test_a_number_seen_only_in_evaluation_is_named_with_its_line(tmp_path: Path) -> None:
    train = csv_file(tmp_path / "t.csv", ["0", "1"])
    assert "line 4: the label '2'" in failure(train, csv_file(tmp_path / "v.csv", ["0", "1", "2"]))
    assert "line 2: the label 'two' is not a number" in failure(train, csv_file(tmp_path / "w.csv", ["two"]))


def test_minus_one_is_an_unlabelled_row(tmp_path: Path) -> None:
    train = csv_file(tmp_path / "t.csv", ["0", "1", "1", "0"])
    evaluation = csv_file(tmp_path / "v.csv", ["-1", "-1"])
    assert "v.csv', line 2: the label is -1, which marks rows without a label" in failure(train, evaluation)
    assert "t.csv', line 4: the label is -1" in failure(csv_file(tmp_path / "t.csv", ["0", "1", "-1"]))
    assert problem_of(csv_file(tmp_path / "u.csv", ["1", "-1"])).num_labels == 2


def test_an_unlabelled_row_of_named_classes_is_named(tmp_path: Path) -> None:
    features = Features({"text": Value("string"), "label": ClassLabel(names=["no", "yes"])})
    good = Dataset.from_list([{"text": "a", "label": 0}, {"text": "b", "label": 1}], features=features)
    bad = Dataset.from_list([{"text": "a", "label": 0}, {"text": "b", "label": -1}], features=features)
    DatasetDict({"train": good, "validation": bad}).save_to_disk(str(tmp_path / "d"))
    assert "split validation', row 2: the label is -1" in failure(tmp_path / "d")
    DatasetDict({"train": bad}).save_to_disk(str(tmp_path / "e"))
    assert "row 2: the label is -1" in failure(tmp_path / "e")


def test_named_classes_keep_their_names_and_order(tmp_path: Path) -> None:
    features = Features({"text": Value("string"), "label": ClassLabel(names=["z", "a"])})
    rows = [{"text": "a", "label": 0}, {"text": "b", "label": 1}]
    Dataset.from_list(rows, features=features).save_to_disk(str(tmp_path / "d"))
    problem = problem_of(tmp_path / "d", csv_file(tmp_path / "v.csv", ["z", "a"]))
    assert problem.labels is not None
    assert problem.labels.names == ("z", "a")
    assert problem_of(tmp_path / "d", csv_file(tmp_path / "w.csv", ["0", "1"])).num_labels == 2


def test_truth_values_are_two_classes(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text('{"text": "a", "label": true}\n{"text": "b", "label": false}\n')
    problem = problem_of(path)
    assert problem.labels is not None
    assert problem.labels.names == ("false", "true")
    assert encoded(problem, [False, True]) == [0, 1]


@pytest.mark.parametrize("empty", ["", '""', " "])
def test_a_missing_label_is_named_with_file_and_line(tmp_path: Path, empty: str) -> None:
    message = failure(csv_file(tmp_path / "t.csv", ["a", "b", empty, "a"]))
    assert "t.csv', line 4: the label in column 'label' is empty" in message


def test_a_null_label_is_missing(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text('{"text": "a", "label": 1}\n{"text": "b", "label": null}\n{"text": "c", "label": 0}\n')
    assert "line 2: the label in column 'label' is empty" in failure(path)


def test_a_word_among_numbers_is_named_with_its_line(tmp_path: Path) -> None:
    message = failure(csv_file(tmp_path / "t.csv", ["0", "1", "nan", "0"]))
    assert "line 4: the label 'nan' is not a number, but others are" in message


def test_one_class_alone_is_an_error(tmp_path: Path) -> None:
    assert "every row has the same label '1'" in failure(csv_file(tmp_path / "t.csv", ["1", "1"]))


def test_the_mapping_comes_from_all_rows_also_under_a_limit(tmp_path: Path) -> None:
    problem = problem_of(csv_file(tmp_path / "t.csv", ["b", "b", "a", "c"]), limit_rows=2)
    assert problem.num_labels == 3
    assert any("all have the same label" in note for note in problem.notes)


def test_an_unknown_label_column_name_is_asked_for(tmp_path: Path) -> None:
    train = csv_file(tmp_path / "t.csv", ["a", "b"], header="sentence,target")
    message = failure(train)
    assert "no 'label' column in" in message
    assert "found: sentence, target; use --label-column target" in message
    assert problem_of(train, label_column="target").text_columns == ("sentence",)


def test_unclear_text_columns_are_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("a,b,label\nx,y,1\nz,w,0\n")
    assert "no 'text' column in" in failure(path)
    assert "found: a, b, label; use --text-column a" in failure(path)
    assert problem_of(path, text_columns=("b", "a")).text_columns == ("b", "a")


def test_the_only_column_of_words_is_taken_and_said(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("id,story,length,label\n1,abc,3,x\n2,defg,4,y\n")
    problem = problem_of(path)
    assert problem.text_columns == ("story",)
    assert "Text is read from column 'story'." in problem.notes


@pytest.mark.parametrize(
    "pair",
    [("sentence1", "sentence2"), ("Premise", "Hypothesis"), ("question1", "question2"), ("question", "sentence")],
)
def test_well_known_pairs_are_recognised(tmp_path: Path, pair: tuple[str, str]) -> None:
    path = tmp_path / "t.csv"
    path.write_text(f"idx,{pair[0]},{pair[1]},Label\n0,a,b,x\n1,c,d,y\n")
    problem = problem_of(path)
    assert (problem.text_columns, problem.label_column) == (pair, "Label")


def test_an_unknown_column_is_named_with_the_nearest(tmp_path: Path) -> None:
    train = csv_file(tmp_path / "t.csv", ["a", "b"])
    assert "no 'lable' column" in failure(train, label_column="lable")
    assert "Did you mean 'label'?" in failure(train, label_column="lable")
    assert "found: text, label" in failure(train, text_columns=("words",))


def test_evaluation_rows_need_the_same_columns(tmp_path: Path) -> None:
    train = csv_file(tmp_path / "t.csv", ["a", "b"])
    assert "no 'label' column in" in failure(train, csv_file(tmp_path / "v.csv", ["a"], header="text,y"))


def test_the_task_is_guessed_from_labels_and_model_and_said(tmp_path: Path) -> None:
    labelled = csv_file(tmp_path / "t.csv", ["a", "b"])
    plain = tmp_path / "p.jsonl"
    plain.write_text('{"text": "one"}\n{"text": "two"}\n')
    assert problem_of(labelled, is_decoder=True).task == "classification"
    language = problem_of(plain, is_decoder=True, architectures=("GPT2LMHeadModel",))
    assert (language.task, language.num_labels, language.labels) == ("causal-lm", 0, None)
    assert "causal-lm" in language.notes[0]
    assert "no 'label' column" in failure(plain)
    assert "no 'label' column" in failure(plain, is_decoder=True, architectures=("GPT2ForSequenceClassification",))
    assert problem_of(labelled, is_decoder=True, task="causal-lm").label_column is None


def test_nested_labels_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text('{"text": "a", "label": [1]}\n{"text": "b", "label": [0]}\n')
    assert "the label column 'label' holds nested values" in failure(path)
    assert "'label' holds nested" in failure(csv_file(tmp_path / "t.csv", ["0", "1"]), path)


@pytest.mark.parametrize("huge", ["1e400", "inf"])
def test_a_number_that_is_not_finite_is_no_number(tmp_path: Path, huge: str) -> None:
    assert f"line 4: the label '{huge}' is not a number" in failure(csv_file(tmp_path / "t.csv", ["0", "1.5", huge]))


def test_labels_that_hardly_repeat_are_doubted(tmp_path: Path) -> None:
    problem = problem_of(csv_file(tmp_path / "t.csv", [f"word{i}" for i in range(30)]))
    assert any("are these really labels?" in note for note in problem.notes)


def test_nested_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text('{"text": ["a"], "label": 1}\n{"text": ["b"], "label": 0}\n')
    assert "'text' holds nested" in failure(path)
