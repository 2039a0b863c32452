"""Runs without a model, which end in the ways that runs end, here or in processes that start in a fraction of a second.

The folders are those of real runs, and in processes the protocol and the signals; what is measured is made up.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from effcli.engines.base import Progress, UpdateResult
from effcli.engines.session import TrainingSession
from effcli.engines.window_schedule import WindowSchedule
from effcli.errors import (
    EffcliError,
    InterruptedRunError,
    OutOfMemoryError,
    TrainingFailedError,
    UsageError,
    WriteError,
)
from effcli.measure.record import RunRecord
from effcli.pipeline.comparing.fresh_process import Ended, train_in_fresh_process
from effcli.recipes import write_recipe
from effcli.run_folder import RECIPE_PURPOSE, RunFolder, check_run_folder, open_run_folder
from effcli.run_lock import RunLock
from effcli.spec import RunSpec
from tests import comparisons

if TYPE_CHECKING:
    import pytest

WAYS = "EFFCLI_TEST_WAYS"
"""Environment variable: JSON of optimizer -> how its runs end, where not well."""
LONG = 1000
"""Updates of a run that waits for a signal."""
SLOW = 100
"""The update of such a run that a second signal finds unfinished: it takes a minute."""
_PROGRAM = """
import json, sys
sys.path[:] = json.loads(sys.argv.pop())
from tests.fake_runs import main
main()
"""


def fake_runs(monkeypatch: pytest.MonkeyPatch, ways: Mapping[str, str] | None = None) -> None:
    """Let comparisons of this process make such runs here, which end in these ways; no page is drawn unless asked."""

    def train(spec: RunSpec, *, resume: bool, overwrite: bool, progress: Progress, **unused: object) -> Ended:
        try:
            _train(spec, progress=progress, resume=resume, overwrite=overwrite)
        except EffcliError as error:
            return Ended(status="failed", failure=str(error), exit_code=error.exit_code)
        return Ended(status="completed", failure=None, exit_code=0)

    monkeypatch.setattr("effcli.pipeline.comparing.runs.train_in_fresh_process", train)
    monkeypatch.setattr("effcli.report.exports.unasked_page", lambda path, quiet: None)
    monkeypatch.setenv(WAYS, json.dumps(ways or {}))


def fake_processes(monkeypatch: pytest.MonkeyPatch, ways: Mapping[str, str] | None = None) -> None:
    """Let comparisons of this process start processes of such runs."""
    monkeypatch.setattr(
        "effcli.pipeline.comparing.runs.train_in_fresh_process", partial(train_in_fresh_process, program=_PROGRAM)
    )
    monkeypatch.setenv(WAYS, json.dumps(ways or {}))


def main() -> None:
    """Be the process of one run."""
    from effcli import pipeline
    from effcli.pipeline.comparing import run_process

    pipeline.train = _noisy
    run_process.main()


def compare() -> None:
    """Be `effcli`, with processes of such runs and without the page, whose charts take a second to load."""
    from effcli.cli import app
    from effcli.pipeline.comparing import runs
    from effcli.report import exports

    runs.train_in_fresh_process = partial(train_in_fresh_process, program=_PROGRAM)
    exports.unasked_page = lambda path, quiet: None
    app.main()


def _noisy(spec: RunSpec, *, progress: Progress, resume: bool, overwrite: bool) -> RunRecord:
    print("printed by a library")
    os.write(1, b"written by a library\n")
    return _train(spec, progress=progress, resume=resume, overwrite=overwrite)


def _train(spec: RunSpec, *, progress: Progress, resume: bool, overwrite: bool) -> RunRecord:
    """Make the updates of a run, in the way that the environment asks for."""
    way = json.loads(os.environ[WAYS]).get(spec.optim.name, "")
    progress.note("A sentence of every run.")
    if way == "refuse":
        raise UsageError("nothing to train on")
    if way == "out of memory":
        raise OutOfMemoryError("memory ran out")
    if way == "fault":
        raise KeyError("no such thing")
    if way == "deaf":
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        progress.note("deaf")
        time.sleep(60)
    if way == "wait before training":
        progress.note("waiting")
        time.sleep(60)
    folder = check_run_folder(str(spec.output.out), resume=resume, overwrite=overwrite, inputs={})
    with RunLock(folder.path) as lock:
        open_run_folder(folder, lock, overwrite=overwrite)
        write_recipe(spec, folder.recipe, f"{RECIPE_PURPOSE} {spec.output.out}")
        return _updates(spec, folder, progress, way, first=_saved_update(folder) if resume else 0)


def _updates(spec: RunSpec, folder: RunFolder, progress: Progress, way: str, *, first: int) -> RunRecord:
    total = LONG if way == "wait" else 4
    session = TrainingSession(
        window_schedule=WindowSchedule(num_rows=8, batch_size=8, accum=1),
        total_updates=total,
        save_every=None if way != "wait" else LONG,
        progress=progress,
        prepare=lambda scaler: None,
        read_lr=lambda: 1e-3,
        read_clip_norm=lambda: None,
        read_samples=lambda: 8,
        evaluate=None,
        save=lambda session: (folder.checkpoints / f"update-{session.update}").mkdir(parents=True, exist_ok=True),
        update=first,
    )
    record = comparisons.run(spec.optim.name, spec.loop.seed)
    record = record.model_copy(update={"spec": spec.model_dump(mode="json"), "total_updates": total})
    try:
        with session.stopping_on_signals():
            session.train_begin()
            while session.update < total and not (way == "wait" and first):
                if session.update == 1 and way == "die":
                    os.kill(os.getpid(), signal.SIGKILL)
                if session.update == 1 and way == "full":
                    raise WriteError("could not write; 'update-1' is intact: make room, then continue with --resume")
                if session.update == 1 and way == "fail":
                    raise TrainingFailedError("update 2: the loss is nan")
                session.after_update(UpdateResult(loss=1.0, grad_norm=1.0))
                if way == "wait":
                    time.sleep(0.02 if session.update < SLOW else 60)
    except EffcliError as error:
        status = "interrupted" if isinstance(error, InterruptedRunError) else "failed"
        _write(folder, record.model_copy(update={"status": status, "failure": str(error)}))
        raise
    finally:
        progress.stop()
    folder.model.mkdir()
    _write(folder, record)
    return record


def _saved_update(folder: RunFolder) -> int:
    return max(int(path.name.removeprefix("update-")) for path in folder.checkpoints.iterdir())


def _write(folder: RunFolder, record: RunRecord) -> None:
    folder.record.write_text(record.model_dump_json())


def attempts(document: Mapping[str, Any]) -> list[tuple[str, str, int | None]]:
    """Return name, status and exit code of each attempt of a comparison's document."""
    return [(attempt["name"], attempt["status"], attempt["exit_code"]) for attempt in document["attempts"]]


def saved(out: Path) -> dict[str, Any]:
    """Return the document that a comparison left."""
    return json.loads((out / "comparison.json").read_text())
