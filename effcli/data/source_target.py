"""The columns of a sequence-to-sequence model, and whether an encoder-decoder is to learn classes instead."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from effcli.data.guess import TARGETS, guess_source_and_target, text_like_columns
from effcli.data.labels import TEXT_TYPES, distinct, to_number
from effcli.data.places import data_columns
from effcli.errors import DataError

if TYPE_CHECKING:
    from effcli.data.source import RawTables
    from effcli.spec import RunSpec

MAX_CLASSES = 20
"""Words with more distinct values than this are taken for texts to be written, not for classes."""


def source_and_target(raw: RawTables, spec: RunSpec) -> tuple[str, str, tuple[str, ...]]:
    """Return the columns of source and target text, and sentences on what was guessed.

    Columns that were asked for are taken as they are: the caller checks that they exist.

    Raises:
        DataError: two source columns were given, or a column that was not given cannot be told.
    """
    found, texts, target = data_columns(raw.whole_train), spec.data.text_columns, spec.data.label_column
    if len(texts) > 1:
        raise DataError(
            f"a sequence-to-sequence model reads one source column, but {len(texts)} are given; name one with "
            "--text-column, and the target with --label-column"
        )
    source = texts[0] if texts else None
    if source is not None and target is not None:
        return source, target, ()
    guessed = guess_source_and_target(raw, found, source, target)
    if guessed is None:
        raise _not_told(raw, found, source, target)
    return *guessed, (f"Source text is read from column '{guessed[0]}', target text from column '{guessed[1]}'.",)


def holds_classes(raw: RawTables, column: str) -> bool:
    """Return whether a column holds classes or scores, not texts to be written.

    Numbers, truth values and named classes do; words where few of them occur again and again, under a name that is
    none of a target text.
    """
    from datasets import Value

    feature = raw.whole_train.features[column]
    if not isinstance(feature, Value) or feature.dtype not in TEXT_TYPES:
        return True
    rows = raw.whole_train
    are_numbers = (value is None or to_number(value) is not None for value in distinct(rows, column))
    if column in raw.written_numbers and all(are_numbers):
        return True
    num_values = len(list(itertools.islice(distinct(rows, column), MAX_CLASSES + 1)))
    few = num_values <= MAX_CLASSES and 2 * num_values <= len(rows)
    return few and column.lower() not in TARGETS


def _not_told(raw: RawTables, found: tuple[str, ...], source: str | None, target: str | None) -> DataError:
    texts = [name for name in text_like_columns(raw, found) if name not in (source, target)] or ["NAME"]
    source = source or texts.pop(0)
    target = target or (texts or ["NAME"])[0]
    return DataError(
        f"an encoder-decoder learns to write a target text from a source text; '{raw.train_name}' does not tell which "
        f"columns these are; found: {', '.join(found)}; use --text-column {source} --label-column {target}"
    )
