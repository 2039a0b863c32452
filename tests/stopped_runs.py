"""A run that is stopped and resumed beside one that is not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from commands import F1, csv_file, model_folder
from safetensors.torch import load_file

from effcli import pipeline
from effcli.errors import InterruptedRunError
from effcli.measure.record import RunRecord
from effcli.report.progress import QuietProgress


def settings(folder: Path, out: str, optim: dict[str, Any], **loop: Any) -> dict[str, Any]:
    """Return the settings of ten updates on F1 with dropout, evaluated after every fifth."""
    model, data = model_folder(folder / "f1", F1, dropout=0.1), str(csv_file(folder / "d.csv", 20))
    return {
        "model": {"name": str(model)},
        "data": {"train": data, "eval": data},
        "optim": {"lr": 1e-3} | optim,
        "loop": {"batch_size": 2, "accum": 2, "epochs": 2} | loop,
        "output": {"out": str(folder / out)},
    }


def saved_weights(folder: Path, out: str) -> dict[str, torch.Tensor]:
    """Return the final model of a run."""
    return load_file(folder / out / "model" / "model.safetensors")


def check_that_a_stop_changes_nothing(folder: Path, optim: dict[str, Any], **loop: Any) -> RunRecord:
    """Return the record of a run, after checking that one stopped after update 3 and resumed is the same bit for bit.

    The state that was predicted is the state that both measured.
    """
    progress = QuietProgress()
    whole = pipeline.train(pipeline.resolve_spec(settings(folder, "whole", optim, **loop)), progress=progress)
    spec = pipeline.resolve_spec(settings(folder, "parts", optim, **loop))
    with pytest.raises(InterruptedRunError):
        pipeline.train(spec, progress=progress, stop_after_updates=3)
    again = pipeline.resolve_spec({}, resume_from=str(folder / "parts"))
    rest = pipeline.train(again, progress=progress, resume=True)

    assert rest.history == whole.history
    assert rest.eval == whole.eval
    one, other = saved_weights(folder, "whole"), saved_weights(folder, "parts")
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert whole.measured.tensors == whole.optimizer.tensors
    assert whole.measured.optimizer_state_bytes == whole.optimizer.state_bytes
    assert rest.measured.tensors == whole.measured.tensors
    return whole
