"""The bare PyTorch loop."""

from __future__ import annotations

import torch
from torch.nn.utils import clip_grad_norm_

from effcli.engines.base import Batch, Job, UpdateResult
from effcli.engines.precision import autocast
from effcli.engines.window import count_items, windows


def run(job: Job) -> None:
    """Drive the job: forward and backward per micro-batch, then clip, step and advance the schedule once per update."""
    loop, model, optimizer = job.loop, job.model, job.optimizer
    scaler = torch.amp.GradScaler(loop.device.type, enabled=loop.precision == "fp16")
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    update = job.start_update
    job.observer.train_begin()
    model.train()

    while update < loop.total_updates:
        job.loader.set_epoch(update // loop.updates_per_epoch)
        job.loader.skip_next(update % loop.updates_per_epoch * loop.accum)
        for window in windows(job.loader, loop.accum):
            num_items = sum(count_items(batch["labels"]) for batch in window)
            loss = sum(_micro_step(job, scaler, batch, num_items) for batch in window)

            scaler.unscale_(optimizer)
            grad_norm = clip_grad_norm_(parameters, loop.clip_norm)
            scale = scaler.get_scale()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=True)
            skipped = scaler.get_scale() < scale
            if not skipped:
                job.scheduler.step()

            update += 1
            job.observer.after_update(UpdateResult(loss=float(loss), grad_norm=float(grad_norm), skipped=skipped))
            if update == loop.total_updates:
                break


def _micro_step(job: Job, scaler: torch.amp.GradScaler, batch: Batch, num_items: int) -> torch.Tensor:
    """Add one micro-batch's gradients; return its share of the window's loss.

    A function of its own, so that outputs and activations are freed before the next micro-batch's forward.
    """
    device = job.loop.device
    inputs = {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}
    labels = inputs.pop("labels")
    with autocast(device, job.loop.precision):
        logits = job.model(**inputs).logits
    loss = job.window_loss.scaled(logits, labels, num_items)
    scaler.scale(loss).backward()
    return loss.detach()
