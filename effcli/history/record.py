"""`History`: the runs that are kept, and how good their predictions were."""

from __future__ import annotations

from statistics import median

from effcli.facts import Fact
from effcli.history.entry import HistoryEntry


class PeakErrors(Fact):
    """How far predicted peaks of tensors were from measured ones, as shares of the measured, over completed runs.

    Runs that did not end by themselves may not have met the batch that the peak was predicted for. `median_error` and
    `largest_error` are without sign, None where `num_runs` is 0.
    """

    num_runs: int
    median_error: float | None = None
    largest_error: float | None = None


class History(Fact):
    """The runs that are kept, the oldest first.

    `file` is where they are kept, None where they are not (`EFFCLI_HISTORY=off`). `num_damaged` lines of it were left
    out, as they could not be read. `reason` says why there are none where the file itself could not be read.
    """

    schema_version: int = 1
    command: str = "doctor"
    file: str | None
    runs: tuple[HistoryEntry, ...] = ()
    num_damaged: int = 0
    peak_errors: PeakErrors = PeakErrors(num_runs=0)
    reason: str | None = None


def peak_errors(runs: tuple[HistoryEntry, ...]) -> PeakErrors:
    """Return how far the peaks of the completed runs were predicted from what was measured."""
    pairs = (run.pairs.get("peak_allocated") for run in runs if run.status == "completed")
    errors = [abs(pair.error) for pair in pairs if pair is not None and pair.error is not None]
    if not errors:
        return PeakErrors(num_runs=0)
    return PeakErrors(num_runs=len(errors), median_error=median(errors), largest_error=max(errors))
