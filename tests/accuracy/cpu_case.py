"""One combination of settings: what it is predicted to take on a CPU, and what it takes there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import get_args

import torch
import transformers
from torch.nn.utils import clip_grad_norm_
from transformers import PreTrainedModel, get_scheduler, set_seed

from effcli.data.batches import EpochBatchSampler, EpochLoader
from effcli.data.columns import Objective
from effcli.devices import weights_dtype
from effcli.engines import pytorch
from effcli.engines.base import Job, Loop
from effcli.engines.precision import autocast
from effcli.engines.window import WindowLoss
from effcli.engines.window_schedule import WindowSchedule
from effcli.memory.allocator import PlainAllocator
from effcli.models.build import recompute_activations
from effcli.models.tasks import head_for
from effcli.optim import registry
from effcli.optim.groups import decay_groups
from effcli.pipeline.predicting import Choice, Predictor, Settings, Subject, Target
from effcli.spec import OptimSpec
from effcli.trace.cpu import CpuKernels
from tests.accuracy.cpu_models import ARCHITECTURES, ROWS, TOKENS
from tests.jobs import Recorder, collator
from tests.profiled import live_bytes, profiled_peak

UPDATES = 2
_DROPOUT = 0.1


@dataclass(frozen=True, kw_only=True)
class Case:
    """One combination."""

    model: str
    optim: str
    precision: str = "fp32"
    checkpointing: bool = False
    accum: int = 1
    dropout: bool = True


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Peaks in bytes of the first and of the second update."""

    case: Case
    measured: tuple[int, ...]
    predicted: tuple[int, ...]

    @property
    def error(self) -> float:
        """Return predicted / measured - 1 of the update where it is larger."""
        errors = [ours / real - 1 for ours, real in zip(self.predicted, self.measured, strict=True)]
        return max(errors, key=abs)


def outcome(case: Case) -> Outcome:
    """Return what is predicted and what is measured."""
    return Outcome(case=case, measured=measured(case), predicted=predicted(case))


def predicted(case: Case) -> tuple[int, ...]:
    """Return the predicted peaks of both updates in bytes."""
    settings = Settings(
        batch_size=ROWS,
        max_length=TOKENS,
        accum=case.accum,
        precision=case.precision,
        gradient_checkpointing=case.checkpointing,
    )
    entry = registry.find(case.optim)
    choice = Choice.of(entry, registry.default_hyper(entry), OptimSpec())
    replay = _predictor(case.model, case.dropout).replay(settings, choice)
    return tuple(
        max(moment.total_bytes for moment in replay.moments if moment.update == update) for update in range(UPDATES)
    )


@cache
def _predictor(name: str, dropout: bool) -> Predictor:
    architecture = ARCHITECTURES[name]
    config = architecture.config(_DROPOUT * dropout)

    def build(dtype: str, recompute: bool) -> PreTrainedModel:
        with torch.device("meta"):
            return _model(name, dtype, recompute=recompute, dropout=dropout)

    subject = Subject(build=build, config=config, task=architecture.task, can_recompute=True)
    return Predictor(subject, Target(device="cpu", kernels=CpuKernels(), allocator=PlainAllocator))


def measured(case: Case) -> tuple[int, ...]:
    """Return the peaks of both updates in bytes, as the allocator has them."""
    set_seed(7)
    model = _model(
        case.model, weights_dtype(case.precision), recompute=case.checkpointing, dropout=case.dropout
    ).train()
    entry, optim = registry.find(case.optim), OptimSpec()
    decay = optim.weight_decay if entry.takes_weight_decay else 0.0
    optimizer = entry.build(decay_groups(model, decay), registry.default_hyper(entry))
    update = _update_of(case, model, optimizer)
    peaks = []
    for number in range(UPDATES):
        live = live_bytes(model, optimizer)
        peaks.append(live + profiled_peak(lambda number=number: update(number)))
    return tuple(peaks)


def _model(name: str, dtype: str, *, recompute: bool, dropout: bool) -> PreTrainedModel:
    architecture = ARCHITECTURES[name]
    auto = getattr(transformers, head_for(architecture.task).auto_class)
    model = auto.from_config(architecture.config(_DROPOUT * dropout), dtype=getattr(torch, dtype))
    if recompute:
        recompute_activations(model, name)
    return model


def _update_of(case: Case, model: PreTrainedModel, optimizer: torch.optim.Optimizer) -> Callable[[int], None]:
    """Return the function that makes update number `n`, from 0: the engine's where it trains such a task."""
    task = ARCHITECTURES[case.model].task
    if task not in get_args(Objective):
        return lambda number: _update_with_own_loss(case, model, optimizer)
    num_rows, ids = ROWS * case.accum * UPDATES, [5] * TOKENS
    loop = {
        "device": torch.device("cpu"),
        "precision": case.precision,
        "window_schedule": WindowSchedule(num_rows=num_rows, batch_size=ROWS, accum=case.accum),
        "max_grad_norm": 1.0,
        "seed": 42,
    }
    job = {
        "model": model,
        "optimizer": optimizer,
        "scheduler": get_scheduler("linear", optimizer, num_warmup_steps=0, num_training_steps=UPDATES),
        "loader": EpochLoader(
            [{"input_ids": ids, "attention_mask": [1] * TOKENS, "labels": ids if task == "seq2seq" else 1}] * num_rows,
            batch_sampler=EpochBatchSampler(num_rows, ROWS, 42),
            collate_fn=collator(task, model),
        ),
        "window_loss": WindowLoss(task),
        "observer": Recorder(),
    }
    return lambda number: pytorch.run(Job(**job, loop=Loop(**loop, total_updates=number + 1), start_update=number))


def _update_with_own_loss(case: Case, model: PreTrainedModel, optimizer: torch.optim.Optimizer) -> None:
    """Make an update as the engine does, with the loss that the model itself computes."""
    window = [_own_batch(case, model) for _ in range(case.accum)]
    for batch in window:
        _micro_step(case, model, batch)
    clip_grad_norm_(list(model.parameters()), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def _micro_step(case: Case, model: PreTrainedModel, batch: Mapping[str, torch.Tensor]) -> None:
    with autocast(torch.device("cpu"), case.precision):
        loss = model(**batch).loss
    loss.backward()


def _own_batch(case: Case, model: PreTrainedModel) -> dict[str, torch.Tensor]:
    size = model.config.image_size
    return {"pixel_values": torch.rand(ROWS, 3, size, size), "labels": torch.ones(ROWS, dtype=torch.int64)}
