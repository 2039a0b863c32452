"""Guessing text columns by well-known names."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from effcli.data.labels import TEXT_TYPES
from effcli.data.numerals import parse_number

if TYPE_CHECKING:
    from effcli.data.source import RawTables

LABEL_NAMES = ("label", "labels")
PAIRS = (
    ("sentence1", "sentence2"),
    ("premise", "hypothesis"),
    ("question1", "question2"),
    ("question", "sentence"),
    ("question", "passage"),
    ("question", "answer"),
    ("query", "passage"),
    ("query", "document"),
    ("text_a", "text_b"),
    ("text1", "text2"),
    ("sentence_a", "sentence_b"),
    ("sentence_1", "sentence_2"),
    ("text_1", "text_2"),
    ("string1", "string2"),
)
SOURCES_AND_TARGETS = (
    ("document", "summary"),
    ("article", "highlights"),
    ("article", "summary"),
    ("text", "summary"),
    ("dialogue", "summary"),
    ("source", "target"),
    ("source_text", "target_text"),
    ("input_text", "target_text"),
    ("src", "tgt"),
    ("input", "output"),
    ("input", "target"),
    ("inputs", "targets"),
    ("instruction", "output"),
    ("question", "answer"),
    ("prompt", "completion"),
    ("prompt", "response"),
    ("text", "target"),
)
"""Columns of sequence-to-sequence data sets."""
TARGETS = tuple(dict.fromkeys(target for _, target in SOURCES_AND_TARGETS))
SINGLES = ("text", "sentence", "content", "review", "document", "comment", "tweet", "utterance", "message", "body")
IDENTIFIERS = frozenset({"id", "idx", "index", "guid", "uid", "column_1"})
LOOKED_AT_ROWS = 100


def guess_text_columns(
    raw: RawTables, found: tuple[str, ...], label: str | None, *, pairs: bool
) -> tuple[str, ...] | None:
    """Return one column or a pair, by name in any case, else the only column of text; None where it is not clear."""
    by_name = {name.lower(): name for name in reversed(found) if name != label}
    if pairs:
        for first, second in PAIRS:
            if first in by_name and second in by_name:
                return by_name[first], by_name[second]
    for single in SINGLES:
        if single in by_name:
            return (by_name[single],)
    candidates = [name for name in text_like_columns(raw, found) if name != label]
    return (candidates[0],) if len(candidates) == 1 else None


def guess_source_and_target(
    raw: RawTables, found: tuple[str, ...], source: str | None, target: str | None
) -> tuple[str, str] | None:
    """Return the columns of source and target text, of which either may be known; None where they are not clear.

    They are told by their names as a pair, or each by itself; the one that is left may be the only other text.
    """
    by_name = {name.lower(): name for name in reversed(found)}
    for first, second in SOURCES_AND_TARGETS:
        pair = by_name.get(first), by_name.get(second)
        if None not in pair and source in (None, pair[0]) and target in (None, pair[1]):
            return by_name[first], by_name[second]
    target = target or next(
        (by_name[name] for name in (*TARGETS, *LABEL_NAMES) if by_name.get(name, source) != source), None
    )
    if target is None and source is not None:
        others = [name for name in text_like_columns(raw, found) if name != source]
        target = others[0] if len(others) == 1 else None
    if source is None and target is not None:
        source = next((by_name[name] for name, _ in SOURCES_AND_TARGETS if by_name.get(name, target) != target), None)
        if source is None and (guessed := guess_text_columns(raw, found, target, pairs=False)):
            (source,) = guessed
    return None if source is None or target is None else (source, target)


def text_like_columns(raw: RawTables, found: tuple[str, ...]) -> list[str]:
    """Return the columns that hold words: strings that are neither identifiers nor all numbers in the first rows."""
    from datasets import Value

    features = raw.whole_train.features
    columns = []
    for name in found:
        feature = features[name]
        if isinstance(feature, Value) and feature.dtype in TEXT_TYPES:
            cells = [cell for cell in itertools.islice(raw.whole_train[name], LOOKED_AT_ROWS) if cell]
            if name.lower() not in IDENTIFIERS and any(parse_number(cell) is None for cell in cells):
                columns.append(name)
    return columns
