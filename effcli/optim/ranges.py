"""Ranges of hyperparameters: what upstream's constructors accept and what makes sense, checked before a model loads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Range:
    """Values that a hyperparameter may have; `text` ends the sentence "it must be ..."."""

    accepts: Callable[[Any], bool]
    text: str


AT_LEAST_0 = Range(lambda x: x >= 0, "at least 0")
AT_LEAST_1 = Range(lambda x: x >= 1, "at least 1")
AT_MOST_0 = Range(lambda x: x <= 0, "at most 0")
ABOVE_0 = Range(lambda x: x > 0, "above 0")
UP_TO_1 = Range(lambda x: 0 <= x <= 1, "between 0 and 1")
DECAY = Range(lambda x: 0 <= x < 1, "at least 0 and below 1")
"""Of a running mean: at 1 it would stay where it began."""
POSITIVE_DECAY = Range(lambda x: 0 < x < 1, "above 0 and below 1")

FLAGGED: Mapping[str, Range] = {
    "lr": AT_LEAST_0,
    "beta1": DECAY,
    "beta2": DECAY,
    "eps": AT_LEAST_0,
    "weight_decay": AT_LEAST_0,
    "optim_bits": Range(lambda x: x in (8, 32), "8 or 32"),
    "min_8bit_size": AT_LEAST_1,
}
"""What has a flag of its own means the same for every optimizer, unless an entry narrows it."""


def one_of(*choices: str) -> Range:
    """Return the range of a text that must be one of `choices`."""
    return Range(lambda x: x in choices, " or ".join(choices))
