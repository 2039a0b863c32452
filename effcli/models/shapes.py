"""Parameter shapes of any model that transformers can build, read from the meta device: no weights, no memory."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

from effcli.errors import UsageError
from effcli.models.build import parameter_infos
from effcli.models.source import unusable
from effcli.models.tasks import head_for, tasks_of
from effcli.shapes import ModelShapes

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def meta_shapes(config: PretrainedConfig, task: str, *, name: str, num_labels: int | None = None) -> ModelShapes:
    """Return the shapes of the model with the head of `task`; parameters count as float32 whatever the config names.

    `num_labels` sets the width of a classification head; none leaves the configuration's own. `name` is for messages.

    Raises:
        UsageError: the architecture has no such head, or its configuration cannot be used.
    """
    import torch
    import transformers

    head = head_for(task)
    if task not in tasks_of(config.model_type):
        raise UsageError(
            f"'{name}' ({config.model_type}) has no head for --task {task} in transformers; "
            f"it has {', '.join(tasks_of(config.model_type)) or 'none'}"
        )
    config = copy.deepcopy(config)  # transformers writes into nested dicts of the configuration it is given
    if head.counts_labels and num_labels is not None:
        config.num_labels = num_labels
    with torch.device("meta"), unusable(name, "config.json"):
        model = getattr(transformers, head.auto_class).from_config(config, dtype=torch.float32)
    parameters = parameter_infos(model)
    first_names = {parameter.name for parameter in parameters}
    buffers = {id(buffer): buffer for buffer in model.buffers()}
    return ModelShapes(
        architecture=type(model).__name__,
        task=task,
        parameters=parameters,
        tied=tuple(key for key, _ in model.named_parameters(remove_duplicate=False) if key not in first_names),
        buffers_bytes=sum(buffer.numel() * buffer.element_size() for buffer in buffers.values()),
    )
