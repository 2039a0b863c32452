from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from effcli.data.baselines import baselines
from effcli.data.builtin import DEMO_CONFIG, DEMO_LOOP, NUM_ROWS, Split, builtin_pairs, builtin_rows
from effcli.data.builtin_grammar import FREQUENCIES, PEOPLE, THINGS, VERBS_ON_PEOPLE, VERBS_ON_THINGS
from effcli.data.tokenizer import build_tokenizer
from effcli.errors import UsageError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

SPLITS: tuple[Split, ...] = ("train", "eval")


def _digest() -> str:
    rows = [builtin_rows(split) for split in SPLITS]
    return hashlib.sha256(json.dumps(rows, sort_keys=True).encode()).hexdigest()


# --- sentence pairs


@pytest.mark.parametrize("split", SPLITS)
def test_sixty_percent_of_the_pairs_are_paraphrases(split: Split) -> None:
    labels = Counter(row["label"] for row in builtin_rows(split))
    assert set(labels) == {0, 1}
    assert labels[1] / (labels[0] + labels[1]) == pytest.approx(0.6, abs=0.005)


@pytest.mark.parametrize("split", SPLITS)
def test_swapped_roles_make_up_at_most_a_quarter_of_the_non_paraphrases(split: Split) -> None:
    kinds = Counter(pair.kind for pair in builtin_pairs(split) if pair.label == 0)
    assert set(kinds) == {"negated", "opposite", "replaced", "swapped"}
    assert 0 < kinds["swapped"] <= kinds.total() / 4


def test_paraphrases_come_by_synonyms_alone_and_by_word_order() -> None:
    kinds = Counter(pair.kind for pair in builtin_pairs("train") if pair.label == 1)
    assert set(kinds) == {"reworded", "reordered"}
    assert min(kinds.values()) > kinds.total() / 5


def test_true_paraphrases_are_often_negated_on_both_sides_and_never_on_one() -> None:
    paraphrases = [pair for pair in builtin_pairs("train") if pair.label == 1]
    for pair in paraphrases:
        negated = tuple("not" in sentence.split() for sentence in (pair.sentence1, pair.sentence2))
        assert negated == pair.negations
        assert negated[0] == negated[1]
    assert sum(pair.negations == (True, True) for pair in paraphrases) > len(paraphrases) / 4


def test_a_negated_pair_has_exactly_one_negation_on_either_side() -> None:
    sides = Counter(pair.negations for pair in builtin_pairs("train") if pair.kind == "negated")
    assert set(sides) == {(True, False), (False, True)}


def test_a_replacement_by_the_opposite_exchanges_often_and_rarely() -> None:
    often, rarely = (set(words) for words in FREQUENCIES)
    for pair in (pair for pair in builtin_pairs("train") if pair.kind == "opposite"):
        words = [set(sentence.split()) for sentence in (pair.sentence1, pair.sentence2)]
        assert sorted(bool(side & often) for side in words) == [False, True]
        assert sorted(bool(side & rarely) for side in words) == [False, True]


def test_a_paraphrase_uses_the_same_concepts_on_both_sides() -> None:
    concepts = {word: row for rows in (PEOPLE, THINGS, FREQUENCIES) for row in rows for word in row}
    verbs = {
        form: row for rows in (VERBS_ON_PEOPLE, VERBS_ON_THINGS) for row in rows for forms in row for form in forms
    }
    known = concepts | verbs

    def meanings(sentence: str) -> Counter[object]:
        return Counter(known[word] for word in sentence.split() if word in known)

    for pair in builtin_pairs("eval"):
        assert meanings(pair.sentence1).total() == 4
        same = meanings(pair.sentence1) == meanings(pair.sentence2)
        assert same == (pair.kind not in ("opposite", "replaced")), pair


def test_no_word_belongs_to_two_concepts() -> None:
    nouns_and_adverbs = [word for rows in (PEOPLE, THINGS, FREQUENCIES) for row in rows for word in row]
    verb_forms = [
        form for rows in (VERBS_ON_PEOPLE, VERBS_ON_THINGS) for row in rows for forms in row for form in forms
    ]
    words = nouns_and_adverbs + verb_forms
    assert len(words) == len(set(words))


def test_no_evaluation_sentence_occurs_in_training_whatever_the_seeds() -> None:
    def sentences(split: Split, seed: int) -> set[object]:
        return {row[key] for row in builtin_rows(split, seed) for key in ("sentence1", "sentence2")}

    assert not sentences("train", 0) & (sentences("eval", 0) | sentences("eval", 1))


