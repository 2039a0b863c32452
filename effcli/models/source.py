"""From a name to a model that is found but not built: the built-in one, a local folder, or a hub id."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from effcli.errors import UsageError, nearest
from effcli.files import at_home
from effcli.hub import go_offline_if_unreachable, hub_errors
from effcli.models.lengths import MAX_LENGTH, longest_row, sides
from effcli.models.own_code import config_of, refuse_kernels
from effcli.models.tasks import sees_following_tokens, tasks_of
from effcli.models.unusable import unusable

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

BUILTIN_NAME = "built-in DistilBERT"
BUILTIN_VOCABULARY = 8000
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
        """Return whether the model type is made for causal language modelling (GPT-2, Llama; not BERT, T5, XLNet)."""
        tasks = tasks_of(self.config)
        made_for_it = "causal-lm" in tasks and "masked-lm" not in tasks and not self.config.is_encoder_decoder
        return made_for_it and not sees_following_tokens(self.config)

    @property
    def padding_side(self) -> Literal["left", "right"]:
        """Return the side on which rows are padded, whatever the tokenizer says, which may be set for generation.

        Models that learn a vector per position, such as GPT-2, count padding on the left as positions. XLNet counts
        distances, and its head for classes reads the last position (`summary_type`), which must be no padding.
        """
        reads_last = self.config.model_type == "xlnet" and self.config.summary_type == "last"
        return "left" if reads_last else "right"


def find_model(name: str | None, *, trust_remote_code: bool = False) -> ModelSource:
    """Return the model named; reads configuration and tokenizer, no weights.

    Raises:
        UsageError: no such folder, no usable `config.json` in it, a quantised checkpoint, or one that needs code of its
            own without `trust_remote_code`.
        UnreachableError: a hub id that is neither cached nor reachable, gated, or missing.
    """
    if name is None:
        return _builtin()
    path = config_file(name)
    if at_home(name).is_dir():
        return _from_folder(name, path.parent, trust_remote_code)
    return _from_hub(name, path, trust_remote_code)


def config_file(name: str) -> Path:
    """Return the `config.json` of a local folder or of a hub id, from the cache where it is there.

    Raises:
        UsageError: no such folder, or none of that name in it.
        UnreachableError: a hub id that is neither cached nor reachable, gated, or missing.
    """
    return local_config_file(name) or _hub_config_file(name)


def local_config_file(name: str) -> Path | None:
    """Return the `config.json` of a local folder, None for what can only be meant as a hub id.

    Raises:
        UsageError: no such folder, or none of that name in it.
    """
    folder = at_home(name)
    if folder.is_dir():
        path = folder / "config.json"
        _refuse_adapters(name, folder / "adapter_config.json")
        if not path.is_file():
            raise UsageError(
                f"--model '{name}': the folder has no config.json; give a folder that save_pretrained wrote"
            )
        return path
    if folder.exists():
        raise UsageError(f"--model '{name}' is a file; give the folder that holds its config.json")
    if _looks_like_path(name) or (folder.parent != Path() and folder.parent.is_dir()):
        siblings = [path.name for path in folder.parent.iterdir() if path.is_dir()] if folder.parent.is_dir() else []
        raise UsageError(f"--model '{name}': there is no such folder.{nearest(folder.name, siblings)}")
    return None


def config_values(name: str, path: Path) -> dict[str, Any]:
    """Return what a `config.json` says.

    Raises:
        UsageError: it holds no JSON object, or belongs to a quantised checkpoint.
    """
    with unusable(name, "config.json"):
        values = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(values, dict):
            raise ValueError("it holds no JSON object")
    _refuse_quantised(name, values)
    refuse_kernels(name, values)
    return values


class BuildTokenizer(Protocol):
    """Makes a tokenizer of the training text."""

    def __call__(
        self, *, vocab_size: int, model_type: str, max_length: int, pad_token_id: int | None, eos_token_id: int | None
    ) -> PreTrainedTokenizerBase:
        """Return a tokenizer with at most `vocab_size` tokens, its special tokens at the ids that are given."""


def tokenizer_for(source: ModelSource, build: BuildTokenizer) -> PreTrainedTokenizerBase:
    """Return the source's tokenizer with a padding token, or what `build` makes where the source has none.

    A missing padding token becomes the end-of-text token: no embedding row is added, the attention mask hides it.
    Models other than decoders may count positions from the id that their configuration names, as RoBERTa does, so there
    that id pads, where the tokenizer knows it.

    Raises:
        UsageError: the tokenizer knows more tokens than the model embeds, or has no token to pad with.
    """
    vocab_size = min(getattr(side, "vocab_size", BUILTIN_VOCABULARY) for side in sides(source.config))
    tokenizer = source.tokenizer
    if tokenizer is None:
        tokenizer = build(
            vocab_size=vocab_size,
            model_type=source.config.model_type,
            max_length=row_limit(source, None, None),
            pad_token_id=getattr(source.config, "pad_token_id", None) if source.path is not None else None,
            eos_token_id=getattr(source.config, "eos_token_id", None) if source.config.is_encoder_decoder else None,
        )
        tokenizer.padding_side = source.padding_side
    named = getattr(source.config, "pad_token_id", None)
    if source.tokenizer is not None and not source.is_decoder and named in range(len(tokenizer)):
        tokenizer.pad_token = tokenizer.convert_ids_to_tokens(named)
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
    """Return the longest row in tokens; see `effcli.models.lengths.longest_row`."""
    tokens = tokenizer.model_max_length if tokenizer is not None else MAX_LENGTH
    return longest_row(source.config, source.name, asked, tokenizer_limit=tokens)


def _builtin() -> ModelSource:
    from transformers import DistilBertConfig

    from effcli.data.builtin import DEMO_CONFIG

    config = DistilBertConfig(vocab_size=BUILTIN_VOCABULARY, **DEMO_CONFIG)
    return ModelSource(name=BUILTIN_NAME, path=None, config=config, has_weights=False, tokenizer=None)


def _from_folder(name: str, folder: Path, trust: bool) -> ModelSource:
    config = config_of(name, config_values(name, folder / "config.json"), trust=trust)
    has_tokenizer = any((folder / file).is_file() for file in TOKENIZER_FILES)
    return ModelSource(
        name=name,
        path=str(folder),
        config=config,
        has_weights=any((folder / file).is_file() for file in WEIGHT_FILES),
        tokenizer=_tokenizer(name, str(folder), trust) if has_tokenizer else None,
    )


def _tokenizer(name: str, path: str, trust: bool) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    with unusable(name, "tokenizer"), hub_errors("model", name, flag="--model"):
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust)
        tokenizer("a word")  # some damage, such as an empty vocabulary, shows only here
        return tokenizer


def _hub_config_file(name: str) -> Path:
    from huggingface_hub import hf_hub_download, try_to_load_from_cache

    with hub_errors("model", name, flag="--model"):
        cached = try_to_load_from_cache(name, "config.json")
        if isinstance(cached, str):
            return Path(cached)
        go_offline_if_unreachable()
        return Path(hf_hub_download(name, "config.json"))


def _from_hub(name: str, path: Path, trust: bool) -> ModelSource:
    go_offline_if_unreachable()
    config = config_of(name, config_values(name, path), trust=trust)
    tokenizer = _tokenizer(name, name, trust)
    return ModelSource(name=name, path=name, config=config, has_weights=True, tokenizer=tokenizer)


def _refuse_quantised(name: str, values: dict[str, Any]) -> None:
    if quantised := values.get("quantization_config"):
        method = quantised.get("quant_method", "method not named") if isinstance(quantised, dict) else quantised
        raise UsageError(
            f"--model '{name}' is a quantised checkpoint ({method}): its packed weights cannot be trained; "
            "give the unquantised model"
        )


def _refuse_adapters(name: str, path: Path) -> None:
    """Raise where a folder holds LoRA adapters, which are no model by themselves."""
    if not path.is_file():
        return
    with unusable(name, path.name):
        base = json.loads(path.read_text(encoding="utf-8")).get("base_model_name_or_path")
    raise UsageError(
        f"--model '{name}' holds adapters of peft for '{base}', not a whole model; give that one, or merge them into "
        "it first (load with peft, then merge_and_unload() and save_pretrained())"
    )


def _looks_like_path(name: str) -> bool:
    return name.startswith((".", "/", "~")) or name.count("/") > 1 or "\\" in name
