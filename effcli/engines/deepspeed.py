"""The loop with DeepSpeed's ZeRO: accelerate's plugin prepares, DeepSpeed runs backward, exchanges, clips and steps."""

from __future__ import annotations

import copy
import math
import sys
from collections import OrderedDict
from typing import Any

import torch
from accelerate import Accelerator, DeepSpeedPlugin
from accelerate.utils import InitProcessGroupKwargs
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from effcli.engines.base import Job, Loop, UpdateResult
from effcli.engines.flat_partitions import FlatPartitions
from effcli.engines.process_state import forget_states, own_batches
from effcli.engines.window import run_windows, window_items, window_loss
from effcli.errors import DeviceError
from effcli.ranks.group import backend_of, world_size

STAGES = {"zero1": 1, "zero2": 2, "zero3": 3}


def run(job: Job) -> None:
    """Drive the job through a `DeepSpeedEngine`.

    accelerate's own `backward` steps as well, with nothing between clipping and the step (1.15), so that the engine
    below it is driven. A window ends where it ends, and its loss is that of the window already. Gradients are exchanged
    once per update in stage 1, after each micro-batch in stages 2 and 3, where no process holds all of them.

    DeepSpeed steps once per parameter group. It is given a copy of the optimizer with the same state and without hooks;
    the job's own steps around it, once per update, as its hooks expect. That does nothing more, since none of the flat
    tensors has a gradient by then.
    """
    optimizer = job.optimizer
    forget_states()  # an earlier run must not decide this one's precision
    partitions = FlatPartitions(job.model, optimizer)
    inner = copy.copy(optimizer)
    inner._optimizer_step_pre_hooks, inner._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
    model = _prepared(job, inner)
    partitions.made(model.optimizer, job.model, optimizer)
    loader = own_batches(job.loader, model.device)
    job.observer.train_begin(None)
    model.train()

    for window in run_windows(job, loader):
        num_items = window_items(window)
        shares = 0.0
        for index, batch in enumerate(window):
            labels = batch.pop("labels")
            model.set_gradient_accumulation_boundary(index == len(window) - 1)
            share = job.window_loss.scaled(model(**batch).logits, labels, num_items)
            model.backward(share, scale_wrt_gas=False)
            shares += share.detach()
            del share

        loss, grad_norm = window_loss(shares), _norm(model.optimizer)
        job.observer.before_step(loss=loss, grad_norm=grad_norm)
        for group, own in zip(inner.param_groups, optimizer.param_groups, strict=True):
            group.update({key: value for key, value in own.items() if key not in ("params", "names", "hidden")})
        optimizer.step(model.step)
        job.scheduler.step()
        job.observer.after_update(UpdateResult(loss=loss, grad_norm=grad_norm))


def _prepared(job: Job, optimizer: torch.optim.Optimizer) -> Any:
    """Return the `DeepSpeedEngine` around the model.

    Raises:
        DeviceError: accelerate did not come to DeepSpeed, or DeepSpeed not to all processes, which would train copies.
    """
    loop = job.loop
    accelerator = Accelerator(
        mixed_precision="bf16" if loop.precision == "bf16" else "no",
        deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=_settings(loop)),
        # Without a backend accelerate takes each process on a CPU for alone (1.15).
        kwargs_handlers=[InitProcessGroupKwargs(backend=backend_of(loop.device.type))],
    )
    model, _ = accelerator.prepare(job.model, optimizer)
    unset_hf_deepspeed_config()  # else transformers builds the next model in shares
    stage = getattr(model, "zero_optimization_stage", lambda: 0)()
    if stage != STAGES[loop.shard] or accelerator.num_processes != world_size() or model.dp_world_size != world_size():
        raise DeviceError(
            f"--shard {loop.shard}: accelerate made a {type(model).__name__} for {accelerator.num_processes} of "
            f"{world_size()} processes, which would train copies; use --shard fsdp"
        )
    return model


def _settings(loop: Loop) -> dict[str, Any]:
    """Return DeepSpeed's configuration: what is left out has DeepSpeed's defaults, by which memory is predicted."""
    return {
        "train_micro_batch_size_per_gpu": loop.window_schedule.batch_size,
        "gradient_accumulation_steps": loop.window_schedule.accum,
        "zero_optimization": {"stage": STAGES[loop.shard]},
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": loop.clip_norm if math.isfinite(loop.clip_norm) else 0.0,
        "bf16": {"enabled": loop.precision == "bf16"},
        "steps_per_print": sys.maxsize,
    }


def _norm(zero: Any) -> float:
    """Return the norm of the whole gradient before clipping; collective. DeepSpeed takes it once more at its step."""
    if hasattr(zero, "scaled_global_norm"):
        return float(zero.scaled_global_norm())
    return math.hypot(*map(float, zero._get_norm_groups()))
