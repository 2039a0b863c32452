"""The bare PyTorch loop."""

from __future__ import annotations

import torch
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from effcli.engines.base import Batch, Job, UpdateResult
from effcli.engines.distributing import exchanging, replicated, whole
from effcli.engines.precision import autocast
from effcli.engines.window import run_windows, window_items, window_loss


def run(job: Job) -> None:
    """Drive the job: forward and backward per micro-batch, then clip, step and advance the schedule once per update."""
    loop, optimizer = job.loop, job.optimizer
    model = replicated(job.model, loop)
    scaler = torch.amp.GradScaler(loop.device.type, enabled=loop.precision == "fp16")
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    job.observer.train_begin(scaler if scaler.is_enabled() else None)
    model.train()

    for window in run_windows(job, job.loader):
        num_items = window_items(window)
        loss = window_loss(
            sum(
                _micro_step(job, model, scaler, batch, num_items, is_last=index == len(window) - 1)
                for index, batch in enumerate(window)
            )
        )

        scaler.unscale_(optimizer)
        norm = get_total_norm([parameter.grad for parameter in parameters if parameter.grad is not None])
        grad_norm = float(whole(norm))
        job.observer.before_step(loss=loss, grad_norm=grad_norm)
        clip_grads_with_norm_(parameters, loop.clip_norm, norm)
        scale = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        skipped = scaler.get_scale() < scale
        if not skipped:
            job.scheduler.step()
        job.observer.after_update(UpdateResult(loss=loss, grad_norm=grad_norm, skipped=skipped))


def _micro_step(
    job: Job, model: torch.nn.Module, scaler: torch.amp.GradScaler, batch: Batch, num_items: int, *, is_last: bool
) -> torch.Tensor:
    """Add one micro-batch's gradients; return its share of the window's loss.

    A function of its own, so that outputs and activations are freed before the next micro-batch's forward.
    """
    device = job.loop.device
    inputs = {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}
    labels = inputs.pop("labels")
    with exchanging(model, is_last=is_last):
        with autocast(device, job.loop.precision):
            logits = model(**inputs).logits
        loss = job.window_loss.scaled(logits, labels, num_items)
        del logits  # the loss has kept what its backward needs, and with a large vocabulary they are much beside it
        scaler.scale(loss).backward()
    return loss.detach()
