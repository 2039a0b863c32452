"""A word tokenizer built in the process: for the demonstration, and for model folders that come without one."""

from __future__ import annotations

from collections.abc import Iterable
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
_DECODER_SPECIALS = {"pad_token": "<pad>", "unk_token": "<unk>", "eos_token": "<|endoftext|>"}


def build_tokenizer(
    texts: Iterable[str], *, vocab_size: int, model_type: str, max_length: int, pad_token_id: int | None = None
) -> PreTrainedTokenizerFast:
    """Return a word-level tokenizer of the most frequent words, lower-cased, with at most `vocab_size` entries.

    Encoders read `[CLS] A [SEP]` or `[CLS] A [SEP] B [SEP]`, with token_type_ids only where `model_type` uses them.
    Decoders read the text alone; their end-of-text token exists but is not added. Sequences are limited to
    `max_length` tokens, special tokens included. `pad_token_id`, as the model's configuration names it, is honoured
    when it falls among the special tokens at the start of the vocabulary; otherwise padding is token 0.

    Raises:
        UsageError: `vocab_size` leaves no room for a single word.
    """
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    decoder = _is_decoder(model_type)
    named = _DECODER_SPECIALS if decoder else _ENCODER_SPECIALS
    specials = _with_pad_at(list(named.values()), pad_token_id)
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
    if not decoder:
        core.post_processor = _pair_template(specials.index("[CLS]"), specials.index("[SEP]"))
    names = ["input_ids", "attention_mask"]
    if model_type in _TYPES_WITH_SEGMENTS:
        names.insert(1, "token_type_ids")
    return PreTrainedTokenizerFast(
        tokenizer_object=core, model_max_length=max_length, model_input_names=names, padding_side="right", **named
    )


def _is_decoder(model_type: str) -> bool:
    """Return whether transformers knows `model_type` for causal, but not for masked, language modelling."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES as MASKED

    return model_type in CAUSAL and model_type not in MASKED


def _with_pad_at(specials: list[str], pad_token_id: int | None) -> list[str]:
    """Return the special tokens, padding first, with the padding moved to `pad_token_id` where that is among them."""
    pad, *others = specials
    position = pad_token_id if pad_token_id is not None and 0 <= pad_token_id < len(specials) else 0
    return [*others[:position], pad, *others[position:]]


def _pair_template(cls_id: int, sep_id: int) -> TemplateProcessing:
    """Return the post-processor for `[CLS] A [SEP]` and `[CLS] A [SEP] B [SEP]`, with segment 1 from B on."""
    from tokenizers.processors import TemplateProcessing

    return TemplateProcessing(
        single="[CLS]:0 $A:0 [SEP]:0",
        pair="[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1",
        special_tokens=[("[CLS]", cls_id), ("[SEP]", sep_id)],
    )
