"""What labels mean: classes and their ids, or scores. The training data alone defines it."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Literal

from effcli.data.numerals import parse_number, whole
from effcli.data.places import place
from effcli.errors import DataError
from effcli.units import cut, listed

if TYPE_CHECKING:
    from datasets import Dataset

Kind = Literal["text", "number", "bool", "score"]
MAX_NUMERIC_TEXT = 20
"""Numbers written as text with more distinct values than this may be classes or scores: the user must say."""
TEXT_TYPES = frozenset({"string", "large_string", "string_view"})
LABEL_TYPES = re.compile("string|large_string|string_view|bool|null|u?int\\d+|float\\d*|double|decimal.*")
"""Types of a column, as `datasets` names them, whose values may be labels: words, truth values and numbers."""
SHOWN_LABELS = 10
ROWS_AT_ONCE = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelMap:
    """Class names in id order, and the id of each label as written; scores have neither."""

    names: tuple[str, ...]
    kind: Kind
    ids: Mapping[Any, int]

    def encode(self, value: Any) -> int | float:
        """Return the class id of a label, or its score.

        Raises:
            ValueError: the label is missing or not known; the text says why.
        """
        if is_missing(value):
            raise ValueError("the label is empty")
        label = self._normalise(value)
        if self.kind == "score":
            return float(label)
        if label not in self.ids:
            if label == -1:
                raise ValueError("the label is -1, which marks rows without a label, as in a test split")
            meant = next((name for name in self.names if name.casefold() == str(label).casefold()), None)
            hint = f", of which '{meant}' may be meant" if meant is not None else ""
            raise ValueError(
                f"the label '{shown(value)}' does not occur in the training data; known: {self._known()}{hint}"
            )
        return self.ids[label]

    def _normalise(self, value: Any) -> Any:
        if self.kind == "text":
            return value.strip() if isinstance(value, str) else value
        if self.kind == "bool":
            return {"true": True, "false": False}.get(value.strip().lower(), value) if isinstance(value, str) else value
        number = to_number(value)
        if number is None:
            known = f"; known: {self._known()}" if self.names else ""
            raise ValueError(f"the label '{shown(value)}' is not a number{known}")
        return number

    def _known(self) -> str:
        return listed_labels(self.names)


def listed_labels(values: Iterable[Any]) -> str:
    """Return the first labels, and how many more there are."""
    return listed([shown(value) for value in values], SHOWN_LABELS)


def shown(value: Any) -> str:
    """Return a label as a message shows it, long ones cut: any column may have been taken for labels."""
    return cut(str(value))


def is_missing(value: Any) -> bool:
    """Return whether a label is absent: null, empty text or not-a-number. Words such as NA are labels."""
    return value is None or (isinstance(value, str) and not value.strip()) or (value != value)


def to_number(value: Any) -> int | float | None:
    """Return a label as a number, whole ones as int; None where it is none."""
    if isinstance(value, str):
        return parse_number(value)
    if isinstance(value, float | Decimal):
        value = float(value)
        return whole(value) if math.isfinite(value) else None
    return int(value) if isinstance(value, int) else None


def label_reader(rows: Dataset, column: str, labels: LabelMap) -> Callable[[Any], int | float]:
    """Return the function from stored values of a column to ids or scores; class ids are read as their names."""
    from datasets import ClassLabel

    feature = rows.features[column]
    if not isinstance(feature, ClassLabel) or labels.kind != "text":
        return labels.encode
    names = feature.names
    return lambda value: labels.encode(names[value] if value is not None and 0 <= value < len(names) else value)


def check_labels(rows: Dataset, column: str, labels: LabelMap, name: str) -> None:
    """Check that every row of a table has a label that is known.

    Raises:
        DataError: the first row that has not, with its place.
    """
    require_plain_labels(rows, column, name)
    read = label_reader(rows, column, labels)
    for value in distinct(rows, column):
        try:
            read(value)
        except ValueError as error:
            where = place(rows, first_index(rows, column, value), name)
            raise DataError(f"{where}: {error}; correct the row or remove it") from error


def distinct(rows: Dataset, column: str) -> Iterator[Any]:
    """Yield the values of a column, each once and in the order of the rows, reading no further than it is asked to.

    `Dataset.unique` writes chosen rows to a file beside the data before it looks at them, texts and all.
    """
    import pyarrow.compute as pc

    seen: set[Any] = set()
    for batch in rows.select_columns([column]).with_format("arrow").iter(batch_size=ROWS_AT_ONCE):
        for value in pc.unique(batch[column]).to_pylist():
            if value not in seen:
                seen.add(value)
                yield value


def require_plain_labels(rows: Dataset, column: str, name: str) -> None:
    """Check that a label column holds single values.

    Raises:
        DataError: it holds lists, objects, or values such as dates and bytes.
    """
    from datasets import ClassLabel, Value

    feature = rows.features[column]
    if not isinstance(feature, ClassLabel | Value):
        raise DataError(f"'{name}': the label column '{column}' holds nested values; use numbers or words")
    if not LABEL_TYPES.fullmatch(feature.dtype):
        raise DataError(
            f"'{name}': the label column '{column}' holds values of type {feature.dtype}; use numbers or words"
        )


def first_index(rows: Dataset, column: str, value: Any) -> int:
    """Return the index of the first row that holds `value` (not-a-number equals itself here)."""
    return next(i for i, other in enumerate(rows[column]) if other == value or (value != value and other != other))
