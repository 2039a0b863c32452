"""From tables and a problem to rows of token ids, cached between runs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from effcli.data.cache import kept_file
from effcli.data.encode import (
    TRUNCATED_COLUMN,
    TRUNCATED_TARGET_COLUMN,
    Lengths,
    as_targets,
    as_text,
    encode_batch,
    has_types,
)
from effcli.data.labels import label_reader
from effcli.data.quiet import quiet_datasets
from effcli.data.watch import RowWatch, unwatched
from effcli.errors import DataError

if TYPE_CHECKING:
    from datasets import Dataset, Features
    from transformers import PreTrainedTokenizerBase

    from effcli.data.columns import Problem
    from effcli.data.source import RawTables

FORMAT_VERSION = 1
"""Part of the cache key: raise it when the same text gives other rows than before."""
ROWS_AT_ONCE = 250
"""Rows whose text is held at once: long texts take tens of kilobytes each, and their tokens ten times that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedData:
    """Tokenised rows: input_ids, attention_mask, token_type_ids where the tokenizer makes them, labels for classifiers.

    In seq2seq the labels are the ids of the target text. `skipped_rows` (no text, or too short to learn from),
    `truncated_rows` and `truncated_targets` count both splits; `shortest`, `longest` and `num_tokens` are tokens of the
    training rows, `longest_target` those of their longest target.
    """

    train: Dataset
    eval: Dataset | None
    train_rows: int
    eval_rows: int
    skipped_rows: int
    truncated_rows: int
    shortest: int
    longest: int
    num_tokens: int
    truncated_targets: int = 0
    longest_target: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """Numbers of rows whose text, and whose target, was too long."""

    text: int = 0
    target: int = 0


def tokenise(
    raw: RawTables,
    problem: Problem,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_length: int,
    max_target_length: int = 0,
    watch: RowWatch = unwatched,
) -> PreparedData:
    """Return the rows as token ids, cut to `max_length` tokens (of a pair, the longer text loses tokens first).

    `watch` hears of rows that are not in the cache. Targets are cut to `max_target_length`. Rows without text are
    skipped, and in language modelling rows of a single token, which predict nothing.

    Raises:
        DataError: no row is left, or `max_length` leaves no room for text beside the special tokens.
        WriteError: the cache folder is full.
    """
    import pyarrow.compute as pc

    num_special = tokenizer.num_special_tokens_to_add(pair=len(problem.text_columns) == 2)
    _check_room(max_length, num_special, "--max-length")
    if problem.target_column is not None:
        _check_room(max_target_length, len(as_targets(tokenizer)("")["input_ids"]), "--max-target-length")
    limits = Lengths(text=max_length, target=max_target_length)
    train, train_cut = _tokenise_split(raw.train, raw.train_name, problem, tokenizer, limits, watch)
    evaluation, eval_cut = None, Cut()
    if raw.eval is not None:
        evaluation, eval_cut = _tokenise_split(raw.eval, raw.eval_name, problem, tokenizer, limits, watch)
    eval_rows = len(evaluation) if evaluation is not None else 0
    lengths = pc.list_value_length(train.data.column("input_ids"))
    targets = pc.list_value_length(train.data.column("labels")) if problem.target_column is not None else None
    return PreparedData(
        train=train,
        eval=evaluation,
        train_rows=len(train),
        eval_rows=eval_rows,
        skipped_rows=len(raw.train) - len(train) + (len(raw.eval) if raw.eval is not None else 0) - eval_rows,
        truncated_rows=train_cut.text + eval_cut.text,
        truncated_targets=train_cut.target + eval_cut.target,
        shortest=int(pc.min(lengths).as_py()),
        longest=int(pc.max(lengths).as_py()),
        num_tokens=int(pc.sum(lengths).as_py()),
        longest_target=None if targets is None else int(pc.max(targets).as_py()),
    )


def _check_room(max_length: int, num_special: int, flag: str) -> None:
    if max_length <= num_special:
        raise DataError(
            f"a maximum length of {max_length} leaves no room for text beside {num_special} special tokens; "
            f"use {flag} {num_special + 2} or more"
        )


def texts(raw: RawTables, problem: Problem, watch: RowWatch = unwatched) -> Iterator[str]:
    """Yield every text of the training rows, the columns of a row one after the other; empty ones are left out."""
    columns, num_done = problem.written_columns, 0
    with watch("Building the tokenizer", len(raw.train)) as done:
        for batch in raw.train.select_columns(list(columns)).iter(batch_size=ROWS_AT_ONCE):
            rows = list(zip(*(batch[column] for column in columns), strict=True))
            for row in rows:
                yield from (text for text in map(as_text, row) if text.strip())
            num_done += len(rows)
            done(num_done)


