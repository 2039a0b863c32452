"""Small training jobs for engine tests: tiny models, rows of uneven length, an observer that keeps everything."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import pytest
import torch
from transformers import get_scheduler, set_seed

from effcli.data.batches import Collator, EpochBatchSampler, EpochLoader, Part
from effcli.engines.base import Job, Loop, UpdateResult
from effcli.engines.clipping import PercentileClipping
from effcli.engines.distributing import shard, whole
from effcli.engines.window import WindowLoss
from effcli.engines.window_schedule import WindowSchedule
from effcli.models.seq2seq import decoder_inputs
from effcli.optim.groups import decay_groups
from effcli.ranks.group import rank, world_size
from tests.heads import PAD, rows, tiny_model

ENGINES = ("pytorch", "accelerate", "trainer")
ONE_FAST_ENGINE = ("pytorch", *(pytest.param(engine, marks=pytest.mark.slow) for engine in ENGINES[1:]))
"""For what no engine has a part in of its own: one of them in the fast tests, all of them in the slow ones."""


@dataclass
class Recorder:
    """Observer that keeps what it is told, the learning rate that each step used, the limit of its norm, and the scale
    of fp16 after each update."""

    seed: int = 42
    read_limit: Callable[[], float | None] = lambda: None
    results: list[UpdateResult] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    limits: list[float | None] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)
    scaler: torch.amp.GradScaler | None = None

    def train_begin(self, scaler: torch.amp.GradScaler | None = None) -> None:
        self.scaler = scaler
        set_seed(self.seed)

    def before_step(self, *, loss: float, grad_norm: float) -> None:
        assert math.isfinite(loss)
        assert math.isfinite(grad_norm) or self.scaler is not None

    def after_update(self, result: UpdateResult) -> None:
        self.results.append(result)
        self.limits.append(self.read_limit())
        if self.scaler is not None:
            self.scales.append(self.scaler.get_scale())


@dataclass(frozen=True)
class Outcome:
    losses: list[float]
    grad_norms: list[float]
    rates: list[float]
    limits: list[float | None]
    skipped: list[bool]
    scales: list[float]
    weights: dict[str, torch.Tensor]
    model: torch.nn.Module


def collator(task: str, model: torch.nn.Module, stand_in: dict[str, Any] | None = None) -> Collator:
    """Return what makes batches for a model, as a run has it."""
    return Collator(PAD, "right", task, decoder_inputs(model, "tiny") if task == "seq2seq" else None, stand_in)


def run_job(
    engine: str,
    task: str,
    *,
    num_rows: int,
    batch_size: int,
    accum: int,
    epochs: int = 1,
    make_optimizer: Callable[[list[dict[str, Any]]], torch.optim.Optimizer] = lambda groups: torch.optim.SGD(
        groups, lr=0.1
    ),
    model: torch.nn.Module | None = None,
    made_rows: list[dict[str, Any]] | None = None,
    dropout: float = 0.0,
    family: str | None = None,
    max_grad_norm: float = 1.0,
    precision: str = "fp32",
    scheduler: str = "linear",
    warmup: int = 0,
    max_steps: int | None = None,
    num_workers: int = 0,
    start: int = 0,
    percentile: float | None = None,
    window_loss: WindowLoss | None = None,
    prepare: Callable[[torch.nn.Module, torch.optim.Optimizer, Any], None] = lambda *parts: None,
    is_sharded: bool = False,
) -> Outcome:
    """Run one job, or this process's part of it among several, and return what came out."""
    model = tiny_model(task, dropout=dropout, family=family) if model is None else model
    if is_sharded:
        shard(model, torch.device("cpu"))
    made_rows = rows(num_rows, task) if made_rows is None else made_rows
    part = Part(rank=rank(), world_size=world_size())
    per_epoch = math.ceil(math.ceil(len(made_rows) / (batch_size * part.world_size)) / accum)
    total = max_steps or epochs * per_epoch
    optimizer = make_optimizer(decay_groups(model, 0.01))
    schedule = get_scheduler(scheduler, optimizer, num_warmup_steps=warmup, num_training_steps=total)
    recorder = Recorder()
    handle = optimizer.register_step_pre_hook(lambda opt, *_: recorder.rates.append(opt.param_groups[0]["lr"]))
    prepare(model, optimizer, schedule)
    loop = Loop(
        device=torch.device("cpu"),
        precision=precision,
        window_schedule=WindowSchedule(
            num_rows=len(made_rows), batch_size=batch_size, accum=accum, world_size=part.world_size
        ),
        max_grad_norm=max_grad_norm,
        total_updates=total,
        seed=42,
        shard="fsdp" if is_sharded else "ddp",
        percentile_clipping=percentile,
    )
    clipping = PercentileClipping(model, optimizer, loop)
    recorder.read_limit = lambda: clipping.limit
    loader = EpochLoader(
        made_rows,
        batch_sampler=EpochBatchSampler(len(made_rows), batch_size, 42, part=part),
        collate_fn=collator(task, model, made_rows[0]),
        generator=torch.Generator().manual_seed(0),
        num_workers=num_workers,
    )
    job = Job(
        model=model,
        optimizer=optimizer,
        scheduler=schedule,
        loader=loader,
        window_loss=window_loss or WindowLoss(task),
        loop=loop,
        start_update=start,
        observer=recorder,
    )
    import_module(f"effcli.engines.{engine}").run(job)
    handle.remove()
    return Outcome(
        losses=[result.loss for result in recorder.results],
        grad_norms=[result.grad_norm for result in recorder.results],
        rates=recorder.rates,
        limits=recorder.limits,
        skipped=[result.skipped for result in recorder.results],
        scales=recorder.scales,
        weights={name: whole(value).detach().clone() for name, value in model.state_dict().items()},
        model=model,
    )
