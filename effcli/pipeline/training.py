"""One training run from specification to record."""

from __future__ import annotations

import shlex
from dataclasses import replace
from datetime import datetime
from typing import TYPE_CHECKING

from effcli.errors import UsageError
from effcli.measure.record import RunRecord
from effcli.pipeline.build import build
from effcli.pipeline.facts import expectation, planned_record
from effcli.pipeline.guards import explained_out_of_memory
from effcli.pipeline.prepare import prepare
from effcli.pipeline.resuming import Start, find_start
from effcli.pipeline.run import Run
from effcli.pipeline.run_plan import run_plan
from effcli.pipeline.verdicts import peak_sentences
from effcli.recipes import write_recipe
from effcli.run_folder import RECIPE_PURPOSE, check_run_folder, dated_name, open_run_folder
from effcli.spec import RunSpec

if TYPE_CHECKING:
    from effcli.engines.base import Progress


def train(
    spec: RunSpec, *, progress: Progress, resume: bool, overwrite: bool, stop_after_updates: int | None
) -> RunRecord:
    """Train and return the record, which is also saved; a failed or interrupted run leaves a record that says so.

    Raises:
        EffcliError: bad input before the run; during it OutOfMemoryError, TrainingFailedError, InterruptedRunError,
            WriteError.
    """
    if resume and spec.output.out is None:
        raise UsageError("--resume needs --out with the folder of the run to continue")
    out = spec.output.out or dated_name(datetime.now(), spec.optim.name)
    spec = spec.model_copy(update={"output": spec.output.model_copy(update={"out": out})})
    inputs = {"--model": spec.model.name, "--data": spec.data.train, "--eval-data": spec.data.eval}
    folder = check_run_folder(out, resume=resume, overwrite=overwrite, inputs=inputs)
    prepared = prepare(spec, progress)
    start = find_start(prepared, folder) if resume else Start()
    prepared = replace(prepared, origin=start.origin)
    planned = run_plan(prepared, progress)
    with explained_out_of_memory(prepared):
        built = build(prepared, meta=False)
    if resume:  # the weights come from the checkpoint, whatever they were made of at first
        built = replace(built, weight_notes=())
    record = planned_record(prepared, built, planned, out=out)
    for note in (*built.weight_notes, *built.notes):
        progress.note(note)
    progress.note(expectation(record))
    for sentence in peak_sentences(record):
        progress.note(sentence)
    for sentence in start.notes:
        progress.note(sentence)
    record = record.model_copy(update={"notes": (*record.notes, *start.notes)})
    run = Run(prepared, built, folder, progress, record, start)
    open_run_folder(folder, overwrite=overwrite)
    # Without the folder, so that the recipe can be run again; `--resume` takes the folder from `--out`.
    again = prepared.spec.model_copy(update={"output": prepared.spec.output.model_copy(update={"out": None})})
    command = f"effcli train --recipe {shlex.quote(str(folder.recipe))}"
    write_recipe(again, folder.recipe, f"{RECIPE_PURPOSE} {out}\nCommand: {command}")
    return run.execute(stop_after_updates)