def _tokenise_split(
    rows: Dataset,
    name: str,
    problem: Problem,
    tokenizer: PreTrainedTokenizerBase,
    lengths: Lengths,
    watch: RowWatch,
) -> tuple[Dataset, Cut]:
    """Return the tokenised rows, and how many of them were cut to `lengths`."""
    import pyarrow.compute as pc

    tokenised = _cached(rows, name, problem, tokenizer, lengths, watch)
    if getattr(tokenizer, "is_fast", False):
        # A call with truncation leaves it switched on in the tokenizer, and so in the file saved with the model.
        tokenizer.backend_tokenizer.no_truncation()
    if not len(tokenised):
        least = "two tokens" if problem.task == "causal-lm" else "text"
        columns = " and ".join(f"'{column}'" for column in problem.written_columns)
        raise DataError(f"'{name}': none of the {len(rows)} rows has {least} in column {columns}")
    marks = [mark for mark in (TRUNCATED_COLUMN, TRUNCATED_TARGET_COLUMN) if mark in tokenised.column_names]
    cut = {mark: int(pc.sum(tokenised.data.column(mark)).as_py()) for mark in marks}
    return tokenised.remove_columns(marks), Cut(text=cut[TRUNCATED_COLUMN], target=cut.get(TRUNCATED_TARGET_COLUMN, 0))


def _cached(
    rows: Dataset,
    name: str,
    problem: Problem,
    tokenizer: PreTrainedTokenizerBase,
    lengths: Lengths,
    watch: RowWatch,
) -> Dataset:
    """Return the tokenised rows and their marks of what was cut; from the cache where it holds them."""
    read_label = None
    if problem.labels is not None and problem.label_column is not None:
        read_label = label_reader(rows, problem.label_column, problem.labels)
    fingerprint = _fingerprint(rows, problem, tokenizer, lengths)

    def make(path: Path) -> None:
        with watch(f"Tokenising '{name}'", len(rows)) as done:

            def encode(batch: dict[str, list[Any]], indices: list[int]) -> dict[str, list[Any]]:
                encoded = encode_batch(
                    batch, problem=problem, tokenizer=tokenizer, lengths=lengths, read_label=read_label
                )
                done(indices[-1] + 1)
                return encoded

            rows.map(
                encode,
                with_indices=True,
                batched=True,
                batch_size=ROWS_AT_ONCE,
                remove_columns=rows.column_names,
                features=_features(problem, has_types(tokenizer)),
                cache_file_name=str(path),
                load_from_cache_file=False,
                new_fingerprint=fingerprint,
            )

    with quiet_datasets():
        return kept_file(f"tokens-{fingerprint}.arrow", make)


def _features(problem: Problem, with_types: bool) -> Features:
    from datasets import Features, List, Value

    features = {"input_ids": List(Value("int32")), "attention_mask": List(Value("int8"))}
    if with_types:
        features["token_type_ids"] = List(Value("int8"))
    if problem.labels is not None:
        features["labels"] = Value("float32" if problem.problem_type == "regression" else "int64")
    if problem.target_column is not None:
        features |= {"labels": List(Value("int32")), TRUNCATED_TARGET_COLUMN: Value("bool")}
    return Features({**features, TRUNCATED_COLUMN: Value("bool")})


def _fingerprint(rows: Dataset, problem: Problem, tokenizer: PreTrainedTokenizerBase, lengths: Lengths) -> str:
    """Return the cache key: everything that the token ids and labels depend on."""
    from datasets.fingerprint import Hasher

    if getattr(tokenizer, "is_fast", False):
        state = json.loads(tokenizer.backend_tokenizer.to_str())
        state |= {"truncation": None, "padding": None}
        tokens: Any = json.dumps(state, sort_keys=True)
    else:
        tokens = Hasher.hash(tokenizer)
    labels = (problem.labels.kind, list(problem.labels.ids.items())) if problem.labels else None
    languages = (getattr(tokenizer, "src_lang", None), getattr(tokenizer, "tgt_lang", None))
    options = (type(tokenizer).__name__, tokenizer.model_input_names, tokenizer.truncation_side, languages)
    columns = (problem.task, problem.text_columns, problem.label_column)
    key = (FORMAT_VERSION, rows._fingerprint, columns, labels, tokens, options, (lengths.text, lengths.target))
    return hashlib.sha256(repr(key).encode()).hexdigest()[:32]
