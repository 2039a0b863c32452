"""How long a row can be, in tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from effcli.errors import UsageError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

MAX_LENGTH = 512
POSITIONS_AFTER_PADDING = {"roberta", "xlm-roberta", "xlm-roberta-xl", "camembert", "roberta-prelayernorm", "mpnet"}
"""Model types whose position ids start behind the padding id, so that the table holds fewer positions than rows."""


def longest_row(config: PretrainedConfig, name: str, asked: int | None, *, tokenizer_limit: int = MAX_LENGTH) -> int:
    """Return the longest row in tokens: what was asked for, or else the model's and tokenizer's limit, at most 512.

    Raises:
        UsageError: more was asked for than the model called `name` has positions.
    """
    encoder, _ = sides(config)
    positions = _positions(encoder, "max_encoder_position_embeddings")
    if asked is not None:
        if positions is not None and asked > positions:
            raise UsageError(f"--max-length {asked}: '{name}' reads at most {positions} tokens")
        return asked
    return min(MAX_LENGTH, tokenizer_limit, positions or MAX_LENGTH)


def longest_target(config: PretrainedConfig, name: str, asked: int | None, *, longest_source: int) -> int:
    """Return the longest target text in tokens: what was asked for, or else that of the source, if the decoder of the
    encoder-decoder `name` has as many positions.

    Raises:
        UsageError: more was asked for than it has.
    """
    _, decoder = sides(config)
    positions = _positions(decoder, "max_decoder_position_embeddings")
    if asked is None:
        return min(longest_source, positions or longest_source)
    if positions is not None and asked > positions:
        raise UsageError(f"--max-target-length {asked}: '{name}' writes at most {positions} tokens")
    return asked


def sides(config: PretrainedConfig) -> tuple[PretrainedConfig, PretrainedConfig]:
    """Return the configurations of encoder and decoder; twice the model's own where it has one for both."""
    return (config.encoder, config.decoder) if config.model_type == "encoder-decoder" else (config, config)


def _positions(config: PretrainedConfig, of_one_side: str) -> int | None:
    """Return the number of positions that a row can have; None where the model has no table of them.

    `of_one_side` is what the setting is called where encoder and decoder have one each, as in LED.
    """
    of_both = getattr(config.get_text_config(), "max_position_embeddings", None)
    positions = getattr(config, of_one_side, of_both)
    if not isinstance(positions, int) or positions < 1:
        return None
    return (
        positions - (getattr(config, "pad_token_id", None) or 0) - 1
        if config.model_type in POSITIONS_AFTER_PADDING
        else positions
    )
