"""Model, optimizer and schedule of a prepared run, and what they will take."""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import get_scheduler, set_seed

from effcli.errors import UsageError
from effcli.memory.eight_bit import eight_bit_note
from effcli.memory.state import StateSummary, predict_state
from effcli.models.build import build_model, freeze, parameter_infos, recompute_activations
from effcli.models.lora import add_adapters, describe_adapters, head_names
from effcli.models.stable_embedding import marked_embeddings, overrides_for, rebuilt_note, use_stable_embeddings
from effcli.optim.groups import decay_groups
from effcli.optim.learning_rate import OwnRateSchedule
from effcli.units import ParamInfo

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from effcli.optim.entry import Hyper
    from effcli.pipeline.prepare import Prepared


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """The model with its parameter groups, and the state that was predicted from shapes alone.

    `hyper` are the run's hyperparameters and what the model adds to them. `weight_notes` say where weights come from
    that the model's files lack, `notes` the rest.
    """

    model: torch.nn.Module
    hyper: Hyper
    groups: list[dict[str, Any]]
    parameters: tuple[ParamInfo, ...]
    state: StateSummary
    weight_notes: tuple[str, ...]
    notes: tuple[str, ...]


def build(prepared: Prepared, *, meta: bool) -> Built:
    """Return the model on its device (or on the meta device) and the predicted state.

    The seed is set before the model, since random weights are drawn from it.

    Raises:
        UsageError: no head for the task, or a pattern of `--freeze` or `--keep-32bit` that matches nothing.
    """
    spec, entry = prepared.spec, prepared.entry
    set_seed(spec.loop.seed)
    dtype = torch.bfloat16 if spec.loop.precision == "bf16-pure" else torch.float32
    made, fresh = build_model(prepared.source, prepared.problem, prepared.tokenizer, dtype=dtype, meta=meta)
    notes = _stabilise(prepared, made)
    freeze(made, spec.model.freeze)
    hyper = prepared.hyper
    if entry.eight_bit:
        hyper = {**hyper, "overrides": (*hyper["overrides"], *overrides_for(made))}
    with torch.device("meta") if meta else nullcontext():
        model, lora_notes = _with_adapters(prepared, made, fresh)
    if not meta:
        model.to(prepared.device)
    if spec.loop.gradient_checkpointing:
        recompute_activations(model, prepared.source.name)
    parameters = parameter_infos(model)
    eight_bit = eight_bit_note(entry, parameters, hyper)
    return Built(
        model=model,
        hyper=hyper,
        groups=decay_groups(model, spec.optim.weight_decay if entry.takes_weight_decay else 0.0),
        parameters=parameters,
        state=predict_state(entry, parameters, hyper),
        weight_notes=() if meta else _weight_notes(prepared, fresh),
        notes=(*notes, *lora_notes, *((eight_bit,) if eight_bit else ())),
    )


def _weight_notes(prepared: Prepared, fresh: tuple[str, ...]) -> tuple[str, ...]:
    if not prepared.source.has_weights:
        return ("All weights are random: the model comes without any.",)
    return (f"Newly made, with random weights: {', '.join(fresh)}.",) if fresh else ()


def _stabilise(prepared: Prepared, model: PreTrainedModel) -> tuple[str, ...]:
    """Replace the embeddings where that is asked for and not done yet; return what should be said."""
    if names := marked_embeddings(model.config):
        return (rebuilt_note(names),)
    return use_stable_embeddings(model, prepared.source.name) if prepared.spec.model.stable_embedding else ()


def _with_adapters(
    prepared: Prepared, model: PreTrainedModel, fresh: tuple[str, ...]
) -> tuple[torch.nn.Module, tuple[str, ...]]:
    """Return the model with the adapters that were asked for, and what should be said about them.

    Raises:
        UsageError: they cannot be made, or the model below them cannot be rebuilt by peft.
    """
    settings, source, task = prepared.spec.model, prepared.source, prepared.problem.task
    if settings.lora_r is None:
        return model, ()
    if marked_embeddings(model.config):
        raise UsageError(
            f"--lora-r {settings.lora_r}: '{source.name}' has StableEmbeddings, which peft cannot build below its "
            "adapters; leave --lora-r out, or give another --model"
        )
    below = [name for name in fresh if name.partition(".")[0] not in head_names(model, task)]
    origin = str(Path(source.path).resolve()) if source.path and Path(source.path).is_dir() else source.path
    adapted = add_adapters(
        model, settings, task, source=origin if source.has_weights and not below else None, name=source.name
    )
    notes = describe_adapters(adapted, settings, task, out=prepared.spec.output.out or "OUT", config=source.config)
    frozen = (f"LoRA leaves newly made weights below the head as they are: {', '.join(below)}.",) if below else ()
    return adapted, (*notes, *frozen)


def build_scheduler(prepared: Prepared, optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    """Return the schedule over optimizer updates; warm-up is a share of them, rounded up."""
    if prepared.entry.schedule(prepared.hyper) == "own":
        return OwnRateSchedule(optimizer)
    loop, total = prepared.spec.loop, prepared.total_updates
    warmup = math.ceil(round(loop.warmup_ratio * total, 6))  # 0.1 x 70 is 7.000000000000001 in binary
    name = "constant_with_warmup" if loop.scheduler == "constant" else loop.scheduler
    return get_scheduler(name, optimizer, num_warmup_steps=warmup, num_training_steps=total)
