"""Learning the label map from the training rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from effcli.data.labels import (
    MAX_NUMERIC_TEXT,
    TEXT_TYPES,
    LabelMap,
    distinct,
    first_index,
    is_missing,
    listed_labels,
    require_plain_labels,
    shown,
    to_number,
)
from effcli.data.numerals import has_decimal_comma, may_have_thousands_comma
from effcli.data.places import place
from effcli.errors import DataError

if TYPE_CHECKING:
    from datasets import Dataset

Learnt = tuple[LabelMap, tuple[str, ...]]
TRUTH = LabelMap(names=("false", "true"), kind="bool", ids={False: 0, True: 1})


def learn_labels(
    rows: Dataset, column: str, *, name: str, written_numbers: bool, classes_asked: bool = False
) -> Learnt:
    """Return the label map of the training rows, and sentences on what was guessed.

    `written_numbers`: numbers in a text column mean numbers, as in CSV files. `classes_asked`: the user said that
    this is classification, which settles numbers written as text.

    Raises:
        DataError: a label is missing or -1, all rows have one class, numbers and words are mixed, numbers have a
            decimal comma, or numbers written as text may be classes or scores.
    """
    from datasets import ClassLabel

    feature = rows.features[column]
    require_plain_labels(rows, column, name)
    values = list(distinct(rows, column))
    missing = [value for value in values if is_missing(value)]
    if missing:
        where = place(rows, min(first_index(rows, column, value) for value in missing), name)
        raise DataError(f"{where}: the label in column '{column}' is empty; fill it in or remove the row")
    if isinstance(feature, ClassLabel):
        learnt = _named(rows, column, name, values, tuple(feature.names))
    elif feature.dtype == "bool":
        learnt = TRUTH, ()
    elif feature.dtype in TEXT_TYPES:
        learnt = _from_text(rows, column, name, values, written_numbers, classes_asked)
    else:
        learnt = _from_numbers(rows, column, name, values)
    if learnt[0].kind != "score" and len({learnt[0].encode(v) for v in _seen(values, feature)}) < 2:
        raise DataError(
            f"'{name}': every row has the same label '{shown(_seen(values, feature)[0])}' in column '{column}'; "
            "classification needs at least two classes"
        )
    labels, notes = learnt
    if len(labels.names) > MAX_NUMERIC_TEXT and len(labels.names) * 2 > len(rows):
        notes += (f"Column '{column}' has {len(labels.names)} classes in {len(rows)} rows; are these really labels?",)
    return labels, notes


def _seen(values: list[Any], feature: Any) -> list[Any]:
    from datasets import ClassLabel

    return [feature.names[value] for value in values] if isinstance(feature, ClassLabel) else values


def _named(rows: Dataset, column: str, name: str, values: list[Any], names: tuple[str, ...]) -> Learnt:
    """Class names that the data set carries; ids are accepted too, where evaluation rows hold ids."""
    if -1 in values:
        raise _unlabelled(rows, column, name, -1)
    ids: dict[Any, int] = {index: index for index in range(len(names))}
    ids |= {str(index): index for index in range(len(names))}
    ids |= {label: index for index, label in enumerate(names)}
    return LabelMap(names=names, kind="text", ids=ids), ()


def _from_text(
    rows: Dataset, column: str, name: str, values: list[str], written_numbers: bool, classes_asked: bool
) -> Learnt:
    numeric = {value: number for value in values if (number := to_number(value)) is not None}
    with_comma = [value for value in values if has_decimal_comma(value)]
    if with_comma and not classes_asked and len(with_comma) + len(numeric) == len(values):
        raise _written_with_comma(rows, column, name, with_comma)
    if not numeric:
        return _from_words(column, sorted({value.strip() for value in values}))
    if len(numeric) < len(values):
        odd = next(value for value in values if value not in numeric)
        where = place(rows, first_index(rows, column, odd), name)
        raise DataError(
            f"{where}: the label '{shown(odd)}' is not a number, but others are ({listed_labels(numeric)}); "
            "make all labels numbers or all words"
        )
    if written_numbers:
        return _from_numbers(rows, column, name, values)
    distinct = set(numeric.values())
    if len(distinct) > MAX_NUMERIC_TEXT and not classes_asked:
        raise DataError(
            f"'{name}': column '{column}' holds {len(distinct)} different numbers written as text "
            f"({listed_labels(values)}): scores or classes? Write them as numbers, without quotes, for scores, "
            "or use --task classification for classes"
        )
    return _from_numbers(rows, column, name, values, may_be_scores=False)


def _written_with_comma(rows: Dataset, column: str, name: str, labels: list[str]) -> DataError:
    """Return the error for numbers such as 3,5; where none tells what the comma means, 1,000 may be 1000 as well."""
    sure = next((label for label in labels if not may_have_thousands_comma(label)), None)
    label = labels[0] if sure is None else sure
    decimal = label.strip().replace(",", ".")
    if sure is None:
        fault = f"may mean {decimal.replace('.', '')} or {decimal}; write the one that is meant"
    else:
        fault = f"is a number with a decimal comma; write {decimal}"
    where = place(rows, first_index(rows, column, label), name)
    return DataError(f"{where}: the label '{shown(label)}' {fault}, or use --task classification for classes")


def _from_words(column: str, names: list[str]) -> Learnt:
    """Words are classes in sorted order; "true" and "false" in any case are truth values."""
    if {name.lower() for name in names} <= {"true", "false"}:
        return TRUTH, ()
    spelt: dict[str, list[str]] = {}
    for name in names:
        spelt.setdefault(name.casefold(), []).append(name)
    alike = [listed_labels(group) for group in spelt.values() if len(group) > 1]
    labels = LabelMap(names=tuple(names), kind="text", ids={name: index for index, name in enumerate(names)})
    sentence = (
        f"Labels of column '{column}' differ in case alone, and are classes of their own: {'; '.join(alike[:3])}."
    )
    return labels, (sentence,) if alike else ()


def _from_numbers(rows: Dataset, column: str, name: str, values: list[Any], *, may_be_scores: bool = True) -> Learnt:
    """Whole numbers are classes, others scores, unless scores are ruled out."""
    by_value = {value: to_number(value) for value in values}
    infinite = next((value for value, number in by_value.items() if number is None), None)
    if infinite is not None:
        where = place(rows, first_index(rows, column, infinite), name)
        raise DataError(f"{where}: the label '{shown(infinite)}' is not a finite number; correct it or remove the row")
    numbers = sorted(number for number in set(by_value.values()) if number is not None)
    if may_be_scores and any(isinstance(number, float) for number in numbers):
        sentence = f"The labels of column '{column}' are not whole numbers, so this is a regression with 1 output."
        return LabelMap(names=(), kind="score", ids={}), (sentence,)
    if numbers[0] == -1 and (len(numbers) == 1 or 0 in numbers):
        raise _unlabelled(rows, column, name, next(v for v, number in by_value.items() if number == -1))
    labels = LabelMap(
        names=tuple(str(number) for number in numbers),
        kind="number",
        ids={number: index for index, number in enumerate(numbers)},
    )
    notes = []
    if numbers != list(range(len(numbers))):
        notes.append(
            f"The labels {listed_labels(numbers)} of column '{column}' become classes 0 to {len(numbers) - 1}."
        )
    return labels, tuple(notes)


def _unlabelled(rows: Dataset, column: str, name: str, value: Any) -> DataError:
    where = place(rows, first_index(rows, column, value), name)
    return DataError(
        f"{where}: the label is -1, which marks rows without a label, as in a test split; use rows with labels, "
        "or write a word where -1 is a class of its own"
    )
