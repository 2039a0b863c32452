"""The model that a saved optimizer state belongs to: its weights, and the order of its parameters."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from effcli.catalogue import lookup as catalogue
from effcli.errors import DataError, EffcliError, UsageError, first_line, nearest
from effcli.files import at_home
from effcli.inspection.layout import Shape
from effcli.inspection.weights import Weight, models_in
from effcli.packages import require_package

_NO_DECAY = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)")
"""What Trainer takes a name of a parameter without decay by, in lower case, beside modules of the class LayerNorm
(`Trainer.get_decay_parameter_names` in transformers/trainer.py, 5.24)."""
_TASKS_OF_PEFT = {
    "SEQ_CLS": "classification", "CAUSAL_LM": "causal-lm", "SEQ_2_SEQ_LM": "seq2seq",
    "TOKEN_CLS": "token-classification", "QUESTION_ANS": "question-answering",
}  # fmt: skip
_LORA_SETTINGS = (
    "r", "target_modules", "exclude_modules", "modules_to_save", "bias", "rank_pattern", "layers_to_transform",
    "layers_pattern", "use_dora", "target_parameters", "task_type",
)  # fmt: skip
"""What decides which adapters there are; nothing else of a file of settings is heeded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """A parameter of a model that can be trained; `decayed` says whether Trainer decays it."""

    name: str
    shape: Shape
    decayed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownModel:
    """The model in the folder of a state, in the one above, or the one that was named.

    `models` are the tensors of its files by name; where accelerate saved several models, those of each. `orders` are
    its parameters in the order of `named_parameters`, with each head that it may have; empty where that is not known,
    for the reason `why`. `unread` says why weights that are there are not among them.
    """

    name: str
    models: tuple[Mapping[str, Weight], ...] = ()
    orders: tuple[Sequence[Parameter], ...] = ()
    why: str = ""
    unread: str = ""

    @property
    def weights(self) -> Mapping[str, Weight]:
        """Return the tensors of its files, empty where it is not known which of several models it is."""
        return self.models[0] if len(self.models) == 1 else {}


def model_beside(path: Path, *, order: bool, num_parameters: int) -> KnownModel | None:
    """Return the model beside a state, with the order of its parameters where that is asked for; None without one.

    `num_parameters` of it have a place in the optimizer.
    """
    folder = (path if path.is_dir() else path.parent).absolute()
    for place in (folder, folder.parent):
        models, unread = _models(place)
        configured = [name for name in ("adapter_config.json", "config.json") if (place / name).is_file()]
        if models or unread or configured:
            break
    else:
        return None
    which = "the model" if len(models) < 2 else f"the {len(models)} models"
    beside = KnownModel(name=f"{which} in '{place}'", models=models, unread=unread)
    if not order:
        return beside
    if not configured and len(models) > 1:
        return replace(beside, why="which of them it belongs to is not known")
    if not configured:
        return replace(beside, why="there is no config.json beside it; --model names a model that has one")
    try:
        if configured[0] == "adapter_config.json":
            return _with_adapters(beside, place / configured[0])
        return _chosen(beside, _candidates(str(place), None, beside.weights), num_parameters)
    except EffcliError as error:
        why = str(error).removeprefix(f"--model '{place}'").lstrip(": ").partition(";")[0]
        return replace(beside, why=why.rstrip("."))


def _models(folder: Path) -> tuple[tuple[Mapping[str, Weight], ...], str]:
    """Return the weights in a folder, and why there are none where that is for damage."""
    try:
        return models_in(folder), ""
    except (DataError, OSError) as error:  # also a folder that may be entered but not listed
        return (), str(error)


def named_model(name: str, path: Path, *, num_parameters: int) -> KnownModel:
    """Return the model that was named, the one beside the state telling which head and which dtypes it has.

    Raises:
        UsageError: it is neither in the catalogue nor on this machine, or cannot be built.
    """
    beside = model_beside(path, order=False, num_parameters=num_parameters)
    known = replace(beside or KnownModel(name=""), name=f"'{name}'")
    return _chosen(known, _candidates(name, None, known.weights), num_parameters)


def _chosen(known: KnownModel, candidates: Iterator[Sequence[Parameter]], num_parameters: int) -> KnownModel:
    """Return the model with the head whose parameters are its weights, else with all that have as many as the state."""
    if not known.weights:
        orders = tuple(parameters for parameters in candidates if len(parameters) == num_parameters)
        why = "" if orders else f"it has no head with {num_parameters} parameters"
        return replace(known, orders=orders, why=why)
    for parameters in candidates:
        if all(each.name in known.weights and known.weights[each.name].shape == each.shape for each in parameters):
            return replace(known, orders=(parameters,))
    return replace(known, why="its weights are not those that its configuration says")


