"""LoRA adapters through peft: made over a model, and saved in peft's format."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from effcli.errors import UsageError, first_line, nearest
from effcli.models.flags import ALL_LINEAR, quiet_libraries
from effcli.run_folder import MODEL
from effcli.units import count

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig

    from effcli.spec import ModelSpec

BASE = "base"
"""Folder beside the adapters: configuration of the model below them, and its weights where no one else has them."""

_TASK_TYPES = {"classification": "SEQ_CLS", "causal-lm": "CAUSAL_LM", "seq2seq": "SEQ_2_SEQ_LM"}
_AUTO_CLASSES = {
    "classification": "AutoPeftModelForSequenceClassification",
    "causal-lm": "AutoPeftModelForCausalLM",
    "seq2seq": "AutoPeftModelForSeq2SeqLM",
}
_HEADS_OF_PEFT = ("classifier", "score")
"""Heads that peft trains for `SEQ_CLS` without being told (peft/peft_model.py, 0.21)."""
_LAYERS = ("Linear", "Conv1D", "Embedding", "Conv1d", "Conv2d", "Conv3d")
"""Classes of layers that peft adapts; `Conv1D` is the linear layer of GPT-2."""


def plain_model(model: Any) -> Any:
    """Return the model of transformers inside a peft model, adapters included; any other model as it is."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def head_names(model: Any, task: str) -> tuple[str, ...]:
    """Return the names of the layers that make up the head of a classifier; a language model's head is no such one."""
    base = model.base_model
    if task != "classification" or base is model:
        return ()
    return tuple(
        name for name, child in model.named_children() if child is not base and any(True for _ in child.parameters())
    )


def add_adapters(model: Any, settings: ModelSpec, task: str, *, origin: str | None, name: str) -> Any:
    """Return `model` with adapters that train, everything else but the head of a classifier frozen.

    `origin` is where the model can be loaded from as it is here, none if nowhere. Adapters are float32 over weights of
    any dtype; the copy of the head that trains has the dtype of the head. The head itself stays in the model, unused.

    Raises:
        UsageError: the layers named do not exist or take no adapters, or peft knows none for the architecture or task.
    """
    if task not in _TASK_TYPES:
        raise UsageError(f"--lora-r {settings.lora_r} is for --task {' or '.join(_TASK_TYPES)}, not for {task}")
    head = head_names(model, task)
    targets = settings.lora_targets
    _check_targets(model, targets, head, name)
    model.name_or_path = origin or ""
    with quiet_libraries():
        from peft import LoraConfig, get_peft_model

        config = LoraConfig(
            r=settings.lora_r,
            lora_alpha=lora_alpha(settings),
            lora_dropout=settings.lora_dropout,
            target_modules=ALL_LINEAR if targets == (ALL_LINEAR,) else list(targets) or None,
            modules_to_save=[name for name in head if name not in _HEADS_OF_PEFT] or None,
            task_type=_TASK_TYPES[task],
        )
        try:
            return get_peft_model(model, config)
        except ValueError as error:
            why = (
                f"--lora-targets {','.join(targets)}: peft makes no adapters for them ({first_line(error)})"
                if targets
                else f"--lora-r {settings.lora_r}: peft names no layers for '{name}' ({model.config.model_type})"
            )
            raise UsageError(
                f"{why}; give --lora-targets with names, or {ALL_LINEAR}. {_listed(model, head)}"
            ) from error


def lora_alpha(settings: ModelSpec) -> float:
    """Return the scale of the adapters; twice the rank where none was given."""
    if settings.lora_alpha is not None:
        return settings.lora_alpha
    return 2 * (settings.lora_r or 0)


def _check_targets(model: Any, targets: tuple[str, ...], head: tuple[str, ...], name: str) -> None:
    """Raise unless each target fits a layer below the head: peft passes over one that fits nothing beside others."""
    layers = _layers(model, head)
    for target in targets:
        if target == ALL_LINEAR or any(f".{layer}".endswith(f".{target}") for layer in layers):
            continue
        if target in head:
            raise UsageError(
                f"--lora-targets {target}: it is the head of '{name}', which is trained whole; leave it out"
            )
        raise UsageError(
            f"--lora-targets '{target}' fits no layer of '{name}' that takes an adapter."
            f"{nearest(target, _last_names(layers))} {_listed(model, head)}"
        )


