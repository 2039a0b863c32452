"""Jobs under DeepSpeed beside the same under DDP, in each process of a launch; rank 0 writes a file of JSON.

python -m torch.distributed.run --nproc-per-node N -m tests.deepspeed_jobs FILE
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

import effcli.engines.deepspeed  # noqa: F401  # before the group is there, which it must take as it finds it
from effcli.engines.base import Loop
from effcli.engines.flat_partitions import FlatPartitions
from effcli.ranks.group import joined
from effcli.ranks.launch import read_launch
from effcli.ranks.meeting import met
from tests import jobs

HALF = 3
"""Updates after which a run goes on from the state of another."""

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9),
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=1e-3),
}

Parts = tuple[torch.nn.Module, torch.optim.Optimizer, Any]


def job(
    shard: str, optimizer: str, task: str, *, max_steps: int = 6, start: int = 0, load: Mapping[str, Any] | None = None
) -> tuple[jobs.Outcome, Parts]:
    """Run two epochs of 22 rows in windows of 8, the last one shorter, or a part; also return what was trained."""
    made: list[Parts] = []
    begin = jobs.Recorder.train_begin

    def train_begin(self: jobs.Recorder, scaler: Any = None) -> None:
        begin(self, scaler)
        if load is not None:
            model, stepped, schedule = made[0]
            FlatPartitions.of(model).load_weights(load["weights"])
            FlatPartitions.of(stepped).load_state(load["state"])
            schedule.load_state_dict(load["schedule"])

    with (
        patch.object(jobs, "Loop", lambda **settings: Loop(**{**settings, "shard": shard})),
        patch.object(jobs.Recorder, "train_begin", train_begin),
    ):
        outcome = jobs.run_job(
            "pytorch" if shard == "ddp" else "deepspeed", task,
            num_rows=22, batch_size=2, accum=2, epochs=2, make_optimizer=OPTIMIZERS[optimizer],
            prepare=lambda *parts: made.append(parts), max_steps=max_steps, start=start, scheduler="constant",
        )  # fmt: skip
    return outcome, made[0]


def main(file: Path) -> None:
    """Write how far each run under DeepSpeed is from that under DDP."""
    launch = read_launch()
    found = []
    with met(launch, {}) as store, joined(launch, torch.device("cpu"), store):
        for optimizer, task in (("sgd", "causal-lm"), ("adamw", "classification")):
            whole, _ = job("ddp", optimizer, task)
            _, (model, stepped, schedule) = job("ddp", optimizer, task, max_steps=HALF)
            load = {
                "weights": {name: value.clone() for name, value in model.state_dict().items()},
                "state": stepped.state_dict(),
                "schedule": schedule.state_dict(),
            }
            for shard in ("zero1", "zero2", "zero3"):
                for start in (0, HALF):
                    outcome, (model, stepped, _) = job(
                        shard, optimizer, task, start=start, load=load if start else None
                    )
                    partitions = FlatPartitions.of(model)
                    weights, state = partitions.weights(), FlatPartitions.of(stepped).state()
                    found.append({
                        "case": [shard, optimizer, task, start],
                        "losses": [whole.losses[start:], outcome.losses],
                        "norms": [whole.grad_norms[start:], outcome.grad_norms],
                        "rates": [whole.rates[start:], outcome.rates],
                        "weights": max(
                            (float((value - whole.weights[name]).abs().max()) for name, value in weights.items()
                             if value is not None), default=0.0
                        ),
                        "entries": [len(state["state"]), len(load["state"]["state"])],
                        "groups": [
                            [group["params"] for group in groups["param_groups"]] for groups in (state, load["state"])
                        ],
                    })  # fmt: skip
    if launch.is_main:
        file.write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
