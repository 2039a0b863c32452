"""The Python API: `resolve_spec` with `plan` and `train`, `resolve_estimate` with `estimate`, `resolve_search` with
`search`, `resolve_comparison` with `compare` and `plan_comparison`; `inspect`; `doctor` and `read_history`."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from effcli.pipeline.comparing.planned import plan_comparison
from effcli.pipeline.comparing.runs import compare
from effcli.pipeline.comparing.settings import Comparison, resolve_comparison
from effcli.pipeline.comparing.verdict import check_compared, checking_compared
from effcli.pipeline.doctoring.verdict import check_requested_device
from effcli.pipeline.estimate_settings import resolve_estimate, resolve_search
from effcli.pipeline.estimating import estimate
from effcli.pipeline.resolve import resolve_spec
from effcli.pipeline.tolerance import check_prediction, check_predictions
from effcli.pipeline.verdicts import check_budget, check_found

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from effcli.engines.base import Progress
    from effcli.history.record import History
    from effcli.measure.doctor_record import DoctorRecord
    from effcli.measure.inspection_record import InspectionRecord
    from effcli.measure.record import RunRecord
    from effcli.measure.search_record import SearchRecord
    from effcli.search_spec import SearchSpec
    from effcli.spec import RunSpec

__all__ = [
    "Comparison",
    "check_budget",
    "check_compared",
    "check_found",
    "check_prediction",
    "check_predictions",
    "check_requested_device",
    "checking_compared",
    "compare",
    "doctor",
    "estimate",
    "inspect",
    "plan",
    "plan_comparison",
    "read_history",
    "resolve_comparison",
    "resolve_estimate",
    "resolve_search",
    "resolve_spec",
    "search",
    "train",
]


def doctor(device: str | None = None, *, tell: Callable[[str], object] | None = None) -> DoctorRecord:
    """Return what works on this machine. `device` is the one that has to, None or auto for the one that a run takes.

    `tell` is given tracebacks, and what processes complained about.

    Raises:
        UsageError: there is no device of this name.
    """
    from effcli.pipeline.doctoring.examine import examine
    from effcli.spec import build_spec

    wanted = "auto" if device is None else build_spec({"loop": {"device": device}}).loop.device
    return examine(None if wanted == "auto" else wanted, tell or (lambda text: None))


def read_history() -> History:
    """Return the runs of this machine that are kept, predicted beside measured."""
    from effcli.history.read import read_history

    return read_history()


def inspect(
    path: Path, *, model: str | None = None, values: str | None = None, most_values: int | None = None
) -> InspectionRecord:
    """Return what a saved optimizer state holds.

    `model` names the model that it belongs to, `values` is a pattern of the states whose values are shown, at most
    `most_values` of them.

    Raises:
        EffcliError: see `effcli.pipeline.inspecting.inspect`.
    """
    from effcli.pipeline import inspecting

    return inspecting.inspect(path, model=model, values=values, most_values=most_values)


def plan(spec: RunSpec, *, progress: Progress) -> RunRecord:
    """Return the record of a run that is checked, data included, but not started; no weights are allocated.

    Raises:
        EffcliError: see `effcli.pipeline.prepare.prepare`.
    """
    with _among_others(spec):
        from effcli.pipeline.agreement import check_same_rows
        from effcli.pipeline.build import build
        from effcli.pipeline.facts import planned_record
        from effcli.pipeline.prepare import prepare
        from effcli.pipeline.run_plan import RunPlanner

        prepared = prepare(spec, progress)
        check_same_rows(prepared)
        planned = RunPlanner(prepared).plan(prepared, progress)
        built = build(prepared, meta=True)
        for note in (*built.weight_notes, *built.notes):
            progress.note(note)
        return planned_record(prepared, built, planned, out=spec.output.out)


def search(spec: SearchSpec, *, overwrite: bool = False, notes: Sequence[str] = ()) -> SearchRecord:
    """Return the settings of a model that fit a card, the fastest by assumption first; `notes` are kept in the record.

    Raises:
        EffcliError: see `effcli.pipeline.choosing.search_fitting`.
    """
    from effcli.pipeline import choosing

    return choosing.search_fitting(spec, overwrite=overwrite, notes=notes)


def train(
    spec: RunSpec,
    *,
    progress: Progress,
    resume: bool = False,
    overwrite: bool = False,
    stop_after_updates: int | None = None,
) -> RunRecord:
    """Train, save model, recipe and record in the run folder, and return the record.

    `stop_after_updates` stops as a signal would, after that update of the run.

    Raises:
        EffcliError: see `effcli.pipeline.running.training.train`.
    """
    from effcli.pipeline.launching import check_restart

    check_restart(resume=resume)
    with _among_others(spec, resume=resume, overwrite=overwrite):
        from effcli.pipeline.running import training

        return training.train(
            spec, progress=progress, resume=resume, overwrite=overwrite, stop_after_updates=stop_after_updates
        )


@contextmanager
def _among_others(spec: RunSpec, **flags: bool) -> Iterator[None]:
    """Choose the device of a run before anything is imported that starts CUDA, and join the processes of its launch.

    Once CUDA has started no device can be hidden, and torchao starts it (0.18): as it is imported it asks Triton about
    the card, and transformers imports it (5.24).

    Raises:
        EffcliError: the device is not there, or the processes did not find each other, or are not of the same mind.
    """
    from effcli.devices import resolve_device
    from effcli.pipeline.agreement import started_with
    from effcli.ranks.group import joined
    from effcli.ranks.launch import read_launch
    from effcli.ranks.meeting import met

    launch = read_launch()
    with (
        met(launch, started_with(spec, **flags)) as store,
        joined(launch, resolve_device(spec.loop.device, launch), store),
    ):
        yield