def _layers(model: torch.nn.Module, head: tuple[str, ...]) -> dict[str, str]:
    """Return name -> class of the layers below the head that take adapters."""
    return {
        name: type(module).__name__
        for name, module in model.named_modules()
        if type(module).__name__ in _LAYERS and name.partition(".")[0] not in head
    }


def _last_names(layers: dict[str, str]) -> list[str]:
    return list(dict.fromkeys(name.rpartition(".")[2] for name in layers))


def _listed(model: torch.nn.Module, head: tuple[str, ...]) -> str:
    linear = {name: kind for name, kind in _layers(model, head).items() if kind in ("Linear", "Conv1D")}
    return f"Its linear layers: {', '.join(_last_names(linear))}."


def save_model(model: Any, folder: Path, final: Path, *, weights: dict[str, Any] | None = None) -> None:
    """Write a model into `folder`, which will be renamed to `final`: whole, or its adapters in peft's format.

    `weights` are those to write, by the model's names for them; those that it holds where there are none. Adapters come
    with the configuration of the model below them, which says the labels. Where that model cannot be loaded from
    anywhere, as one with random weights, its weights are written too.
    """
    base = plain_model(model)
    if base is model:
        model.save_pretrained(folder, state_dict=weights)
        return
    adapters = model.active_peft_config
    if adapters.base_model_name_or_path:
        base.config.save_pretrained(folder / BASE)
    else:
        base.save_pretrained(folder / BASE, state_dict=_state_below(model, weights))
        adapters.base_model_name_or_path = str(final.resolve() / BASE)
    with quiet_libraries():
        # Told not to look for new embedding rows, for which peft would ask the hub.
        model.save_pretrained(folder, save_embedding_layers=False, state_dict=weights)


def _state_below(model: Any, weights: dict[str, Any] | None) -> dict[str, Any]:
    """Return the weights of the model as it was before the adapters, under the names that it had for them."""
    above = "base_model.model."  # where peft keeps the model (peft/tuners/tuners_utils.py, 0.21)
    state = model.state_dict() if weights is None else weights
    return {
        name.removeprefix(above).replace(".base_layer.", ".").replace(".original_module.", "."): value
        for name, value in state.items()
        if ".lora_" not in name and ".modules_to_save." not in name
    }


def describe_adapters(model: Any, settings: ModelSpec, task: str) -> str:
    """Return what should be said about a model with adapters: what trains, and what does not."""
    layers = model.base_model.targeted_module_names
    names = ", ".join(dict.fromkeys(layer.rpartition(".")[2] for layer in layers))
    head = head_names(plain_model(model), task)
    where = f"{count(len(layers), 'layer')} ({names})"
    trained = f"; the head ({', '.join(head)}) is trained too" if head else ""
    return (
        f"LoRA of rank {settings.lora_r}, alpha {lora_alpha(settings):g}, on {where}{trained}; "
        "everything else is frozen. Adapters are float32 in every precision."
    )


def how_to_load(model: Any, task: str, *, out: str, config: PretrainedConfig) -> str:
    """Return what should be said about the adapters that go to the run folder `out`.

    `config` is that of the model below as its files have it: what the task changed in it has to be given again.
    """
    base, folder = plain_model(model), Path(out) / MODEL
    where = model.active_peft_config.base_model_name_or_path
    changed = {
        key: getattr(base.config, key)
        for key in ("num_labels", "pad_token_id")
        if where and getattr(base.config, key, None) != getattr(config, key, None)
    }
    given = "".join(f", {key}={value!r}" for key, value in changed.items())
    return (
        f"What is trained goes to '{folder}', in peft's format: peft.{_AUTO_CLASSES[task]}.from_pretrained("
        f"'{folder}'{given}) puts it onto '{where or folder / BASE}'."
    )
