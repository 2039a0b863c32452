"""The built-in demonstration: sentence pairs made by a grammar, and settings that learn them. Standard library only.

The pairs imitate the shape of paraphrase corpora (two sentences, about 60 % equivalent), not their difficulty. Nothing
can be read off one sentence, nor off the words of both: synonyms, voice, adverb position and negation are drawn
much alike for both labels, and no meaning of the evaluation rows, negated or not, occurs in training.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from effcli.data.builtin_grammar import (
    Meaning,
    negate,
    random_meaning,
    replace_word,
    reverse_frequency,
    say,
    swap_roles,
)

Split = Literal["train", "eval"]
Unequal = Literal["negated", "opposite", "replaced", "swapped"]
Kind = Literal["reworded", "reordered"] | Unequal
Drawn = Literal["paraphrase"] | Unequal

# Keyword arguments of DistilBertConfig, without vocab_size: about two million parameters. Wider initial weights than
# DistilBERT's 0.02 shorten the first flat stretch of the loss, dropout would lengthen it.
DEMO_CONFIG: dict[str, int | float] = {
    "dim": 288,
    "n_layers": 2,
    "n_heads": 8,
    "hidden_dim": 1152,
    "max_position_embeddings": 64,
    "initializer_range": 0.1,
    "dropout": 0.0,
    "attention_dropout": 0.0,
    "seq_classif_dropout": 0.0,
}
DEMO_LOOP: Mapping[str, bool | int | float] = MappingProxyType(
    {"profile_memory": True, "lr": 5e-4, "batch_size": 16, "epochs": 3, "warmup_ratio": 0.1, "max_length": 32}
)

NUM_ROWS: Mapping[Split, int] = MappingProxyType({"train": 5000, "eval": 600})

# Rows in a thousand. Negation and the adverb's opposite lead, because a small model from scratch learns them within a
# minute. Other replaced words and swapped roles ask for a comparison word by word, which it does not learn in that
# time, so its accuracy ends near 0.965. The lexicon is small for the same reason: more words take longer.
_PER_MILLE: Mapping[Drawn, int] = MappingProxyType(
    {"paraphrase": 600, "negated": 200, "opposite": 165, "replaced": 20, "swapped": 15}
)
_NEGATED_SHARE = 0.4


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A row and how it was made; `negations` says which of its two sentences are negated."""

    sentence1: str
    sentence2: str
    label: int
    kind: Kind
    negations: tuple[bool, bool]


def builtin_rows(split: Split, seed: int = 0) -> list[dict[str, str | int]]:
    """Return the rows of `split`: sentence1, sentence2 and label (1: equivalent, 0: not), the same on every Python."""
    return [
        {"sentence1": pair.sentence1, "sentence2": pair.sentence2, "label": pair.label}
        for pair in builtin_pairs(split, seed)
    ]


def builtin_pairs(split: Split, seed: int = 0) -> tuple[Pair, ...]:
    """Return the rows of `split` with the way each was made; no row occurs twice."""
    rng = random.Random(f"{split}-{seed}")  # a string seeds through SHA-512, not through the process's hash salt
    seen: set[tuple[str, str]] = set()
    pairs: list[Pair] = []
    for kind, share in _PER_MILLE.items():
        num_wanted = len(pairs) + NUM_ROWS[split] * share // 1000
        while len(pairs) < num_wanted:
            pair = _draw(rng, kind, split)
            if pair is not None and (pair.sentence1, pair.sentence2) not in seen:
                seen.add((pair.sentence1, pair.sentence2))
                pairs.append(pair)
    pairs.sort(key=lambda pair: zlib.crc32(f"{seed}:{pair.sentence1}|{pair.sentence2}".encode()))
    return tuple(pairs)


def _draw(rng: random.Random, kind: Drawn, split: Split) -> Pair | None:
    """Return a random pair, or None where the draw does not fit `kind` or `split`."""
    meaning = random_meaning(rng, negated_share=_NEGATED_SHARE)
    if kind == "swapped" and not meaning.patient_is_person:
        return None
    other = meaning
    if kind == "negated":
        other = negate(meaning)
    elif kind == "opposite":
        other = reverse_frequency(meaning)
    elif kind == "replaced":
        other = replace_word(rng, meaning)
    elif kind == "swapped":
        other = swap_roles(meaning)
    if _split_of(meaning) != split or _split_of(other) != split:
        return None
    first, second = say(rng, meaning), say(rng, other)
    if first.text == second.text:
        return None
    return Pair(
        sentence1=first.text,
        sentence2=second.text,
        label=int(kind == "paraphrase"),
        kind=kind if kind != "paraphrase" else "reordered" if first.order != second.order else "reworded",
        negations=(meaning.negated, other.negated),
    )


def _split_of(meaning: Meaning) -> Split:
    """Return the split that owns a meaning; negating it or swapping its roles does not change the owner."""
    roles = sorted((meaning.agent, meaning.patient)) if meaning.patient_is_person else [meaning.agent, meaning.patient]
    key = f"{meaning.patient_is_person} {roles} {meaning.verb} "
    return "eval" if zlib.crc32(key.encode()) % 6 == 0 else "train"
