"""Model, optimizer and schedule of a prepared run, and what they will take."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from transformers import get_scheduler, set_seed

from effcli.memory.eight_bit import eight_bit_note
from effcli.memory.state import StateSummary, predict_state
from effcli.models.build import build_model, freeze, parameter_infos, recompute_activations
from effcli.optim.groups import decay_groups
from effcli.optim.learning_rate import OwnRateSchedule
from effcli.units import ParamInfo

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from effcli.pipeline.prepare import Prepared


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """The model with its parameter groups, and the state that was predicted from shapes alone.

    `notes` are about the weights, `state_notes` about the state.
    """

    model: PreTrainedModel
    groups: list[dict[str, Any]]
    parameters: tuple[ParamInfo, ...]
    state: StateSummary
    notes: tuple[str, ...]
    state_notes: tuple[str, ...]


def build(prepared: Prepared, *, meta: bool) -> Built:
    """Return the model on its device (or on the meta device) and the predicted state.

    The seed is set before the model, since random weights are drawn from it.

    Raises:
        UsageError: no head for the task, or a pattern of `--freeze` or `--keep-32bit` that matches nothing.
    """
    spec = prepared.spec
    set_seed(spec.loop.seed)
    dtype = torch.bfloat16 if spec.loop.precision == "bf16-pure" else torch.float32
    model, notes = build_model(prepared.source, prepared.problem, prepared.tokenizer, dtype=dtype, meta=meta)
    freeze(model, spec.model.freeze)
    if not meta:
        model.to(prepared.device)
    if spec.loop.gradient_checkpointing:
        recompute_activations(model, prepared.source.name)
    parameters = parameter_infos(model)
    eight_bit = eight_bit_note(prepared.entry, parameters, prepared.hyper)
    return Built(
        model=model,
        groups=decay_groups(model, spec.optim.weight_decay if prepared.entry.takes_weight_decay else 0.0),
        parameters=parameters,
        state=predict_state(prepared.entry, parameters, prepared.hyper),
        notes=notes,
        state_notes=(eight_bit,) if eight_bit else (),
    )


def build_scheduler(prepared: Prepared, optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    """Return the schedule over optimizer updates; warm-up is a share of them, rounded up."""
    if prepared.entry.schedule(prepared.hyper) == "own":
        return OwnRateSchedule(optimizer)
    loop, total = prepared.spec.loop, prepared.total_updates
    warmup = math.ceil(round(loop.warmup_ratio * total, 6))  # 0.1 x 70 is 7.000000000000001 in binary
    name = "constant_with_warmup" if loop.scheduler == "constant" else loop.scheduler
    return get_scheduler(name, optimizer, num_warmup_steps=warmup, num_training_steps=total)
