"""A run that is stopped and resumed beside one that is not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from effcli import pipeline
from effcli.errors import InterruptedRunError
from effcli.measure.record import RunRecord
from effcli.report.progress import QuietProgress
from tests.commands import TINY_DISTILBERT, csv_file, model_folder, same_weights, saved_weights, untimed


def settings(
    folder: Path, out: str, optim: dict[str, Any], *, model: dict[str, Any] | None = None, **loop: Any
) -> dict[str, Any]:
    """Return the settings of ten updates on a tiny classifier with dropout, evaluated after every fifth."""
    made, data = model_folder(folder / "encoder", TINY_DISTILBERT, dropout=0.1), str(csv_file(folder / "d.csv", 20))
    return {
        "model": {"name": str(made)} | (model or {}),
        "data": {"train": data, "eval": data},
        "optim": {"lr": 1e-3} | optim,
        "loop": {"batch_size": 2, "accum": 2, "epochs": 2} | loop,
        "output": {"out": str(folder / out)},
    }


def train_and_stop(flags: dict[str, Any], *, after: int) -> None:
    """Train with these settings, stopped after an update as by a signal."""
    with pytest.raises(InterruptedRunError):
        pipeline.train(pipeline.resolve_spec(flags), progress=QuietProgress(), stop_after_updates=after)


def check_that_a_stop_changes_nothing(
    folder: Path, optim: dict[str, Any], *, model: dict[str, Any] | None = None, **loop: Any
) -> RunRecord:
    """Return the record of a run stopped after update 3 and resumed, checked to be that of a whole run bit for bit.

    The whole run is in the folder `whole`. The state that was predicted is the state that both measured.
    """
    progress, parts = QuietProgress(), folder / "parts"
    whole = pipeline.train(
        pipeline.resolve_spec(settings(folder, "whole", optim, model=model, **loop)), progress=progress
    )
    train_and_stop(settings(folder, "parts", optim, model=model, **loop), after=3)
    assert json.loads((parts / "record.json").read_text())["status"] == "interrupted"
    assert not (parts / "model").exists()
    rest = pipeline.train(pipeline.resolve_spec({}, resume_from=str(parts)), progress=progress, resume=True)

    assert rest.spec["optim"] == whole.spec["optim"]
    assert untimed(rest.history) == untimed(whole.history)
    assert rest.eval == whole.eval
    assert same_weights(saved_weights(folder / "whole"), saved_weights(parts))
    assert whole.measured.tensors == whole.optimizer.tensors
    assert whole.measured.optimizer_state_bytes == whole.optimizer.state_bytes
    assert rest.measured.tensors == whole.measured.tensors
    assert rest.measured.optimizer_state_bytes == whole.measured.optimizer_state_bytes
    return rest
