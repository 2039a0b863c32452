"""`ComparisonRecord`: several runs side by side. Bytes are integers, times are seconds. No torch."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

from pydantic import Field

from effcli.facts import Fact
from effcli.measure.record import SCHEMA_VERSION, RunRecord, Status

AttemptStatus = Literal["planned", "completed", "interrupted", "failed", "missing"]
_WELL = ("completed", "planned")


class Attempt(Fact):
    """One run that was wanted: under which name, with which seed, and how it ended.

    `name` is one per column of the comparison; seeds share it. `folder` lies in that of the comparison, `run` is its
    place among the runs, None where there is no record. `missing` is one that was not started. `spec` is what was asked
    of it, its sections without what was left to defaults. `others_share` is the share of the machine's processors that
    other processes took while it ran, None where that is not known.
    """

    name: str
    seed: int
    folder: str | None = None
    status: AttemptStatus = "missing"
    failure: str | None = None
    exit_code: int | None = None
    run: int | None = None
    spec: dict[str, Any] = Field(default_factory=dict)
    others_share: float | None = None

    @property
    def ended_well(self) -> bool:
        """Return whether it did what was wanted: was completed, or planned where nothing was to be trained."""
        return self.status in _WELL


class Spread(Fact):
    """One amount over the seeds of a name: the sample's standard deviation, and its ends."""

    deviation: float
    smallest: float
    largest: float


class Summary(Fact):
    """One name of a comparison: the mean over its finished seeds; None where one of them lacks the amount.

    `status` and `failure` are those of the first seed that did not end well, where there is one. `final_loss` is the
    training loss of the last update. `ratios` hold each amount of `COMPARED` divided by that of the
    first name, and `spread` those of several seeds, where they are finite. Peaks of `update_peak_..` are those of
    updates, which is what is predicted; the peak of a whole run may be that of an evaluation. Amounts from
    `predicted_peak_reserved_bytes` to `peak_device_bytes` are those of runs on CUDA: torch's allocator, and the
    driver's samples.
    """

    name: str
    status: AttemptStatus
    seeds: tuple[int, ...]
    failure: str | None = None
    predicted_state_bytes: int | None = None
    measured_state_bytes: int | None = None
    predicted_peak_allocated_bytes: int | None = None
    peak_allocated_bytes: int | None = None
    update_peak_allocated_bytes: int | None = None
    peak_rss_bytes: int | None = None
    predicted_peak_reserved_bytes: int | None = None
    peak_reserved_bytes: int | None = None
    update_peak_reserved_bytes: int | None = None
    peak_context_bytes: int | None = None
    predicted_process_bytes: int | None = None
    peak_process_bytes: int | None = None
    peak_device_bytes: int | None = None
    seconds_per_update: float | None = None
    samples_per_second: float | None = None
    final_loss: float | None = None
    eval_loss: float | None = None
    eval_accuracy: float | None = None
    eval_f1: float | None = None
    eval_perplexity: float | None = None
    ratios: dict[str, float] = Field(default_factory=dict)
    spread: dict[str, Spread] = Field(default_factory=dict)

    @property
    def ended_well(self) -> bool:
        """Return whether every seed did what was wanted."""
        return self.status in _WELL


class ComparisonRecord(Fact):
    """Several runs, what was asked of each, and one line for each name."""

    schema_version: int = SCHEMA_VERSION
    command: str = "compare"
    status: Status = "planned"
    attempts: tuple[Attempt, ...]
    runs: tuple[RunRecord, ...] = ()
    summary: tuple[Summary, ...] = ()
    notes: tuple[str, ...] = ()

    def record_of(self, attempt: Attempt) -> RunRecord | None:
        """Return the record of an attempt, None where it left none."""
        return None if attempt.run is None else self.runs[attempt.run]

    def run_for(self, name: str) -> RunRecord | None:
        """Return the run that stands for a name where one is shown: the first seed that ended well, else the first.

        None where no seed left a record.
        """
        known = [attempt for attempt in self.attempts if attempt.name == name and attempt.run is not None]
        ended = [attempt for attempt in known if attempt.ended_well]
        return self.record_of((ended or known)[0]) if known else None


def _last_eval(field: str) -> Callable[[RunRecord], float | None]:
    return lambda run: getattr(run.eval[-1], field) if run.eval else None


def _seconds_per_update(run: RunRecord) -> float | None:
    speed = run.throughput.updates_per_second if run.throughput else 0.0
    return 1 / speed if speed > 0 else None


