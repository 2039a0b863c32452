"""Parameter shapes of any model that transformers can build, read from the meta device: no weights, no memory."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from effcli.models.attention import check_model_attention, traced_as
from effcli.models.build import parameter_infos
from effcli.models.change import Changed, change_model
from effcli.models.lora import plain_model
from effcli.models.own_code import runs_own_code
from effcli.models.stable_embedding import rebuild_embeddings
from effcli.models.tasks import check_head, head_for
from effcli.models.unusable import unusable
from effcli.shapes import ModelShapes

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

    from effcli.spec import ModelSpec


def meta_shapes(config: PretrainedConfig, task: str, *, name: str, num_labels: int | None = None) -> ModelShapes:
    """Return the shapes of the model with the head of `task`; parameters count as float32 whatever the config names.

    `num_labels` sets the width of a classification head; none leaves the configuration's own. `name` is for messages.

    Raises:
        UsageError: the architecture has no such head, or its configuration cannot be used.
    """
    return _shapes(_meta_model(config, task, "float32", name=name, num_labels=num_labels), task)


def changed_shapes(
    config: PretrainedConfig, task: str, settings: ModelSpec, dtype: str, *, name: str, num_labels: int | None = None
) -> tuple[ModelShapes, Changed]:
    """Return the shapes of the model as the settings change it, weights in `dtype`, and what changed.

    Raises:
        UsageError: see `meta_shapes` and `change_model`.
    """
    changed = changed_model(config, task, settings, dtype, name=name, num_labels=num_labels)
    return _shapes(changed.model, task), changed


def changed_model(
    config: PretrainedConfig, task: str, settings: ModelSpec, dtype: str, *, name: str, num_labels: int | None = None
) -> Changed:
    """Return the model on the meta device as the settings change it, weights in `dtype`, and what changed.

    Raises:
        UsageError: see `meta_shapes` and `change_model`, or the model's code has no such attention.
    """
    import torch

    model = _meta_model(config, task, dtype, name=name, num_labels=num_labels, attn=settings.attn)
    with torch.device("meta"):
        return change_model(model, settings, task, name=name, origin=None)


def _meta_model(
    config: PretrainedConfig, task: str, dtype: str, *, name: str, num_labels: int | None, attn: str | None = None
) -> PreTrainedModel:
    import torch
    import transformers

    check_head(config, task, name=name)
    head = head_for(task)
    config = copy.deepcopy(config)  # transformers writes into nested dicts of the configuration it is given
    if head.counts_labels and num_labels is not None:
        config.num_labels = num_labels
    check_model_attention(attn, head.model_class(config), name=name, model_type=config.model_type)
    chosen = {} if attn is None else {"attn_implementation": traced_as(attn)}
    with torch.device("meta"), unusable(name, "config.json"):
        model = getattr(transformers, head.auto_class).from_config(
            config, dtype=getattr(torch, dtype), trust_remote_code=runs_own_code(config), **chosen
        )
        rebuild_embeddings(model, name)
    return model


def _shapes(model: Any, task: str) -> ModelShapes:
    parameters = parameter_infos(model)
    first_names = {parameter.name for parameter in parameters}
    buffers = {id(buffer): buffer for buffer in model.buffers()}
    return ModelShapes(
        architecture=type(plain_model(model)).__name__,
        task=task,
        parameters=parameters,
        tied=tuple(key for key, _ in model.named_parameters(remove_duplicate=False) if key not in first_names),
        buffers_bytes=sum(buffer.numel() * buffer.element_size() for buffer in buffers.values()),
    )
