"""From a name to a model: the built-in one, a local folder, or a hub id."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

from effcli.errors import UsageError, nearest
from effcli.hub import go_offline_if_unreachable, hub_errors
from effcli.units import ParamInfo

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

    from effcli.data.columns import Problem

BUILTIN_NAME = "built-in DistilBERT"
BUILTIN_VOCABULARY = 8000
MAX_LENGTH = 512
WEIGHT_FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "vocab.txt",
    "vocab.json",
)
POSITIONS_AFTER_PADDING = {"roberta", "xlm-roberta", "xlm-roberta-xl", "camembert", "roberta-prelayernorm", "mpnet"}
"""Model types whose position ids start behind the padding id, so that the table holds fewer positions than rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource:
    """A model that was found but not built. `path` is a folder or hub id, None for the built-in model.

    `tokenizer` is None where the source has none and one is to be built from the training text.
    """

    name: str
    path: str | None
    config: PretrainedConfig
    has_weights: bool
    tokenizer: PreTrainedTokenizerBase | None

    @property
    def architectures(self) -> tuple[str, ...]:
        """Return the class names that the checkpoint says it was saved from."""
        return tuple(self.config.architectures or ())

    @property
    def is_decoder(self) -> bool:
        """Return whether the model type is made for causal language modelling (GPT-2, Llama; not BERT, not T5)."""
        from transformers.models.auto import modeling_auto as auto

        kind = self.config.model_type
        return (
            kind in auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
            and kind not in auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES
            and not self.config.is_encoder_decoder
        )


def find_model(name: str | None) -> ModelSource:
    """Return the model named; reads configuration and tokenizer, no weights.

    Raises:
        UsageError: no such folder, no usable `config.json` in it, or a quantised checkpoint.
        UnreachableError: a hub id that is neither cached nor reachable, gated, or missing.
    """
    if name is None:
        return _builtin()
    folder = Path(name).expanduser()
    if folder.is_dir():
        return _from_folder(name, folder)
    if folder.exists():
        raise UsageError(f"--model '{name}' is a file; give the folder that holds its config.json")
    if _looks_like_path(name):
        siblings = [path.name for path in folder.parent.iterdir() if path.is_dir()] if folder.parent.is_dir() else []
        raise UsageError(f"--model '{name}': there is no such folder.{nearest(folder.name, siblings)}")
    return _from_hub(name)


def tokenizer_for(
    source: ModelSource, build: Callable[[int, str, int], PreTrainedTokenizerBase]
) -> PreTrainedTokenizerBase:
    """Return the source's tokenizer with a padding token, or what `build(vocab_size, model_type, max_length)` makes.

    A missing padding token becomes the end-of-text token: no embedding row is added, the attention mask hides it.

    Raises:
        UsageError: the tokenizer knows more tokens than the model embeds, or has no token to pad with.
    """
    vocab_size = getattr(source.config, "vocab_size", BUILTIN_VOCABULARY)
    tokenizer = source.tokenizer
    if tokenizer is None:
        tokenizer = build(vocab_size, source.config.model_type, row_limit(source, None, None))
    if tokenizer.pad_token_id is None:
        if tokenizer.eos_token_id is None:
            raise UsageError(
                f"the tokenizer of '{source.name}' has neither a padding nor an end-of-text token; add one to it"
            )
        tokenizer.pad_token = tokenizer.eos_token
    if source.path is not None and len(tokenizer) > vocab_size:
        raise UsageError(
            f"the tokenizer of '{source.name}' has {len(tokenizer):,} tokens but the model embeds only {vocab_size:,}; "
            "they do not belong together"
        )
    return tokenizer


def row_limit(source: ModelSource, tokenizer: PreTrainedTokenizerBase | None, asked: int | None) -> int:
    """Return the longest row in tokens: what was asked for, or else the model's and tokenizer's limit, at most 512.

    Raises:
        UsageError: more was asked for than the model has positions.
    """
    positions = _positions(source.config)
    if asked is not None:
        if positions is not None and asked > positions:
            raise UsageError(f"--max-length {asked}: '{source.name}' reads at most {positions} tokens")
        return asked
    tokens = tokenizer.model_max_length if tokenizer is not None else MAX_LENGTH
    return min(MAX_LENGTH, tokens, positions or MAX_LENGTH)


def _positions(config: PretrainedConfig) -> int | None:
    """Return the number of positions that a row can have; None where the model has no table of them."""
    positions = getattr(config, "max_position_embeddings", None)
    if not isinstance(positions, int) or positions < 1:
        return None
    return positions - (config.pad_token_id or 0) - 1 if config.model_type in POSITIONS_AFTER_PADDING else positions


