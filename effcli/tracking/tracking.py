"""`Tracking`: a run as its services see it, from the first update to its end."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from effcli.errors import UnreachableError, kind_and_line
from effcli.files import write_text
from effcli.masking import masked
from effcli.ranks.group import is_main
from effcli.tracking.services import FINISH_S, SERVICES, Place, Service
from effcli.tracking.values import config_values, evaluation_values, final_values, is_due, memory_text, update_values
from effcli.tracking.worker import Worker

if TYPE_CHECKING:
    from effcli.engines.base import Progress
    from effcli.engines.session import Evaluation, Update
    from effcli.measure.record import RunRecord
    from effcli.run_folder import RunFolder
    from effcli.spec import RunSpec

START_S = 120.0
"""Seconds that a service has to begin a run; wandb itself gives up after 90."""
LOG_S = 30.0
"""Seconds that a service has to take one set of numbers."""

_IDS = "run.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Opened:
    """A service that works: its thread, its tracker, and what it was told about the run."""

    service: Service
    worker: Worker
    tracker: Any
    place: Place


class Tracking:
    """Tells services of a run; without services it does nothing.

    A service that does not begin stops the run before its first update. One that fails later is told no more, which is
    noted: the run goes on, and its record has everything.
    """

    def __init__(self, spec: RunSpec, folder: RunFolder, progress: Progress) -> None:
        self._spec, self._folder, self._progress = spec, folder.tracking, progress
        self._name = folder.path.resolve().name
        self._total_updates = 0
        self._opened: dict[str, _Opened] = {}
        self.notes: tuple[str, ...] = ()

    def start(self, *, updates_done: int, total_updates: int) -> None:
        """Begin a run named after its folder, or go on with the one that the folder is of.

        Raises:
            UnreachableError: a service does not begin.
            WriteError: the folder cannot be written to.
        """
        self._total_updates = total_updates
        names = tuple(dict.fromkeys(self._spec.output.track)) if is_main() else ()
        ids = self._ids() if names else {}
        for name in names:
            place = Place(
                folder=self._folder,
                name=ids["name"],
                run_id=ids["id"],
                first_update=updates_done + 1,
                goes_on=name in ids,
                remembered=ids.get(name) or None,
            )
            opened = self._open(name, place)
            ids[name] = opened.service.run_id(opened.tracker) or ""
            write_text(self._folder / _IDS, json.dumps(ids) + "\n")

    def update(self, history: Sequence[Update]) -> None:
        """Tell of the last update, where it is due."""
        update, logging_steps = history[-1].update, self._spec.output.logging_steps
        if self._opened and is_due(update, logging_steps=logging_steps, total_updates=self._total_updates):
            self._log(update_values(history, logging_steps), update)

    def evaluation(self, evaluation: Evaluation) -> None:
        """Tell of an evaluation."""
        self._log(evaluation_values(evaluation), evaluation.update)

    def finish(self, record: RunRecord) -> None:
        """Tell of memory and throughput, and end the run with its status; called once, however the run ended."""
        step = record.history[-1].update if record.history else 0
        if values := final_values(record):
            self._log(values, step)
        for name, opened in list(self._opened.items()):
            self._call(name, lambda it: _end(it, record, step), limit_s=FINISH_S)
            opened.worker.end()
        self._opened.clear()

    def _ids(self) -> dict[str, str]:
        """Return id and name that the run began with, and by service the id that each gave it."""
        try:
            return dict(json.loads((self._folder / _IDS).read_bytes()))
        except (OSError, ValueError):
            return {"id": secrets.token_hex(4), "name": self._name}

    def _open(self, name: str, place: Place) -> _Opened:
        from accelerate.tracking import LOGGER_TYPE_TO_CLASS

        service = SERVICES[name]
        self._folder.mkdir(parents=True, exist_ok=True)
        tracker = LOGGER_TYPE_TO_CLASS[name](**service.arguments(place))
        opened = _Opened(service=service, worker=Worker(name), tracker=tracker, place=place)

        def begin(opened: _Opened) -> None:
            tracker.start()
            if not place.goes_on or service.changes_config:
                tracker.store_init_configuration(config_values(self._spec.model_dump(mode="json")))

        if error := opened.worker.call(_surrounded(opened, begin), limit_s=START_S):
            opened.worker.end()
            raise UnreachableError(f"--track {name} did not begin: {_said(error)}; leave it out to train") from error
        self._opened[name] = opened
        return opened

    def _log(self, values: Mapping[str, float], step: int) -> None:
        for name in list(self._opened):
            self._call(name, lambda it: it.tracker.log(dict(values), step=step), limit_s=LOG_S)

    def _call(self, name: str, function: Callable[[_Opened], object], *, limit_s: float) -> None:
        """Make a call of a service that has begun; where it fails, tell it no more."""
        opened = self._opened[name]
        try:
            error = opened.worker.call(_surrounded(opened, function), limit_s=limit_s)
        except BaseException:  # a second signal: nothing is waited for any more
            del self._opened[name]
            raise
        if error is not None:
            del self._opened[name]
            opened.worker.end()
            note = f"--track {name} failed ({_said(error)}): the run goes on without it, the record has everything."
            self.notes = (*self.notes, note)
            self._progress.note(note)


def _end(opened: _Opened, record: RunRecord, step: int) -> None:
    if opened.service.exact_as_text:
        opened.tracker.log({"memory": memory_text(record)}, step=step)
    opened.service.end(opened.tracker, record.status)
    opened.tracker.finish()


def _said(error: BaseException) -> str:
    return masked(kind_and_line(error))


def _surrounded(opened: _Opened, function: Callable[[_Opened], object]) -> Callable[[], None]:
    """Return a call with what accelerate's trackers and the service look for around it."""

    def call() -> None:
        from effcli.engines.process_state import one_process

        with _environment(opened.service.environment(opened.place)), one_process():
            function(opened)

    return call


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
