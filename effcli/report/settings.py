"""What the runs of a comparison have in common, and in what they differ beside the optimizer; reads only the record."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from effcli.measure.joining import NO_OTHER_RUN
from effcli.report.number_text import NOT_AVAILABLE
from effcli.report.text import parameter_counts, rate
from effcli.setting_texts import UNSET, mapping, run_settings, setting_label, setting_text
from effcli.units import count

if TYPE_CHECKING:
    from effcli.measure.comparison_record import ComparisonRecord
    from effcli.measure.record import RunRecord

_Read = Callable[["RunRecord"], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One setting that runs do not share: its values, and who has each.

    `expected` says that it comes with the choice of the optimizer.
    """

    label: str
    values: Mapping[str, tuple[str, ...]]
    expected: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Labels and texts that all runs share, and the differences, in the order in which they are told."""

    shared: tuple[tuple[str, str], ...]
    differences: tuple[Difference, ...]


def settings_of(record: ComparisonRecord) -> Settings:
    """Return what the runs share and in what they differ; both are empty where no run left a record."""
    runs = _runs_by_name(record)
    shared: list[tuple[str, str]] = []
    differences: list[Difference] = []
    for label, parts in _LINES.items():
        same = []
        for part, read in parts.items():
            values = _by_value(runs, read)
            if len(values) == 1:
                same.append(next(iter(values)))
            elif values:
                differences.append(Difference(label=part, values=values, expected=part in _EXPECTED))
        if text := ", ".join(filter(None, same)):
            shared.append((label, text))
    return Settings(shared=tuple(shared), differences=(*differences, *_further(runs)))


def _runs_by_name(record: ComparisonRecord) -> list[tuple[str, RunRecord]]:
    return [(attempt.name, run) for attempt in record.attempts if (run := record.record_of(attempt)) is not None]


def _by_value(runs: Sequence[tuple[str, RunRecord]], read: _Read) -> dict[str, tuple[str, ...]]:
    """Return each value with the names that have it, once each."""
    found: dict[str, dict[str, None]] = {}
    for name, run in runs:
        found.setdefault(read(run), {})[name] = None
    return {value: tuple(names) for value, names in found.items()}


def _further(runs: Sequence[tuple[str, RunRecord]]) -> Iterator[Difference]:
    """Yield the settings and versions that differ and have no line of their own."""
    flat = [(name, run_settings(run.spec)) for name, run in runs]
    versions = [(name, mapping(run.environment.get("packages"))) for name, run in runs]
    for members, told, missing in ((flat, _TOLD, UNSET), (versions, ("torch", "transformers"), "not installed")):
        for key in dict.fromkeys(key for _, values in members for key in values if key not in told):
            found: dict[str, dict[str, None]] = {}
            for name, values in members:
                found.setdefault(setting_text(values[key]) if key in values else missing, {})[name] = None
            if len(found) > 1:
                by_value = {value: tuple(names) for value, names in found.items()}
                yield Difference(label=setting_label(key), values=by_value, expected=key.startswith("optim."))


def _spec(run: RunRecord, section: str, key: str) -> Any:
    return mapping(run.spec.get(section)).get(key)


def _data(run: RunRecord) -> str:
    name = _spec(run, "data", "train")
    return "built-in sentence pairs" if name is None else str(name)


def _rows(run: RunRecord) -> str:
    data = run.data
    rows = f"{count(data.train_rows, 'training row')}, {count(data.eval_rows, 'evaluation row')}"
    length = _spec(run, "data", "max_length")
    return f"{rows}, at most {count(length, 'token')}" if isinstance(length, int) else rows


def _batch(run: RunRecord) -> str:
    batch = run.batch
    processes = f" x {batch.world_size}" if batch.world_size > 1 else ""
    return f"{batch.micro} x {batch.accum}{processes} = {count(batch.effective, 'row')} per update"


def _device(run: RunRecord) -> str:
    name = run.environment.get("device_name")
    return f"on {run.environment.get('device', NOT_AVAILABLE)}{f' ({name})' if name else ''}"


def _learning_rate(run: RunRecord) -> str:
    """Return the rate that was asked for, else the highest that was used: the defaults are the optimizers' own."""
    asked = _spec(run, "optim", "lr")
    if asked is None and run.history:
        asked = max(update.lr for update in run.history)
    return f"lr {rate(asked)}" if isinstance(asked, int | float) else "lr of its own"


def _version(package: str) -> _Read:
    def read(run: RunRecord) -> str:
        version = mapping(run.environment.get("packages")).get(package)
        return f"{package} {version}" if version else ""

    return read


def _environment(key: str, text: str) -> _Read:
    def read(run: RunRecord) -> str:
        value = run.environment.get(key)
        return text.format(value) if value is not None else ""

    return read


def _threads(run: RunRecord) -> str:
    threads = run.environment.get("torch_threads")
    return count(threads, "thread") if isinstance(threads, int) else ""


_LINES: Mapping[str, Mapping[str, _Read]] = {
    "model": {"model": lambda run: run.model.name},
    "type": {"architecture": lambda run: run.model.architecture, "task": lambda run: run.model.task},
    "parameters": {"parameters": lambda run: parameter_counts(run.model)},
    "data": {"data": _data, "rows": _rows},
    "batch": {"batch": _batch, "updates": lambda run: f"{count(run.total_updates, 'update')} planned"},
    "run": {
        "engine": lambda run: f"engine {setting_text(_spec(run, 'loop', 'engine'))}",
        "precision": lambda run: setting_text(_spec(run, "loop", "precision")),
        "device": _device,
    },
    "optimizer": {
        "lr": _learning_rate,
        "weight decay": lambda run: f"weight decay {setting_text(_spec(run, 'optim', 'weight_decay'))}",
        "schedule": lambda run: f"schedule {setting_text(_spec(run, 'loop', 'scheduler'))}",
    },
    "software": {
        "effcli": _environment("effcli", "effcli {}"),
        "Python": _environment("python", "Python {}"),
        "torch": _version("torch"),
        "transformers": _version("transformers"),
        "platform": _environment("platform", "{}"),
        "threads": _threads,
    },
}
"""Lines -> parts; what is shared stands in the line, what differs under the name of its part."""

_EXPECTED = frozenset({"lr", "weight decay", "schedule"})
_TOLD = NO_OTHER_RUN | frozenset(
    ("model.name", "model.task", "data.train", "data.max_length", "loop.engine", "loop.precision",
     "loop.batch_size", "loop.accum", "loop.epochs", "loop.max_steps", "loop.scheduler", "optim.name",
     "optim.lr", "optim.weight_decay")
)  # fmt: skip
"""Settings that the lines tell, or that facts of the record tell better."""