def build_model(
    source: ModelSource, problem: Problem, tokenizer: PreTrainedTokenizerBase, *, dtype: torch.dtype, meta: bool = False
) -> tuple[PreTrainedModel, tuple[str, ...]]:
    """Return the model with the head of the task, weights in `dtype`, and what was newly made in it.

    The caller sets the seed first, since a new head is drawn from it. With `meta` no memory is allocated and no weights
    are read.

    Raises:
        UsageError: the architecture has no head for the task.
    """
    import torch
    import transformers

    auto, known = {
        "classification": (
            transformers.AutoModelForSequenceClassification,
            transformers.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
        ),
        "causal-lm": (transformers.AutoModelForCausalLM, transformers.MODEL_FOR_CAUSAL_LM_MAPPING),
    }[problem.task]
    config = _config_for(source, problem, tokenizer)
    if type(config) not in known:
        raise UsageError(f"'{source.name}' ({config.model_type}) has no head for --task {problem.task} in transformers")
    if meta:
        with torch.device("meta"):
            return auto.from_config(config, dtype=dtype), ()
    if not source.has_weights:
        return auto.from_config(config, dtype=dtype), ("All weights are random: the model comes without any.",)
    with hub_errors("model", source.name, flag="--model"):
        model, loading = auto.from_pretrained(
            source.path, config=config, dtype=dtype, output_loading_info=True, ignore_mismatched_sizes=True
        )
    fresh = sorted({*loading["missing_keys"], *(key for key, *_ in loading["mismatched_keys"])})
    return model, (f"Newly made, with random weights: {', '.join(fresh)}.",) if fresh else ()


def freeze(model: torch.nn.Module, patterns: Sequence[str]) -> None:
    """Stop training the parameters whose name matches one of the shell-style patterns.

    Raises:
        UsageError: a pattern matches nothing, or nothing is left to train.
    """
    parameters = dict(model.named_parameters())
    for pattern in patterns:
        matched = [name for name in parameters if fnmatchcase(name, pattern)]
        if not matched:
            names = ", ".join(list(parameters)[:3])
            raise UsageError(f"--freeze '{pattern}' matches no parameter; names look like {names}")
        for name in matched:
            parameters[name].requires_grad_(False)
    if not any(parameter.requires_grad for parameter in parameters.values()):
        raise UsageError("--freeze leaves nothing to train")


def parameter_infos(model: torch.nn.Module) -> tuple[ParamInfo, ...]:
    """Return name, shape, dtype of every parameter; a tied one once, under its first name."""
    return tuple(
        ParamInfo(
            name=name,
            shape=tuple(parameter.shape),
            dtype=str(parameter.dtype).removeprefix("torch."),
            trainable=parameter.requires_grad,
        )
        for name, parameter in model.named_parameters()
    )


def _builtin() -> ModelSource:
    from transformers import DistilBertConfig

    from effcli.data.builtin import DEMO_CONFIG

    config = DistilBertConfig(vocab_size=BUILTIN_VOCABULARY, **DEMO_CONFIG)
    return ModelSource(name=BUILTIN_NAME, path=None, config=config, has_weights=False, tokenizer=None)


def _from_folder(name: str, folder: Path) -> ModelSource:
    from transformers import AutoConfig, AutoTokenizer

    path = folder / "config.json"
    if not path.is_file():
        raise UsageError(f"--model '{name}': the folder has no config.json")
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        config = AutoConfig.from_pretrained(str(folder), trust_remote_code=False)
    except (ValueError, KeyError, TypeError, OSError, AttributeError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UsageError(f"--model '{name}': its config.json cannot be used: {reason}") from error
    _refuse_quantised(name, values)
    has_tokenizer = any((folder / file).is_file() for file in TOKENIZER_FILES)
    return ModelSource(
        name=name,
        path=str(folder),
        config=config,
        has_weights=any((folder / file).is_file() for file in WEIGHT_FILES),
        tokenizer=AutoTokenizer.from_pretrained(str(folder)) if has_tokenizer else None,
    )


def _from_hub(name: str) -> ModelSource:
    go_offline_if_unreachable()
    from huggingface_hub import hf_hub_download
    from transformers import AutoConfig, AutoTokenizer

    with hub_errors("model", name, flag="--model"):
        values = json.loads(Path(hf_hub_download(name, "config.json")).read_text(encoding="utf-8"))
        _refuse_quantised(name, values)
        config = AutoConfig.from_pretrained(name, trust_remote_code=False)
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    return ModelSource(name=name, path=name, config=config, has_weights=True, tokenizer=tokenizer)


def _config_for(source: ModelSource, problem: Problem, tokenizer: PreTrainedTokenizerBase) -> PretrainedConfig:
    """Return a copy of the configuration with the task's labels and the tokenizer's padding."""
    config = copy.deepcopy(source.config)
    if source.path is None:
        config.vocab_size = len(tokenizer)
    if source.tokenizer is None or config.pad_token_id is None:
        config.pad_token_id = tokenizer.pad_token_id
    if problem.task == "classification":
        config.num_labels = problem.num_labels
        config.problem_type = problem.problem_type
        if problem.labels is not None:
            config.id2label = dict(enumerate(problem.labels.names))
            config.label2id = {label: index for index, label in enumerate(problem.labels.names)}
    return config


def _refuse_quantised(name: str, values: dict[str, Any]) -> None:
    if method := (values.get("quantization_config") or {}).get("quant_method"):
        raise UsageError(
            f"--model '{name}' is a quantised checkpoint ({method}): its packed weights cannot be trained; "
            "give the unquantised model"
        )


def _looks_like_path(name: str) -> bool:
    return name.startswith((".", "/", "~")) or name.count("/") > 1 or "\\" in name
