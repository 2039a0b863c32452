"""From `DataSpec` to tables: the built-in pairs, local files and folders, the Hub."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from effcli.data.files import Splits, Table, load_local, refuse_missing
from effcli.data.held_out import hold_out
from effcli.data.hub import load_hub
from effcli.data.places import data_columns
from effcli.data.quiet import quiet_datasets
from effcli.errors import DataError
from effcli.files import at_home

if TYPE_CHECKING:
    from datasets import Dataset

    from effcli.spec import DataSpec

BUILTIN_NAME = "built-in"
BUILTIN_LABELS = ("not_equivalent", "equivalent")
EVAL_SPLITS = ("validation", "validation_matched")
"""Splits that are evaluated without being asked for; a test split often has no labels and is kept out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RawTables:
    """Rows as read. `train` holds those that train: the first ones where a limit was asked for, without those that are
    kept for evaluation; `whole_train` always holds all.

    `train_name` and `eval_name` are for error messages. `written_numbers` are text columns of the training data
    whose numbers mean numbers (CSV cells without quotes). `notes` are sentences for the user.
    """

    train: Dataset
    eval: Dataset | None
    name: str
    notes: tuple[str, ...]
    whole_train: Dataset
    train_name: str
    eval_name: str = ""
    written_numbers: frozenset[str] = frozenset()


def load_tables(spec: DataSpec, *, seed: int) -> RawTables:
    """Return the training rows, and the evaluation rows where there are any.

    Evaluation rows are those of `spec.eval`, else the validation split, else those that `spec.eval_fraction` keeps from
    training by `seed`, else none: never rows that train.

    Raises:
        DataError: a path does not exist, what is there cannot be read as a table, or rows are to be kept for
            evaluation where there is a validation split.
        UnreachableError: the Hub cannot be reached, or does not give the data set out.
    """
    with quiet_datasets():
        splits = _load(spec.train, spec)
        train = splits.tables.get("train")
        if train is None:
            found = ", ".join(splits.tables)
            raise DataError(f"'{splits.name}' has no split 'train'; found: {found}; save one under that name")
        evaluation, split_notes = _validation(splits)
        if spec.eval is not None:
            evaluation, split_notes = _only_evaluation(_load(spec.eval, spec)), ()
    for table in (train, evaluation):
        if table is not None and not len(table.rows):
            raise DataError(f"'{table.name}' has no rows; name data with at least one")
        if table is not None and not data_columns(table.rows):
            raise DataError(f"'{table.name}' has no columns; name data with a column of text")
    whole = train.rows
    used = whole if spec.limit_rows is None else whole.select(range(min(spec.limit_rows, len(whole))))
    if spec.eval_fraction is not None:
        if evaluation is not None:
            raise DataError(
                f"--eval-fraction: '{splits.name}' has a validation split, which is used; leave the flag out"
            )
        parts = hold_out(used, spec.eval_fraction, seed=seed, name=train.name)
        counts = f"{len(parts.eval):,} of {len(used):,} rows"
        split_notes += (f"{counts}, drawn by seed {seed}, are kept for evaluation and not trained on.",)
        used, evaluation = parts.train, Table(rows=parts.eval, name=f"{train.name}, rows kept for evaluation")
    return RawTables(
        train=used,
        eval=evaluation.rows if evaluation else None,
        name=splits.name,
        notes=tuple(dict.fromkeys(train.notes + (evaluation.notes if evaluation else ()) + split_notes)),
        whole_train=whole,
        train_name=train.name,
        eval_name=evaluation.name if evaluation else "",
        written_numbers=train.written_numbers,
    )


def _load(name: str | None, spec: DataSpec) -> Splits:
    if name is None:
        return _builtin()
    path = at_home(name)
    if path.exists():
        return load_local(name, path, delimiter=spec.delimiter, encoding=spec.encoding)
    refuse_missing(name)
    return load_hub(name)


def _builtin() -> Splits:
    from datasets import ClassLabel, Dataset, Features, Value

    from effcli.data.builtin import builtin_rows

    text = Value("string")
    features = Features({"sentence1": text, "sentence2": text, "label": ClassLabel(names=list(BUILTIN_LABELS))})
    train = Dataset.from_list(builtin_rows("train"), features=features)
    evaluation = Dataset.from_list(builtin_rows("eval"), features=features)
    return Splits(
        tables={
            "train": Table(rows=train, name=f"{BUILTIN_NAME} train"),
            "validation": Table(rows=evaluation, name=f"{BUILTIN_NAME} validation"),
        },
        name=BUILTIN_NAME,
    )


def _validation(splits: Splits) -> tuple[Table | None, tuple[str, ...]]:
    for split in EVAL_SPLITS:
        if split in splits.tables:
            return splits.tables[split], ()
    if len(splits.tables) > 1:
        others = ", ".join(name for name in splits.tables if name != "train")
        return None, (f"'{splits.name}' has no validation split, and its other splits ({others}) are not used.",)
    return None, ()


def _only_evaluation(splits: Splits) -> Table:
    """Return the split meant by `--eval-data`: validation, or the only one there is."""
    table, _ = _validation(splits)
    if table is not None:
        return table
    if len(splits.tables) == 1:
        return next(iter(splits.tables.values()))
    raise DataError(f"'{splits.name}' has no split 'validation'; found: {', '.join(splits.tables)}; name a single file")