def _candidates(name: str, task: str | None, weights: Mapping[str, Weight]) -> Iterator[Sequence[Parameter]]:
    """Yield the parameters of a model with each head that it can have, the likeliest first.

    Raises:
        UsageError: see `_configuration`, or the model cannot be built.
    """
    from effcli.models.own_code import config_of
    from effcli.models.tasks import default_task, own_task, tasks_of

    config = config_of(name, _configuration(name), trust=False)
    likely = (task, own_task(config), default_task(config), *tasks_of(config))
    for head in dict.fromkeys(each for each in likely if each is not None):
        parameters = _ordered(_built(config, head, name, None))
        yield parameters
        heights = {
            weights[each.name].shape[0]
            for each in parameters
            if each.name in weights and each.shape != weights[each.name].shape and weights[each.name].shape
        }
        if len(heights) == 1:  # a head for another number of labels
            yield _ordered(_built(config, head, name, heights.pop()))


def _configuration(name: str) -> Mapping[str, Any]:
    """Return what the `config.json` of a catalogue model, a folder or a cached hub id says; asks no network.

    Raises:
        UsageError: there is none of that name, or it is no configuration to build a model from.
    """
    from effcli.models.source import config_values

    known = catalogue.find(name)
    if known is not None:
        return known.config
    path = at_home(name) / "config.json"
    if path.is_file():
        return config_values(name, path)
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        cached = try_to_load_from_cache(name, "config.json")
    except HFValidationError:
        cached = None
    if not isinstance(cached, str):
        choices = [model.name for model in catalogue.models()]
        raise UsageError(f"the model '{name}' is not on this machine.{nearest(name, choices)}")
    return config_values(name, Path(cached))


def _built(config: Any, task: str, name: str, num_labels: int | None) -> Any:
    from effcli.models.shapes import changed_model
    from effcli.spec import ModelSpec

    return changed_model(config, task, ModelSpec(), "float32", name=name, num_labels=num_labels).model


def _ordered(model: Any) -> tuple[Parameter, ...]:
    """Return the parameters that are not fixed, in the order of `named_parameters`, a shared one once."""
    from torch.nn import LayerNorm

    norms = (module for module in model.modules() if isinstance(module, LayerNorm))
    normalising = {id(parameter) for norm in norms for parameter in norm.parameters()}
    return tuple(
        Parameter(
            name=name,
            shape=tuple(parameter.shape),
            decayed=id(parameter) not in normalising and _NO_DECAY.search(name.lower()) is None,
        )
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    )


def _with_adapters(beside: KnownModel, path: Path) -> KnownModel:
    """Return the adapters of peft in a folder under the names that they have while they train.

    Raises:
        UsageError: they are no LoRA adapters, or the model that they are for is not on this machine.
    """
    try:
        settings = json.loads(path.read_bytes())
        kind, base, task = settings["peft_type"], str(settings["base_model_name_or_path"]), settings.get("task_type")
        chosen = {key: settings[key] for key in _LORA_SETTINGS if settings.get(key) is not None}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UsageError(f"its {path.name} cannot be read") from error
    if kind != "LORA":
        raise UsageError(f"its adapters are of another kind than LoRA, {kind}")
    adapters = _adapters(base, _TASKS_OF_PEFT.get(str(task)), chosen, beside.weights)
    live = {parameter.name: _stored_name(parameter.name) for parameter in adapters}
    weights = {name: beside.weights[stored] for name, stored in live.items() if stored in beside.weights}
    known = replace(beside, models=(weights,) if weights else ())
    return _chosen(known, iter([adapters]), len(adapters))


def _adapters(
    base: str, task: str | None, settings: Mapping[str, Any], weights: Mapping[str, Weight]
) -> tuple[Parameter, ...]:
    """Return the trainable parameters of a model under adapters.

    Raises:
        MissingExtraError: peft is not installed.
        UsageError: it refuses the settings; or see `_candidates`.
    """
    import torch

    from effcli.models.flags import quiet_libraries
    from effcli.models.own_code import config_of
    from effcli.models.tasks import default_task, own_task

    config = config_of(base, _configuration(base), trust=False)
    ends = (".classifier.weight", ".score.weight")
    heads = {weight.shape[0] for name, weight in weights.items() if name.endswith(ends) and weight.shape}
    model = _built(config, task or own_task(config) or default_task(config), base, next(iter(heads), None))
    require_package("peft", "a state of adapters")
    with quiet_libraries(), torch.device("meta"):
        from peft import LoraConfig, get_peft_model

        try:
            adapted = get_peft_model(model, LoraConfig(**settings))
        except Exception as error:  # whatever peft makes of settings that another version wrote
            raise UsageError(f"peft does not make its adapters again: {first_line(error)}") from error
    return _ordered(adapted)


def _stored_name(name: str) -> str:
    """Return the name that peft gives a trained parameter in its file."""
    return name.replace(".modules_to_save.default.", ".").replace(".default.", ".").removesuffix(".default")
