"""From a model that was found to one that can be trained."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import TYPE_CHECKING, get_args

from effcli.errors import UsageError
from effcli.hub import hub_errors
from effcli.models.attention import check_model_attention, traced_as
from effcli.models.lora import plain_model
from effcli.models.own_code import runs_own_code
from effcli.models.seq2seq import name_start_token, use_special_tokens
from effcli.models.source import ModelSource
from effcli.models.stable_embedding import marked_embeddings, rebuild_embeddings, rebuilding
from effcli.models.tasks import check_head, head_for, sees_following_tokens
from effcli.models.unusable import unusable
from effcli.optim.groups import hidden_names
from effcli.optim.patterns import check_patterns, matches
from effcli.spec import Task
from effcli.units import ParamInfo

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

    from effcli.data.columns import Problem


def build_model(
    source: ModelSource,
    problem: Problem,
    tokenizer: PreTrainedTokenizerBase,
    *,
    dtype: torch.dtype,
    attn: str | None = None,
    meta: bool = False,
) -> tuple[PreTrainedModel, tuple[str, ...]]:
    """Return the model with the head of the task, weights in `dtype`, and the names of those that its files lack.

    The caller sets the seed first, since a new head is drawn from it. `attn` is how attention is computed, none means
    transformers' choice. With `meta` no memory is allocated and no weights are read. A model that was saved with
    StableEmbeddings has them again.

    Raises:
        UsageError: the architecture has no head for the task or not that attention, or its files cannot be used.
        MissingExtraError: the model has StableEmbeddings and bitsandbytes is not installed.
    """
    _check_task(source, problem.task)
    config = _config_for(source, problem, tokenizer)
    pads_with = config.pad_token_id
    config.pad_token_id = built_with = _padding_when_built(source, config, tokenizer)
    model, fresh = _made(source, config, problem.task, dtype=dtype, attn=attn, meta=meta)
    model.config.pad_token_id = pads_with
    if model.can_generate() and model.generation_config.pad_token_id == built_with:
        model.generation_config.pad_token_id = pads_with
    return model, fresh


def _made(
    source: ModelSource, config: PretrainedConfig, task: str, *, dtype: torch.dtype, attn: str | None, meta: bool
) -> tuple[PreTrainedModel, tuple[str, ...]]:
    """Return the model that a configuration describes, and the names of weights that its files lack.

    Raises:
        UsageError, MissingExtraError: see `build_model`.
    """
    import torch
    import transformers

    head = head_for(task)
    auto = getattr(transformers, head.auto_class)
    model_class = head.model_class(config)
    check_model_attention(attn, model_class, name=source.name, model_type=config.model_type)
    chosen = {} if attn is None else {"attn_implementation": traced_as(attn) if meta else attn}
    loads = source.has_weights and not meta
    with unusable(source.name, "config.json"):
        stable = marked_embeddings(config)
        described = copy.deepcopy(config) if loads else config
        with torch.device("meta") if meta or loads else nullcontext():
            model = auto.from_config(described, dtype=dtype, trust_remote_code=runs_own_code(config), **chosen)
            rebuild_embeddings(model, source.name)
    if not loads:
        return model, ()
    fixed = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    with unusable(source.name, "weights"), hub_errors("model", source.name, flag="--model"):
        maker = rebuilding(model_class, stable) if stable else auto
        model, loading = maker.from_pretrained(
            source.path,
            config=config,
            dtype=dtype,
            trust_remote_code=runs_own_code(config),
            **chosen,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
        fresh = {*loading["missing_keys"], *(key for key, *_ in loading["mismatched_keys"])}
        if lacking := [name for name in stable if f"{name}.norm.weight" in fresh]:
            raise ValueError(f"they lack the LayerNorm of the StableEmbedding '{lacking[0]}'")
    for name, parameter in model.named_parameters():
        if name in fixed:  # from_pretrained lets whatever it reads train (core_model_loading.py, 5.24)
            parameter.requires_grad_(False)
    return model, tuple(sorted(fresh))


def _check_task(source: ModelSource, task: str) -> None:
    """Raise unless the model has a head for the task that can learn something.

    Raises:
        UsageError: it has none, or it would have to predict what it sees.
    """
    check_head(source.config, task, name=source.name, offered=get_args(Task))
    if task == "causal-lm" and sees_following_tokens(source.config):
        raise UsageError(
            f"'{source.name}' ({source.config.model_type}) sees the tokens that follow each position, as an "
            "encoder does, so --task causal-lm would learn nothing of use; give a decoder such as gpt2"
        )


def freeze(model: torch.nn.Module, patterns: Sequence[str]) -> None:
    """Stop training the parameters whose name fits one of the patterns (see `effcli.optim.patterns.matches`).

    Raises:
        UsageError: a pattern matches nothing.
    """
    check_patterns(patterns, (name for name, _ in model.named_parameters()), "--freeze")
    for name, parameter in model.named_parameters():
        if matches(name, patterns):
            parameter.requires_grad_(False)


def recompute_activations(model: torch.nn.Module, name: str) -> None:
    """Make the backward pass recompute the layers' activations.

    Raises:
        UsageError: the architecture does not support it.
    """
    plain = plain_model(model)
    if not plain.supports_gradient_checkpointing:
        raise UsageError(
            f"--gradient-checkpointing: '{name}' ({plain.config.model_type}) cannot recompute activations; leave it out"
        )
    plain.activation_checkpointing_enable()


def parameter_infos(model: torch.nn.Module) -> tuple[ParamInfo, ...]:
    """Return name, shape, dtype of every parameter; a tied one once, under its first name."""
    hidden = hidden_names(model)
    return tuple(
        ParamInfo(
            name=name,
            shape=tuple(parameter.shape),
            dtype=str(parameter.dtype).removeprefix("torch."),
            trainable=parameter.requires_grad,
            hidden=name in hidden,
        )
        for name, parameter in model.named_parameters()
    )


def _config_for(source: ModelSource, problem: Problem, tokenizer: PreTrainedTokenizerBase) -> PretrainedConfig:
    """Return a copy of the configuration with the task's labels and the tokenizer's special tokens."""
    config = copy.deepcopy(source.config)
    config.return_dict = True  # the engines read the logits by name
    if source.path is None:
        config.vocab_size = len(tokenizer)
    if source.tokenizer is None and config.is_encoder_decoder:
        use_special_tokens(config, tokenizer)
    # Decoders classify at the last token that does not pad, by the configuration's id alone.
    if source.tokenizer is None or source.is_decoder or getattr(config, "pad_token_id", None) is None:
        config.pad_token_id = tokenizer.pad_token_id
    if problem.task == "classification":
        config.num_labels = problem.num_labels
        config.problem_type = problem.problem_type
        if problem.labels is not None and problem.labels.names:  # scores have none
            config.id2label = dict(enumerate(problem.labels.names))
            config.label2id = {label: index for index, label in enumerate(problem.labels.names)}
    name_start_token(config, head_for(problem.task).model_class(config))
    return config


def _padding_when_built(
    source: ModelSource, config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase
) -> int | None:
    """Return the padding id that the model is built with: the tokenizer's, if that token only pads.

    Embeddings start the row of this id at zero and never train it (`padding_idx` of `torch.nn.Embedding`), but the
    end-of-text token stands within texts too. So a decoder whose tokenizer pads with it is built as its own
    configuration says. Its head reads the id when it runs; other models may count positions from it.
    """
    chosen: int | None = config.pad_token_id
    only_pads = list(tokenizer.special_tokens_map.values()).count(tokenizer.pad_token) == 1
    if only_pads or not source.is_decoder:
        return chosen
    named: int | None = getattr(source.config, "pad_token_id", None)
    return named if named in range(len(tokenizer)) else None
