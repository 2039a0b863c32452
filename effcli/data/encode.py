"""Tokenising one batch of rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TRUNCATED_COLUMN = "truncated"
"""Column that says whether a row was cut; it is counted and dropped."""
TRUNCATED_TARGET_COLUMN = "truncated_target"
"""The same of its target text."""


def encode_batch(
    batch: dict[str, list[Any]],
    *,
    tokenizer: PreTrainedTokenizerBase,
    text_columns: tuple[str, ...],
    label_column: str | None,
    read_label: Callable[[Any], int | float] | None,
    max_length: int,
    min_length: int,
    with_types: bool,
    target_column: str | None = None,
    max_target_length: int = 0,
) -> dict[str, list[Any]]:
    """Return the tokenised rows of a batch; rows with a blank text or fewer than `min_length` tokens are dropped.

    With a `target_column` the labels of a row are the token ids of its text there, at most `max_target_length`.
    """
    columns = (*text_columns, target_column) if target_column is not None else text_columns
    rows = [tuple(map(as_text, row)) for row in zip(*(batch[name] for name in columns), strict=True)]
    kept = [index for index, row in enumerate(rows) if all(text.strip() for text in row)]
    keys = ["input_ids", "attention_mask", *(["token_type_ids"] if with_types else [])]
    encoded = _tokenised([rows[index][: len(text_columns)] for index in kept], tokenizer, keys, max_length)
    result: dict[str, list[Any]] = {key: [] for key in (*keys, TRUNCATED_COLUMN)}
    if target_column is not None:
        result |= {"labels": [], TRUNCATED_TARGET_COLUMN: []}
        targets: list[tuple[str, ...]] = [(rows[index][-1],) for index in kept]
        written = _tokenised(targets, as_targets(tokenizer), ["input_ids"], max_target_length)
        for row, target in zip(encoded, written, strict=True):
            row |= {"labels": target["input_ids"], TRUNCATED_TARGET_COLUMN: target[TRUNCATED_COLUMN]}
    if read_label is not None:
        result["labels"] = []
    for index, row in zip(kept, encoded, strict=True):
        if len(row["input_ids"]) < min_length:
            continue
        for key, value in row.items():
            result[key].append(value)
        if read_label is not None and label_column is not None:
            result["labels"].append(read_label(batch[label_column][index]))
    return result


def as_targets(tokenizer: PreTrainedTokenizerBase) -> Callable[..., Any]:
    """Return the tokenizer as it is called for targets: some give them other special tokens, or another vocabulary."""
    return lambda texts, **options: tokenizer(text_target=texts, **options)


def _tokenised(
    rows: list[tuple[str, ...]], tokenizer: Callable[..., Any], keys: list[str], max_length: int
) -> list[dict[str, Any]]:
    """Return each row's lists under `keys`, and whether it was cut; only rows that are too long are done twice."""
    if not rows:
        return []
    whole = tokenizer(*map(list, zip(*rows, strict=True)), truncation=False, padding=False, verbose=False)
    long = [index for index, ids in enumerate(whole["input_ids"]) if len(ids) > max_length]
    result = [{**{key: whole[key][index] for key in keys}, TRUNCATED_COLUMN: False} for index in range(len(rows))]
    if long:
        columns = map(list, zip(*(rows[index] for index in long), strict=True))
        cut = tokenizer(*columns, truncation="longest_first", max_length=max_length, padding=False, verbose=False)
        for position, index in enumerate(long):
            result[index] = {**{key: cut[key][position] for key in keys}, TRUNCATED_COLUMN: True}
    return result


def as_text(value: Any) -> str:
    """Return a cell as text; empty for null."""
    return "" if value is None else str(value)
