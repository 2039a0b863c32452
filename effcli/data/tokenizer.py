"""A word tokenizer built in the process: for the demonstration, and for model folders that come without one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from effcli.errors import UsageError

if TYPE_CHECKING:
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerFast

# Encoders whose forward pass tells sentence A from B by `token_type_ids`. RoBERTa's family has the argument but a table
# of one row, so a 1 would be out of range.
_TYPES_WITH_SEGMENTS = frozenset(
    {"albert", "bert", "big_bird", "convbert", "deberta", "deberta-v2", "electra", "ernie", "fnet", "funnel"}
    | {"megatron-bert", "mobilebert", "mra", "nystromformer", "rembert", "roc_bert", "roformer", "squeezebert"}
)
_ENCODER_SPECIALS = {
    "pad_token": "[PAD]",
    "unk_token": "[UNK]",
    "cls_token": "[CLS]",
    "sep_token": "[SEP]",
    "mask_token": "[MASK]",
}
_ENCODER_DECODER_SPECIALS = {"pad_token": "<pad>", "unk_token": "<unk>", "eos_token": "</s>"}
_DECODER_SPECIALS = {"pad_token": "<pad>", "unk_token": "<unk>", "eos_token": "<|endoftext|>"}


def build_tokenizer(
    texts: Iterable[str],
    *,
    vocab_size: int,
    model_type: str,
    max_length: int,
    pad_token_id: int | None = None,
    eos_token_id: int | None = None,
) -> PreTrainedTokenizerFast:
    """Return a word-level tokenizer of the most frequent words, lower-cased, with at most `vocab_size` entries.

    Encoders read `[CLS] A [SEP]` or `[CLS] A [SEP] B [SEP]`, with token_type_ids only where `model_type` uses them.
    Decoders read the text alone; their end-of-text token exists but is not added. Encoder-decoders read and write
    `A </s>`. Sequences are limited to `max_length` tokens, special tokens included. `pad_token_id` and `eos_token_id`,
    as the model's configuration names them, are honoured where they fall among the special tokens at the start of the
    vocabulary; otherwise padding is token 0, or the first that is left.

    Raises:
        UsageError: `vocab_size` leaves no room for a single word.
    """
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    named = _specials(model_type)
    specials = _placed(named, {"pad_token": pad_token_id, "eos_token": eos_token_id})
    if vocab_size <= len(specials):
        raise UsageError(
            f"the model's vocabulary of {vocab_size} has no room for words beside {len(specials)} special tokens; "
            f"set vocab_size in its config.json to at least {len(specials) + 1}, or put a tokenizer into the folder"
        )
    core = Tokenizer(models.WordLevel(unk_token=named["unk_token"]))
    core.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])
    core.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordLevelTrainer(vocab_size=vocab_size, special_tokens=specials, show_progress=False)
    core.train_from_iterator(texts, trainer)
    if named is not _DECODER_SPECIALS:
        core.post_processor = _template(named, specials)
    names = ["input_ids", "attention_mask"]
    if model_type in _TYPES_WITH_SEGMENTS:
        names.insert(1, "token_type_ids")
    return PreTrainedTokenizerFast(
        tokenizer_object=core, model_max_length=max_length, model_input_names=names, padding_side="right", **named
    )


def _specials(model_type: str) -> Mapping[str, str]:
    """Return the special tokens of a model type, by the tables that transformers has for it.

    Decoders are known for causal, but not for masked, language modelling.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES as MASKED
    from transformers.models.auto.modeling_auto import MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES as SEQ2SEQ

    if model_type in SEQ2SEQ:
        return _ENCODER_DECODER_SPECIALS
    return _DECODER_SPECIALS if model_type in CAUSAL and model_type not in MASKED else _ENCODER_SPECIALS


def _placed(named: Mapping[str, str], wanted: Mapping[str, int | None]) -> list[str]:
    """Return the special tokens, those that are `wanted` at an id among them there, the others in their order."""
    found = {
        position: named[name]
        for name, position in wanted.items()
        if name in named and isinstance(position, int) and 0 <= position < len(named)
    }
    rest = iter([token for token in named.values() if token not in found.values()])
    return [found[position] if position in found else next(rest) for position in range(len(named))]


def _template(named: Mapping[str, str], specials: list[str]) -> TemplateProcessing:
    """Return the post-processor for `[CLS] A [SEP]` and `[CLS] A [SEP] B [SEP]`, with segment 1 from B on.

    That of encoder-decoders is for `A </s>` and `A </s> B </s>`.
    """
    from tokenizers.processors import TemplateProcessing

    start, end = ("[CLS]:0 ", "[SEP]") if "cls_token" in named else ("", "</s>")
    return TemplateProcessing(
        single=f"{start}$A:0 {end}:0",
        pair=f"{start}$A:0 {end}:0 $B:1 {end}:1",
        special_tokens=[(token, specials.index(token)) for token in ("[CLS]", "[SEP]", "</s>") if token in specials],
    )
