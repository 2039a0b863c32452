"""The recipe of a configuration that a search found. No torch."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import get_args

from effcli.errors import UsageError
from effcli.estimate_spec import EstimateSpec
from effcli.measure.search_record import Configuration, SearchRecord
from effcli.memory.sharding.share import is_zero
from effcli.pipeline.launching import ZERO_ENGINE
from effcli.pipeline.searching import Candidate
from effcli.ranks.launch import launch_command
from effcli.recipes import write_recipe
from effcli.spec import RunSpec, Task, build_spec
from effcli.units import format_bytes, format_count


def check_out(path: Path, task: str, *, overwrite: bool) -> None:
    """Raise unless a recipe can be written there and be trained.

    Raises:
        UsageError: the file is there already, or no engine trains the task.
    """
    if task not in get_args(Task):
        raise UsageError(f"--out {path}: effcli train does not learn {task}; leave --out out, or give another --task")
    if path.exists() and not overwrite:
        raise UsageError(f"--out {path} is there already; give another file, or --overwrite")


def write_chosen(record: SearchRecord, candidate: Candidate, spec: EstimateSpec, out: str, *, number: int) -> None:
    """Write the recipe of row `number` of a search; `spec` is the estimate that it was planned by.

    Raises:
        WriteError: the file cannot be written.
    """
    run = _run_spec(candidate, spec, record.model.task)
    write_recipe(run, Path(out), _header(record, record.configurations[number - 1], out))


def _run_spec(candidate: Candidate, spec: EstimateSpec, task: str) -> RunSpec:
    return build_spec(
        {
            "model": {**spec.model.model_dump(exclude={"num_labels"}), "task": task},
            "data": {"max_length": spec.data.max_length, "max_target_length": spec.data.max_target_length},
            "optim": spec.optim[candidate.optimizer].model_dump(),
            "loop": {
                "precision": candidate.precision,
                "batch_size": candidate.batch_size,
                "accum": candidate.accum,
                "gradient_checkpointing": candidate.recompute,
                "shard": candidate.shard,
                **({"engine": ZERO_ENGINE} if is_zero(candidate.shard) else {}),
                "max_grad_norm": spec.loop.max_grad_norm,
            },
        }
    )


def _header(record: SearchRecord, chosen: Configuration, out: str) -> str:
    """Return the comment of a recipe; see `effcli.recipes` for its form."""
    amounts = {
        "weights": chosen.weights_bytes,
        "gradients": chosen.gradients_bytes,
        "optimizer state": chosen.optimizer_state_bytes,
    }
    amounts["total"] = sum(amounts.values())
    batch, gpus = chosen.batch, record.gpus
    rows = f"{batch.micro} x {batch.accum} rows per update"
    where = record.gpu.asked if gpus == 1 else f"{gpus} of {record.gpu.asked}, {chosen.shard}"
    each = "" if gpus == 1 else " on each"
    launched = f"{launch_command(gpus)} train --recipe {shlex.quote(out)}"
    return "\n".join(
        [
            f"Purpose: {record.model.name} with {chosen.optimizer} on {where}, {rows}{each}",
            f"Command: {launched}",
            f"Memory it expects{each}, before activations:",
            *(f"  {name:<16} {format_count(num_bytes):>16} B" for name, num_bytes in amounts.items()),
            f"Planned peak: {format_bytes(chosen.peak_allocated_bytes)} of tensors in the {chosen.peak_phase} phase, "
            f"{format_bytes(chosen.device_total_bytes)} of the device.",
            "Without --data it trains on the built-in pairs.",
        ]
    )