@pytest.mark.parametrize("split", SPLITS)
def test_rows_have_the_promised_keys_and_no_row_occurs_twice(split: Split) -> None:
    rows = builtin_rows(split)
    assert len(rows) == NUM_ROWS[split]
    assert all(list(row) == ["sentence1", "sentence2", "label"] for row in rows)
    assert len({(row["sentence1"], row["sentence2"]) for row in rows}) == len(rows)
    assert all(row["sentence1"] != row["sentence2"] for row in rows)


def test_labels_are_mixed_from_the_first_rows_on() -> None:
    assert 40 <= sum(int(row["label"]) for row in builtin_rows("train")[:100]) <= 80


def test_rows_are_the_same_bytes_on_every_python() -> None:
    assert _digest() == "1e4b0e48877d4f73b9928d1e098f739959bb1a264c297ae8d6ba6381306a32f1"


def test_hash_salt_does_not_change_the_rows_and_torch_is_not_needed() -> None:
    code = (
        "import json, hashlib, sys; from effcli.data.builtin import builtin_rows;"
        "rows = [builtin_rows(split) for split in ('train', 'eval')];"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules;"
        "print(hashlib.sha256(json.dumps(rows, sort_keys=True).encode()).hexdigest())"
    )
    root = Path(__file__).parent.parent
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": salt},
            cwd=root,
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for salt in ("1", "2")
    }
    assert outputs == {_digest() + "\n"}


def test_another_seed_gives_other_rows() -> None:
    assert builtin_rows("eval", 0) != builtin_rows("eval", 1)


def test_a_bag_of_words_stays_far_below_the_demonstration() -> None:
    rows = {split: builtin_rows(split) for split in SPLITS}
    texts = {split: [(str(row["sentence1"]), str(row["sentence2"])) for row in rows[split]] for split in SPLITS}
    labels = {split: [int(row["label"]) for row in rows[split]] for split in SPLITS}
    scores = baselines(texts["train"], labels["train"], texts["eval"], labels["eval"])
    assert scores["majority_accuracy"] == pytest.approx(0.6, abs=0.005)
    assert scores["bag_of_words_accuracy"] < 0.75


def test_the_demonstration_model_has_a_few_million_parameters_and_fits_the_longest_pair() -> None:
    from transformers import DistilBertConfig, DistilBertForSequenceClassification

    texts = [str(row[key]) for row in builtin_rows("train") for key in ("sentence1", "sentence2")]
    tokenizer = build_tokenizer(
        texts, vocab_size=8000, model_type="distilbert", max_length=int(DEMO_LOOP["max_length"])
    )
    config = DistilBertConfig(vocab_size=len(tokenizer), **DEMO_CONFIG)
    parameters = list(DistilBertForSequenceClassification(config).parameters())
    total = sum(parameter.numel() for parameter in parameters)
    assert 2_000_000 <= total <= 6_000_000
    assert sum(parameter.numel() for parameter in parameters if parameter.numel() >= 4096) > 0.99 * total
    rows = builtin_rows("train") + builtin_rows("eval")
    ids = [tokenizer(str(row["sentence1"]), str(row["sentence2"]))["input_ids"] for row in rows]
    assert max(map(len, ids)) <= DEMO_LOOP["max_length"] <= DEMO_CONFIG["max_position_embeddings"]
    assert not any(tokenizer.unk_token_id in row for row in ids), "evaluation uses only words that training has shown"


# --- tokenizer

TEXTS = ["The cat sat, on the mat!", "the dog ran", "a dog sat"]


def _words(model_type: str, vocab_size: int = 50, pad_token_id: int | None = None) -> PreTrainedTokenizerFast:
    return build_tokenizer(
        TEXTS, vocab_size=vocab_size, model_type=model_type, max_length=16, pad_token_id=pad_token_id
    )


def test_encoders_read_a_pair_between_separators() -> None:
    tokenizer = _words("distilbert")
    ids = tokenizer("The cat", "a dog ran")["input_ids"]
    assert tokenizer.convert_ids_to_tokens(ids) == ["[CLS]", "the", "cat", "[SEP]", "a", "dog", "ran", "[SEP]"]
    assert tokenizer.convert_ids_to_tokens(tokenizer("mat")["input_ids"]) == ["[CLS]", "mat", "[SEP]"]


def test_only_models_with_a_segment_table_get_token_types() -> None:
    assert _words("bert")("the cat", "a dog")["token_type_ids"] == [0, 0, 0, 0, 1, 1, 1]
    for model_type in ("distilbert", "roberta", "modernbert", "gpt2"):
        assert set(_words(model_type)("the cat", "a dog")) == {"input_ids", "attention_mask"}


