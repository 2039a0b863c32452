"""Model, optimizer and schedule of a prepared run, and what they will take."""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import get_scheduler, set_seed

from effcli.devices import weights_dtype
from effcli.engines.surroundings import without_launcher_settings
from effcli.memory.eight_bit import eight_bit_note
from effcli.memory.state import StateSummary, predict_state
from effcli.models.build import build_model, parameter_infos, recompute_activations
from effcli.models.change import Changed, change_model
from effcli.models.finite import refuse_files_not_finite
from effcli.models.lora import head_names, how_to_load
from effcli.models.notes import model_notes
from effcli.models.seq2seq import decoder_inputs
from effcli.optim.groups import decay_groups
from effcli.optim.learning_rate import OwnRateSchedule
from effcli.pipeline.agreement import check_same_weights
from effcli.units import ParamInfo

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from effcli.data.batches import DecoderInputs
    from effcli.optim.entry import Hyper
    from effcli.pipeline.prepare import Prepared


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """The model with its parameter groups, and the state that was predicted from shapes alone.

    `hyper` are the run's hyperparameters and what the model adds to them. `weight_notes` say where weights come from
    that the model's files lack, `notes` the rest. `decoder_inputs` are what a seq2seq model makes of its labels.
    """

    model: torch.nn.Module
    hyper: Hyper
    groups: list[dict[str, Any]]
    parameters: tuple[ParamInfo, ...]
    state: StateSummary
    weight_notes: tuple[str, ...]
    notes: tuple[str, ...]
    decoder_inputs: DecoderInputs | None


@without_launcher_settings()
def build(prepared: Prepared, *, meta: bool) -> Built:
    """Return the model on its device (or on the meta device) and the predicted state.

    The seed is set before the model, since random weights are drawn from it. Every process reads all weights: told by
    `accelerate launch --use_fsdp`, transformers would read those of rank 0 alone (5.24).

    Raises:
        UsageError: no head for the task or none that can be trained, weights that are not finite, or a pattern of
            `--freeze` or `--keep-32bit` that matches nothing.
    """
    spec, entry = prepared.spec, prepared.entry
    set_seed(spec.loop.seed)
    dtype = getattr(torch, weights_dtype(spec.loop.precision))
    made, fresh = build_model(
        prepared.source, prepared.problem, prepared.tokenizer, dtype=dtype, attn=spec.model.attn, meta=meta
    )
    if prepared.source.has_weights and not meta:
        refuse_files_not_finite(made, prepared.source.name)
    about_model = model_notes(made)
    with torch.device("meta") if meta else nullcontext():
        changed, notes = _change(prepared, made, fresh)
    model, hyper = changed.model, changed.hyper_for(entry, prepared.hyper)
    if spec.loop.gradient_checkpointing:
        recompute_activations(model, prepared.source.name)
    parameters = parameter_infos(model)
    if not meta:
        _place(prepared, model)
    state = predict_state(entry, parameters, hyper)
    eight_bit = eight_bit_note(entry, parameters, hyper, state)
    return Built(
        model=model,
        hyper=hyper,
        groups=decay_groups(model, spec.optim.weight_decay if entry.takes_weight_decay else 0.0),
        parameters=parameters,
        state=state,
        weight_notes=() if meta else _weight_notes(prepared, fresh),
        notes=(*notes, *((eight_bit,) if eight_bit else ()), *about_model),
        decoder_inputs=decoder_inputs(made, prepared.source.name) if prepared.problem.target_column else None,
    )


def _place(prepared: Prepared, model: torch.nn.Module) -> None:
    """Move the model to its device, or its shard alone, layer by layer."""
    check_same_weights(model)
    if prepared.spec.loop.shard == "fsdp":
        from effcli.engines.distributing import shard

        shard(model, prepared.device)
    model.to(prepared.device)


def _weight_notes(prepared: Prepared, fresh: tuple[str, ...]) -> tuple[str, ...]:
    if not prepared.source.has_weights:
        return ("All weights are random: the model comes without any.",)
    return (f"Newly made, with random weights: {', '.join(fresh)}.",) if fresh else ()


def _change(prepared: Prepared, model: PreTrainedModel, fresh: tuple[str, ...]) -> tuple[Changed, tuple[str, ...]]:
    """Return the model as the settings want it, and what should be said about it.

    Adapters are saved alone where the model below them can be loaded again as it is, newly made weights excepted.
    """
    settings, source, task = prepared.spec.model, prepared.source, prepared.problem.task
    below = [name for name in fresh if name.partition(".")[0] not in head_names(model, task)]
    origin = source.path if source.has_weights and not below else None
    if origin and Path(origin).is_dir():
        origin = str(Path(origin).resolve())
    changed = change_model(model, settings, task, name=source.name, origin=origin)
    if settings.lora_r is None:
        return changed, changed.notes
    load = how_to_load(changed.model, task, out=prepared.spec.output.out or "OUT", config=source.config)
    frozen = (f"LoRA leaves newly made weights below the head as they are: {', '.join(below)}.",) if below else ()
    return changed, (*changed.notes, load, *frozen)


def build_scheduler(prepared: Prepared, optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    """Return the schedule over optimizer updates; warm-up is a share of them, rounded up."""
    if prepared.entry.schedule(prepared.hyper) == "own":
        return OwnRateSchedule(optimizer)
    loop, total = prepared.spec.loop, prepared.total_updates
    warmup = math.ceil(round(loop.warmup_ratio * total, 6))  # 0.1 x 70 is 7.000000000000001 in binary
    name = "constant_with_warmup" if loop.scheduler == "constant" else loop.scheduler
    return get_scheduler(name, optimizer, num_warmup_steps=warmup, num_training_steps=total)
