"""Encoder-decoders: what their decoder reads while it learns to write the labels."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from effcli.errors import UsageError, first_line

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

    from effcli.data.batches import DecoderInputs


def decoder_inputs(model: PreTrainedModel, name: str) -> DecoderInputs:
    """Return the function that the model itself applies to its labels: most shift them right, behind a start token.

    It is tried once, so that what it lacks is told before data goes through it. `name` is for messages.

    Raises:
        UsageError: the model has no such function, or its configuration does not name the tokens that it needs.
    """
    import torch

    shift: DecoderInputs | None = getattr(model, "prepare_decoder_input_ids_from_labels", None) or _shift(model)
    if shift is None:
        raise UsageError(
            f"'{name}' ({model.config.model_type}) cannot be trained for --task seq2seq: its code does not say what "
            "its decoder reads for given labels; give another --model, such as T5, BART or Marian"
        )
    try:
        shift(torch.full((1, 2), 0 if model.config.pad_token_id else 1))
    except Exception as error:  # whatever the model's code raises over a token that is None
        raise UsageError(
            f"--model '{name}': its config.json must name decoder_start_token_id and pad_token_id for --task seq2seq "
            f"({first_line(error)})"
        ) from error
    return shift


def name_start_token(config: PretrainedConfig, model_class: Any) -> None:
    """Let the decoder start with the padding token where the configuration names none for T5 and its kin.

    Theirs has no default, and their code shifts by `_shift_right` (transformers/models/t5/modeling_t5.py, 5.24, which
    says that T5 usually starts with the padding token).
    """
    if hasattr(model_class, "_shift_right") and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = config.pad_token_id


def use_special_tokens(config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """Give the configuration of an encoder-decoder the special tokens of a tokenizer that was built for it."""
    before = {getattr(config, name, None): getattr(tokenizer, name) for name in ("eos_token_id", "pad_token_id")}
    start = getattr(config, "decoder_start_token_id", None)
    if start is not None:
        config.decoder_start_token_id = before.get(start, start)
    config.eos_token_id, config.pad_token_id = tokenizer.eos_token_id, tokenizer.pad_token_id


def _shift(model: PreTrainedModel) -> DecoderInputs | None:
    """Return the shift of a model without a method for it, such as M2M100: the function that its `forward` calls."""
    shift = getattr(sys.modules[type(model).__module__], "shift_tokens_right", None)
    if shift is None:
        return None
    config = model.config
    return lambda labels: shift(labels, config.pad_token_id, config.decoder_start_token_id)


def check_languages(tokenizer: PreTrainedTokenizerBase, name: str) -> None:
    """Raise where a tokenizer of several languages is not told which one the targets are in.

    Raises:
        UsageError: it has no target language.
    """
    if getattr(tokenizer, "tgt_lang", "") is None:
        raise UsageError(
            f"the tokenizer of '{name}' marks texts with their language; name src_lang and tgt_lang in its "
            "tokenizer_config.json"
        )
