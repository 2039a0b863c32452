"""Tokenising one batch of rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from effcli.data.columns import Problem

TRUNCATED_COLUMN = "truncated"
"""Column that says whether a row was cut; it is counted and dropped."""
TRUNCATED_TARGET_COLUMN = "truncated_target"
"""The same of its target text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """The most tokens of a row's text, and of its target where it has one."""

    text: int
    target: int = 0


def encode_batch(
    batch: dict[str, list[Any]],
    *,
    problem: Problem,
    tokenizer: PreTrainedTokenizerBase,
    lengths: Lengths,
    read_label: Callable[[Any], int | float] | None = None,
) -> dict[str, list[Any]]:
    """Return the tokenised rows of a batch; those with a blank text, or too short to learn from, are dropped.

    `read_label` makes labels of the label column; those of seq2seq are the token ids of the target text.
    """
    rows = [tuple(map(as_text, row)) for row in zip(*(batch[name] for name in problem.written_columns), strict=True)]
    written = [index for index, row in enumerate(rows) if all(text.strip() for text in row)]
    encoded = _encoded([rows[index] for index in written], problem, tokenizer, lengths)
    least = 2 if problem.task == "causal-lm" else 1
    kept = [(index, row) for index, row in zip(written, encoded, strict=True) if len(row["input_ids"]) >= least]
    names = [*_keys(tokenizer), TRUNCATED_COLUMN]
    if problem.target_column is not None:
        names += ["labels", TRUNCATED_TARGET_COLUMN]
    result = {name: [row[name] for _, row in kept] for name in names}
    if read_label is not None and problem.label_column is not None:
        result["labels"] = [read_label(batch[problem.label_column][index]) for index, _ in kept]
    return result


def _encoded(
    rows: list[tuple[str, ...]], problem: Problem, tokenizer: PreTrainedTokenizerBase, lengths: Lengths
) -> list[dict[str, Any]]:
    """Return each row's lists, the ids of its target as labels, and whether text and target were cut."""
    num_texts = len(problem.text_columns)
    encoded = _tokenised([row[:num_texts] for row in rows], tokenizer, _keys(tokenizer), lengths.text)
    if problem.target_column is not None:
        targets = _tokenised([row[num_texts:] for row in rows], as_targets(tokenizer), ["input_ids"], lengths.target)
        for row, target in zip(encoded, targets, strict=True):
            row |= {"labels": target["input_ids"], TRUNCATED_TARGET_COLUMN: target[TRUNCATED_COLUMN]}
    return encoded


def has_types(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether the model of a tokenizer is told which of two texts a token is of."""
    return "token_type_ids" in tokenizer.model_input_names


def _keys(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    return ["input_ids", "attention_mask", *(["token_type_ids"] if has_types(tokenizer) else [])]


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
