"""What decoders read for their labels, for many architectures: what each model makes of them by itself."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForSeq2SeqLM, PretrainedConfig, PreTrainedModel, set_seed

from effcli.data.batches import Collator
from effcli.data.tokenizer import build_tokenizer
from effcli.engines.window import WindowLoss
from effcli.errors import UsageError
from effcli.models.kv_cache import without_kv_cache
from effcli.models.lengths import longest_row, longest_target
from effcli.models.notes import model_notes
from effcli.models.seq2seq import check_languages, decoder_inputs, name_start_token, use_special_tokens
from effcli.models.tasks import head_for

T5 = {"vocab_size": 100, "d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 1, "num_heads": 2, "dropout_rate": 0.0}
SIDES = {
    f"{side}_{name}": size
    for side in ("encoder", "decoder")
    for name, size in (("layers", 1), ("attention_heads", 2), ("ffn_dim", 64))
}
BART = {"vocab_size": 100, "d_model": 32, "max_position_embeddings": 32, "dropout": 0.0, **SIDES}
BERT = {
    "model_type": "bert", "vocab_size": 100, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1,
    "num_attention_heads": 2, "max_position_embeddings": 24,
}  # fmt: skip
TWO_BERTS = {
    "encoder": BERT,
    "decoder": {**BERT, "is_decoder": True, "add_cross_attention": True, "max_position_embeddings": 16},
    "decoder_start_token_id": 2,
    "pad_token_id": 0,
}
LED = {
    **BART, "max_encoder_position_embeddings": 32, "max_decoder_position_embeddings": 16, "attention_window": 4,
}  # fmt: skip
PROPHETNET = {
    "vocab_size": 100, "hidden_size": 32, "num_encoder_layers": 1, "num_decoder_layers": 1,
    "num_encoder_attention_heads": 2, "num_decoder_attention_heads": 2, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64,
}  # fmt: skip
FSMT = {"langs": ["en", "de"], "src_vocab_size": 100, "tgt_vocab_size": 100, **BART}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "t5": T5,
    "mt5": T5,
    "switch_transformers": {**T5, "num_experts": 2},
    "bart": BART,
    "mbart": BART,
    "plbart": BART,
    "pegasus": BART,
    "marian": {**BART, "pad_token_id": 99, "decoder_start_token_id": 99, "eos_token_id": 0},
    "m2m_100": BART,
    "nllb-moe": {**BART, "num_experts": 2},
    "blenderbot": BART,
    "led": LED,
    "encoder-decoder": TWO_BERTS,
}
ROWS = [
    {"input_ids": [5, 6, 7, 8, 9], "attention_mask": [1] * 5, "labels": [10, 11, 12, 13]},
    {"input_ids": [15, 16], "attention_mask": [1] * 2, "labels": [20, 21]},
]


def config_of(kind: str, **changes: Any) -> PretrainedConfig:
    config = CONFIG_MAPPING[kind](**ARCHITECTURES.get(kind, {}) | changes)
    name_start_token(config, head_for("seq2seq").model_class(config))
    return config


def model_of(kind: str, **changes: Any) -> PreTrainedModel:
    set_seed(0)
    return AutoModelForSeq2SeqLM.from_config(config_of(kind, **changes)).eval()


def batch_for(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    return Collator(model.config.pad_token_id, "right", "seq2seq", decoder_inputs(model, "tiny"))(ROWS)


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_the_loss_is_the_one_that_the_model_computes_from_its_labels(kind: str) -> None:
    model = model_of(kind)
    batch = batch_for(model)
    decoder_input_ids, labels = batch.pop("decoder_input_ids"), batch["labels"].clone()
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a composite model says that its loss is computed otherwise than in 4.12
        own = model(**batch).loss
        logits = model(**batch | {"labels": None, "decoder_input_ids": decoder_input_ids}).logits
    assert (WindowLoss("seq2seq").total(logits, labels) / 6).item() == pytest.approx(own.item(), rel=1e-6)


@pytest.mark.parametrize("side", ["left", "right"])
def test_targets_are_filled_up_on_the_right_whatever_the_sources_are(side: Any) -> None:
    model = model_of("t5")
    batch = Collator(0, side, "seq2seq", decoder_inputs(model, "tiny"))(ROWS)
    assert batch["labels"].tolist() == [[10, 11, 12, 13], [20, 21, -100, -100]]
    assert batch["decoder_input_ids"].tolist() == [[0, 10, 11, 12], [0, 20, 21, 0]]
    assert batch["input_ids"][1].tolist() == ([0, 0, 0, 15, 16] if side == "left" else [15, 16, 0, 0, 0])


def test_code_that_writes_into_the_labels_does_not_reach_the_loss() -> None:
    model = model_of("fsmt", **FSMT)
    assert batch_for(model)["labels"].tolist() == [[10, 11, 12, 13], [20, 21, -100, -100]]


def test_a_start_token_that_is_missing_is_named_for_t5_and_asked_for_elsewhere() -> None:
    assert config_of("t5").decoder_start_token_id == 0
    assert config_of("t5", decoder_start_token_id=7).decoder_start_token_id == 7
    assert config_of("mbart").decoder_start_token_id is None, "its code takes the last token of the target"
    with pytest.raises(UsageError, match=r"^--model 'x': its config.json must name decoder_start_token_id"):
        decoder_inputs(model_of("encoder-decoder", decoder_start_token_id=None), "x")


def test_a_model_that_does_not_say_what_its_decoder_reads_is_refused() -> None:
    class Odd(torch.nn.Module):
        config = PretrainedConfig()

    with pytest.raises(UsageError, match="cannot be trained for --task seq2seq: its code does not say"):
        decoder_inputs(Odd(), "odd")


@pytest.mark.parametrize(
    ("kind", "changes", "words"),
    [
        ("t5", {}, ""),
        ("switch_transformers", {}, ""),
        ("switch_transformers", {"output_router_logits": True}, "adds a loss that balances its router; it is left out"),
        ("prophetnet", PROPHETNET, "adds those of the 1 tokens that follow the next; it is left out"),
    ],
)
def test_more_in_a_models_own_loss_is_said(kind: str, changes: dict[str, Any], words: str) -> None:
    notes = model_notes(model_of(kind, **changes))
    assert (words in notes[0]) if words else notes == ()


@pytest.mark.parametrize("kind", ["t5", "bart", "encoder-decoder"])
def test_no_keys_and_values_are_kept_while_training_whatever_part_makes_them(kind: str) -> None:
    model = model_of(kind)
    batch = batch_for(model)
    del batch["labels"]
    with torch.no_grad():
        assert model(**batch).past_key_values is not None
        with without_kv_cache(model):
            assert model(**batch).past_key_values is None
        assert model(**batch).past_key_values is not None


@pytest.mark.parametrize(
    ("kind", "changes", "source", "target"),
    [
        ("t5", {}, 512, 512),
        ("bart", {}, 32, 32),
        ("led", {}, 32, 16),
        ("encoder-decoder", {}, 24, 16),
    ],
)
def test_both_sides_are_as_long_as_their_positions_allow(
    kind: str, changes: dict[str, Any], source: int, target: int
) -> None:
    config = config_of(kind, **changes)
    longest = longest_row(config, kind, None)
    assert (longest, longest_target(config, kind, None, longest_source=longest)) == (source, target)
    assert longest_target(config, kind, 8, longest_source=longest) == 8
    if kind != "t5":
        with pytest.raises(UsageError, match=f"--max-target-length {target + 1}: '{kind}' writes at most {target}"):
            longest_target(config, kind, target + 1, longest_source=longest)


@pytest.mark.parametrize(
    ("kind", "wanted"),
    [("t5", (0, 1, 0)), ("bart", (1, 2, 2)), ("marian", (1, 0, 1))],
)
def test_a_built_tokenizer_and_the_configuration_agree_on_special_tokens(
    kind: str, wanted: tuple[int, int, int]
) -> None:
    config = config_of(kind)
    tokenizer = build_tokenizer(
        ["one two"], vocab_size=100, model_type=kind, max_length=8, pad_token_id=config.pad_token_id,
        eos_token_id=config.eos_token_id,
    )  # fmt: skip
    use_special_tokens(config, tokenizer)
    assert (config.pad_token_id, config.eos_token_id, config.decoder_start_token_id) == wanted
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == wanted[:2]
    assert tokenizer.convert_ids_to_tokens(tokenizer("one two")["input_ids"]) == ["one", "two", "</s>"]
    assert len({tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id}) == 3


def test_a_tokenizer_of_languages_must_know_that_of_the_targets() -> None:
    class Tokenizer:
        tgt_lang: str | None = None

    tokenizer: Any = Tokenizer()
    with pytest.raises(UsageError, match="name src_lang and tgt_lang in its tokenizer_config"):
        check_languages(tokenizer, "mbart")
    tokenizer.tgt_lang = "de_DE"
    check_languages(tokenizer, "mbart")
