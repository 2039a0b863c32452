"""From tables to a problem: which columns are text, which is the label, and what is learnt."""

from __future__ import annotations

import itertools
import re
import shlex
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from effcli.data.guess import LABEL_NAMES, guess_text_columns, text_like_columns
from effcli.data.labels import LabelMap, check_labels, distinct
from effcli.data.learn_labels import learn_labels
from effcli.data.numerals import parse_number
from effcli.data.places import LINE_COLUMN, data_columns
from effcli.data.source_target import holds_classes, source_and_target
from effcli.errors import DataError, nearest

if TYPE_CHECKING:
    from effcli.data.source import RawTables
    from effcli.spec import RunSpec, Task

SEPARATED = re.compile(r"\w+([^\w.-]\w+)+")
"""A header that was read as one name, and may be several with a separator that was not recognised."""
Objective = Literal["classification", "regression", "causal-lm", "seq2seq"]
ProblemType = Literal["single_label_classification", "regression"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """What is learnt from which columns. `notes` are sentences on everything that was guessed.

    `num_labels` is the number of outputs of a classifier: classes, 1 for a regression, 0 for a model that writes text.
    A seq2seq model has one text column, the source, and its target texts are in the label column.
    """

    task: Task
    text_columns: tuple[str, ...]
    notes: tuple[str, ...]
    label_column: str | None = None
    labels: LabelMap | None = None
    problem_type: ProblemType | None = None
    num_labels: int = 0

    @property
    def objective(self) -> Objective:
        """Return which loss is minimised: the task, or regression where the labels are scores."""
        return "regression" if self.problem_type == "regression" else self.task

    @property
    def target_column(self) -> str | None:
        """Return the column of the texts that a seq2seq model learns to write; None for other tasks."""
        return self.label_column if self.task == "seq2seq" else None

    @property
    def written_columns(self) -> tuple[str, ...]:
        """Return every column of text, that of a target last."""
        return self.text_columns if self.target_column is None else (*self.text_columns, self.target_column)


def choose(
    raw: RawTables,
    spec: RunSpec,
    *,
    is_decoder: bool,
    architectures: tuple[str, ...],
    is_encoder_decoder: bool = False,
) -> Problem:
    """Return the problem that the data poses to this kind of model.

    `architectures` are those of the model's configuration: one that was saved with a classification head is not
    taken for a language model.

    Raises:
        DataError: a column is missing or cannot be told, or the labels do not make sense.
    """
    label = _label_column(raw, spec)
    has_classifier_head = any(name.endswith("ForSequenceClassification") for name in architectures)
    notes: tuple[str, ...] = ()
    if spec.model.task is not None:
        task = spec.model.task
    elif is_encoder_decoder and not has_classifier_head:
        task, notes = _task_of_encoder_decoder(raw, label)
    else:
        task, notes = _task(label, may_be_language_model=is_decoder and not has_classifier_head)
    if task == "seq2seq":
        problem = _sequence_to_sequence(raw, spec)
    else:
        problem = _language_model(raw, spec, label) if task == "causal-lm" else _classifier(raw, spec, label)
    _check_columns(raw, problem)
    return replace(problem, notes=notes + problem.notes)


def _task(label: str | None, *, may_be_language_model: bool) -> tuple[Task, tuple[str, ...]]:
    if label is not None:
        return "classification", (f"The task is classification, because labels are in column '{label}'.",)
    if may_be_language_model:
        return "causal-lm", ("The task is causal-lm, because the data has no label column and the model is a decoder.",)
    return "classification", ()


def _task_of_encoder_decoder(raw: RawTables, label: str | None) -> tuple[Task, tuple[str, ...]]:
    if label is not None and holds_classes(raw, label):
        return "classification", (
            f"The task is classification, because column '{label}' holds labels; to write text give --task seq2seq.",
        )
    return "seq2seq", ("The task is seq2seq, because the model is an encoder-decoder.",)


def _sequence_to_sequence(raw: RawTables, spec: RunSpec) -> Problem:
    source, target, notes = source_and_target(raw, spec)
    return Problem(task="seq2seq", text_columns=(source,), label_column=target, notes=notes)


def _language_model(raw: RawTables, spec: RunSpec, label: str | None) -> Problem:
    text_columns, notes = _text_columns(raw, spec, label, pairs=False)
    if spec.data.label_column:
        notes += (f"The label column '{label}' is not used by a language model.",)
    return Problem(task="causal-lm", text_columns=text_columns, notes=notes)


def _classifier(raw: RawTables, spec: RunSpec, label: str | None) -> Problem:
    if label is None:
        raise _no_label_column(raw, spec)
    text_columns, notes = _text_columns(raw, spec, label, pairs=True)
    labels, label_notes = learn_labels(
        raw.whole_train,
        label,
        name=raw.train_name,
        written_numbers=label in raw.written_numbers,
        classes_asked=spec.model.task == "classification",
    )
    is_regression = labels.kind == "score"
    if not is_regression and len(list(itertools.islice(distinct(raw.train, label), 2))) == 1:
        sentence = f"The {len(raw.train):,} rows that train all have the same label; give more, or raise --limit-rows."
        label_notes += (sentence,)
    return Problem(
        task="classification",
        problem_type="regression" if is_regression else "single_label_classification",
        text_columns=text_columns,
        label_column=label,
        labels=labels,
        num_labels=1 if is_regression else len(labels.names),
        notes=notes + label_notes,
    )


def _no_label_column(raw: RawTables, spec: RunSpec) -> DataError:
    found = data_columns(raw.whole_train)
    text = spec.data.text_columns or guess_text_columns(raw, found, None, pairs=True) or ()
    candidate = next((name for name in reversed(found) if name not in text), "NAME")
    way_out = f"use --label-column {shlex.quote(candidate)}"
    if len(found) == 1 and LINE_COLUMN in raw.whole_train.column_names and SEPARATED.fullmatch(found[0]):
        way_out = "if this is more than one, name their separator by --delimiter"
    elif any(parse_number(name) is not None for name in found):
        way_out = f"the first line must hold the names of the columns; if it does, {way_out}"
    return DataError(f"no 'label' column in '{raw.train_name}'; found: {', '.join(found)}; {way_out}")


def _label_column(raw: RawTables, spec: RunSpec) -> str | None:
    asked, found = spec.data.label_column, data_columns(raw.whole_train)
    if asked is not None:
        _require(asked, found, raw.train_name, "--label-column")
        return asked
    names = {name.lower(): name for name in reversed(found) if name not in spec.data.text_columns}
    return next((names[name] for name in LABEL_NAMES if name in names), None)


def _text_columns(
    raw: RawTables, spec: RunSpec, label: str | None, *, pairs: bool
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the text columns, asked for or guessed, and sentences on what was guessed."""
    columns, found = spec.data.text_columns, data_columns(raw.whole_train)
    if columns:
        for name in columns:
            _require(name, found, raw.train_name, "--text-column")
        if len(columns) > 1 and not pairs:
            raise DataError(f"a language model reads one text column, but {len(columns)} are given; name one")
        return columns, ()
    guessed = guess_text_columns(raw, found, label, pairs=pairs)
    if guessed is None:
        others = [name for name in text_like_columns(raw, found) if name != label] or list(found)
        way_out = f"use --text-column {shlex.quote(others[0])}"
        raise DataError(f"no 'text' column in '{raw.train_name}'; found: {', '.join(found)}; {way_out}")
    named = " and ".join(f"'{name}'" for name in guessed)
    return guessed, (f"Text is read from column {named}." if len(guessed) == 1 else f"Text is read from {named}.",)


def _check_columns(raw: RawTables, problem: Problem) -> None:
    """Check the text columns of both tables, and the labels of the evaluation rows."""
    from datasets import Value

    for rows, name in ((raw.whole_train, raw.train_name), (raw.eval, raw.eval_name)):
        if rows is None:
            continue
        texts = [(column, "text", "--text-column") for column in problem.text_columns]
        if problem.target_column is not None:
            texts.append((problem.target_column, "target", "--label-column"))
        for column, kind, flag in texts:
            _require(column, data_columns(rows), name, flag)
            feature = rows.features[column]
            if not isinstance(feature, Value) or "binary" in feature.dtype:
                raise DataError(
                    f"'{name}': the {kind} column '{column}' holds nested or coded values; it must hold text"
                )
    if problem.labels is not None and problem.label_column is not None and raw.eval is not None:
        _require(problem.label_column, data_columns(raw.eval), raw.eval_name, "--label-column")
        check_labels(raw.eval, problem.label_column, problem.labels, raw.eval_name)


def _require(column: str, found: tuple[str, ...], name: str, flag: str) -> None:
    if column not in found:
        in_other_case = next((name for name in found if name.casefold() == column.casefold()), None)
        hint = f" Did you mean '{in_other_case}'?" if in_other_case else nearest(column, found)
        hint = hint or f" Use {flag} with one of these."
        raise DataError(f"no '{column}' column in '{name}'; found: {', '.join(found)}.{hint}")
