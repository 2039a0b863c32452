"""The loop with Hugging Face Accelerate: `Accelerator` prepares, runs backward, clips and steps."""

from __future__ import annotations

from contextlib import nullcontext

from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs

from effcli.engines.base import Job, UpdateResult
from effcli.engines.distributing import replica_settings, whole
from effcli.engines.precision import check_scaler
from effcli.engines.process_state import check_spread, forget_states, own_batches
from effcli.engines.window import run_windows, window_items, window_loss

MIXED_PRECISION = {"fp32": "no", "bf16": "bf16", "fp16": "fp16", "bf16-pure": "no"}


def run(job: Job) -> None:
    """Drive the job through an `Accelerator`.

    Accumulation is not left to `Accelerator.accumulate()`: it divides every window by the configured number of
    micro-batches, a short last one too, and weighs micro-batches alike whatever their item counts (accelerate 1.15).
    The schedule stays unprepared, because a prepared one steps once per process. So do the batches but for their
    device (`own_batches`). A sharded model is prepared as for evaluation, which leaves out nothing but the wrapper of
    replicas: it is sharded before its optimizer is made, the same in every engine. accelerate's own plugin shards
    afterwards and in other groups, on CUDA alone, and state that an optimizer makes early then stays whole beside the
    shards.
    """
    loop, is_sharded = job.loop, job.loop.shard == "fsdp"
    forget_states()  # an earlier run must not decide this one's precision
    accelerator = Accelerator(
        mixed_precision=MIXED_PRECISION[loop.precision],
        cpu=loop.device.type == "cpu",
        kwargs_handlers=[DistributedDataParallelKwargs(**replica_settings(loop))],
    )
    check_scaler(loop, accelerator.scaler)
    model = accelerator.prepare_model(job.model, evaluation_mode=is_sharded)
    optimizer = accelerator.prepare_optimizer(job.optimizer, device_placement=False if is_sharded else None)
    loader = own_batches(job.loader, accelerator.device)
    check_spread(accelerator, model, loop)
    job.observer.train_begin(accelerator.scaler)
    model.train()

    for window in run_windows(job, loader):
        num_items = window_items(window)
        shares = 0.0
        for index, batch in enumerate(window):
            labels = batch.pop("labels")
            last = index == len(window) - 1
            with nullcontext() if last else accelerator.no_sync(model):
                share = job.window_loss.scaled(model(**batch).logits, labels, num_items)
                accelerator.backward(share)
            shares += share.detach()
            del share

        loss = window_loss(shares)
        grad_norm = float(whole(accelerator.clip_grad_norm_(model.parameters(), loop.clip_norm)))
        job.observer.before_step(loss=loss, grad_norm=grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        skipped = accelerator.optimizer_step_was_skipped
        if not skipped:
            job.scheduler.step()
        job.observer.after_update(UpdateResult(loss=loss, grad_norm=grad_norm, skipped=skipped))

    # Mixed precision wraps `forward` in place; take the wrapper off so that the model can be saved and reused.
    accelerator.unwrap_model(model, keep_fp32_wrapper=False)