@pytest.mark.parametrize("model_type", ["gpt2", "llama"])
def test_decoders_read_the_text_alone_and_know_an_end_of_text(model_type: str) -> None:
    tokenizer = _words(model_type)
    assert tokenizer.convert_ids_to_tokens(tokenizer("the dog")["input_ids"]) == ["the", "dog"]
    assert tokenizer.eos_token_id is not None
    assert len({tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id}) == 3


@pytest.mark.parametrize("model_type", ["distilbert", "bert", "roberta", "gpt2", "llama"])
@pytest.mark.parametrize("with_config", [False, True])
def test_a_saved_tokenizer_reads_the_same_ids_again(model_type: str, with_config: bool, tmp_path: Path) -> None:
    from transformers import CONFIG_MAPPING, AutoTokenizer

    tokenizer = _words(model_type)
    tokenizer.save_pretrained(tmp_path)
    if with_config:
        CONFIG_MAPPING[model_type]().save_pretrained(tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path)
    for columns in (("The cat, unseen!",), ("the mat", "a dog"), ("the " * 40, "a dog")):
        assert dict(again(*columns, truncation=True)) == dict(tokenizer(*columns, truncation=True))
    assert len(again(" ".join(TEXTS * 5), truncation=True)["input_ids"]) == 16
    for name in ("pad_token_id", "unk_token_id", "eos_token_id", "padding_side", "model_max_length"):
        assert getattr(again, name) == getattr(tokenizer, name), name


def test_the_vocabulary_keeps_the_most_frequent_words_within_the_limit() -> None:
    tokenizer = _words("bert", vocab_size=7)
    assert len(tokenizer) == 7
    assert set(tokenizer.get_vocab()) == {"[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "dog"}
    assert tokenizer("the cat")["input_ids"][2] == tokenizer.unk_token_id


def test_the_same_texts_give_the_same_vocabulary() -> None:
    assert _words("bert").get_vocab() == _words("bert").get_vocab()


def test_padding_takes_the_id_that_the_model_expects() -> None:
    assert _words("roberta", pad_token_id=1).pad_token_id == 1
    assert _words("bert", pad_token_id=0).pad_token_id == 0
    assert _words("llama", pad_token_id=-1).pad_token_id == 0


def test_a_vocabulary_without_room_for_words_is_refused() -> None:
    with pytest.raises(UsageError, match="vocabulary of 5 has no room for words beside 5 special tokens"):
        _words("bert", vocab_size=5)


# --- baselines


def test_baselines_of_a_tiny_example() -> None:
    train = [("good film",), ("good play",), ("good song",), ("bad film",), ("bad play",)]
    scores = baselines(
        train, [1, 1, 1, 0, 0], [("good day",), ("bad day",), ("bad song",), ("good film",)], [1, 0, 0, 1]
    )
    # Always 1: two of four right; precision 1/2, recall 1, so F1 = 2/3. The words "good" and "bad" decide everything.
    assert scores["majority_accuracy"] == 0.5
    assert scores["majority_f1"] == pytest.approx(2 / 3)
    assert scores["bag_of_words_accuracy"] == scores["bag_of_words_f1"] == 1.0


def test_a_majority_of_zeros_has_no_f1_for_label_one() -> None:
    scores = baselines([("a",), ("b",), ("c",)], [0, 0, 1], [("a",), ("c",)], [0, 1])
    assert (scores["majority_accuracy"], scores["majority_f1"]) == (0.5, 0.0)


def test_more_than_two_labels_are_scored_by_macro_f1() -> None:
    train = [("red",), ("red",), ("green",), ("blue",)] * 5
    scores = baselines(train, [0, 0, 1, 2] * 5, [("red",), ("green",), ("blue",)], [0, 1, 2])
    # Always 0: F1 of label 0 is 2 * (1/3) / (4/3) = 1/2, of the others 0; the mean of the three is 1/6.
    assert scores["majority_f1"] == pytest.approx(1 / 6)
    assert scores["bag_of_words_f1"] == 1.0


def test_a_word_counts_separately_in_each_column() -> None:
    pairs = [("cat", "dog"), ("dog", "cat")] * 5
    assert baselines(pairs, [1, 0] * 5, [("dog", "cat"), ("cat", "dog")], [0, 1])["bag_of_words_accuracy"] == 1.0


def test_texts_without_any_word_fall_back_to_the_majority() -> None:
    assert baselines([("",), ("",), ("",)], [1, 1, 0], [("",)], [1])["bag_of_words_accuracy"] == 1.0


def test_one_class_in_training_falls_back_to_the_majority() -> None:
    assert baselines([("a",), ("b",)], [1, 1], [("a",), ("b",)], [1, 0])["bag_of_words_accuracy"] == 0.5