def _planned_on_cuda(field: str) -> Callable[[RunRecord], int | None]:
    """Return what reads an amount of a plan that means something on CUDA alone."""

    def read(run: RunRecord) -> int | None:
        plan = run.optimizer.plan
        return getattr(plan, field) if plan is not None and run.is_on_cuda else None

    return read


def _reserved(run: RunRecord) -> int | None:
    allocator = run.measured.allocator if run.measured else None
    return allocator.peak_reserved_bytes if allocator else None


def _sampled(field: str) -> Callable[[RunRecord], int | None]:
    """Return what reads the highest of the driver's samples of an amount."""
    return lambda run: getattr(run.measured.nvml, field).peak_bytes if run.measured else None


_BYTES: Mapping[str, Callable[[RunRecord], int | None]] = {
    "predicted_state_bytes": lambda run: run.optimizer.state_bytes,
    "measured_state_bytes": lambda run: run.measured.optimizer_state_bytes if run.measured else None,
    "predicted_peak_allocated_bytes": lambda run: run.comparable_planned_peak_bytes,
    "peak_allocated_bytes": lambda run: run.measured.peak_allocated_bytes if run.measured else None,
    "update_peak_allocated_bytes": lambda run: run.measured.update_peak_allocated_bytes if run.measured else None,
    "peak_rss_bytes": lambda run: run.measured.peak_rss_bytes if run.measured else None,
    "predicted_peak_reserved_bytes": _planned_on_cuda("peak_reserved_bytes"),
    "peak_reserved_bytes": _reserved,
    "update_peak_reserved_bytes": lambda run: run.measured.update_peak_reserved_bytes if run.measured else None,
    "peak_context_bytes": _sampled("context"),
    "predicted_process_bytes": _planned_on_cuda("device_total_bytes"),
    "peak_process_bytes": _sampled("process"),
    "peak_device_bytes": _sampled("device"),
}
_NUMBERS: Mapping[str, Callable[[RunRecord], float | None]] = {
    "seconds_per_update": _seconds_per_update,
    "samples_per_second": lambda run: run.throughput.samples_per_second if run.throughput else None,
    "final_loss": lambda run: run.history[-1].loss if run.history else None,
    "eval_loss": _last_eval("eval_loss"),
    "eval_accuracy": _last_eval("eval_accuracy"),
    "eval_f1": _last_eval("eval_f1"),
    "eval_perplexity": _last_eval("eval_perplexity"),
}
COMPARED = (*_BYTES, *_NUMBERS)
"""Amounts of a summary, in the order in which they are told."""


def compared(
    attempts: Sequence[Attempt], runs: Sequence[RunRecord], *, status: Status, notes: Iterable[str] = ()
) -> ComparisonRecord:
    """Return the comparison of attempts, whose `run` are places in `runs`."""
    names = list(dict.fromkeys(attempt.name for attempt in attempts))
    lines: list[Summary] = []
    for name in names:
        own = [attempt for attempt in attempts if attempt.name == name]
        lines.append(_summary(name, own, runs, first=lines[0] if lines else None))
    return ComparisonRecord(
        status=status, attempts=tuple(attempts), runs=tuple(runs), summary=tuple(lines), notes=tuple(notes)
    )


def _summary(name: str, attempts: Sequence[Attempt], runs: Sequence[RunRecord], first: Summary | None) -> Summary:
    """Return one line; the mean is over runs that ended well, unless none did."""
    ended = [attempt for attempt in attempts if attempt.ended_well] or attempts
    records = [runs[attempt.run] for attempt in ended if attempt.run is not None]
    shown = next((attempt for attempt in attempts if not attempt.ended_well), attempts[0])
    amounts: dict[str, float] = {}
    spread: dict[str, Spread] = {}
    for key, read in {**_BYTES, **_NUMBERS}.items():
        values = [value for value in map(read, records) if value is not None]
        if not values or len(values) < len(records):  # a mean over some of the seeds would pass for one over all
            continue
        amounts[key] = round(statistics.mean(values)) if key in _BYTES else statistics.mean(values)
        if len(values) > 1 and all(map(math.isfinite, values)):
            spread[key] = Spread(deviation=statistics.stdev(values), smallest=min(values), largest=max(values))
    firsts = amounts if first is None else {key: getattr(first, key) for key in amounts}
    return Summary.model_validate(
        {
            "name": name,
            "status": shown.status,
            "seeds": tuple(attempt.seed for attempt in attempts),
            "failure": shown.failure,
            "ratios": {
                key: amount / firsts[key]
                for key, amount in amounts.items()
                if firsts[key] and math.isfinite(amount) and math.isfinite(firsts[key])
            },
            "spread": spread,
            **amounts,
        }
    )
