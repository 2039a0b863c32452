"""Encoder-decoders: what their decoder reads while it learns to write the labels."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from effcli.errors import UsageError, first_line
from effcli.models.lora import plain_model

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

    from effcli.data.batches import DecoderInputs


def decoder_inputs(model: torch.nn.Module, name: str) -> DecoderInputs:
    """Return the function that the model itself applies to its labels: most shift them right, behind a start token.

    It is tried once, so that what it lacks is told before data goes through it. `name` is for messages.

    Raises:
        UsageError: the model has no such function, or its configuration does not name the tokens that it needs.
    """
    import torch

    plain = plain_model(model)
    shift: DecoderInputs | None = getattr(plain, "prepare_decoder_input_ids_from_labels", None) or _shift(plain)
    if shift is None:
        raise UsageError(
            f"'{name}' ({plain.config.model_type}) cannot be trained for --task seq2seq: its code does not say what "
            "its decoder reads for given labels; give another --model, such as T5, BART or Marian"
        )
    try:
        shift(torch.ones(1, 2, dtype=torch.int64))
    except Exception as error:  # whatever the model's code raises over a token that is None
        raise UsageError(
            f"--model '{name}': its config.json must name decoder_start_token_id and pad_token_id for --task seq2seq "
            f"({first_line(error)})"
        ) from error
    return shift


def start_token(config: PretrainedConfig, model_class: Any) -> int | None:
    """Return the token that the decoder starts with where the configuration has to be given one; None elsewhere.

    T5 and its kin start with the padding token (`_shift_right` of transformers/models/t5/modeling_t5.py, 5.24), and
    their configuration has no default for it.
    """
    lacks = hasattr(model_class, "_shift_right") and getattr(config, "decoder_start_token_id", None) is None
    return config.pad_token_id if lacks else None


def _shift(model: Any) -> DecoderInputs | None:
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
