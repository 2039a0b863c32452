"""A small grammar of English sentences: what a sentence means, and the ways it can be said. Standard library only."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

Item = TypeVar("Item")

# Each row is one concept; its words are interchangeable. Plurals in the present tense keep sentences short, and verbs
# stand as (base, participle) for the passive.
PEOPLE = (
    ("doctors", "physicians"),
    ("teachers", "instructors"),
    ("lawyers", "attorneys"),
    ("authors", "writers"),
    ("thieves", "robbers"),
    ("soldiers", "troopers"),
)
THINGS = (
    ("cars", "automobiles"),
    ("sofas", "couches"),
    ("gifts", "presents"),
    ("pictures", "images"),
    ("boats", "vessels"),
    ("rugs", "carpets"),
)
VERBS_ON_PEOPLE = (
    (("help", "helped"), ("assist", "assisted")),
    (("phone", "phoned"), ("call", "called")),
    (("praise", "praised"), ("commend", "commended")),
    (("follow", "followed"), ("trail", "trailed")),
)
VERBS_ON_THINGS = (
    (("repair", "repaired"), ("mend", "mended")),
    (("buy", "bought"), ("purchase", "purchased")),
    (("grab", "grabbed"), ("snatch", "snatched")),
    (("ruin", "ruined"), ("wreck", "wrecked")),
)
# Two opposites, so that the other one is always index 1 - i.
FREQUENCIES = (("often", "frequently"), ("rarely", "seldom"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Meaning:
    """What a sentence says, as indices of concepts; two sentences paraphrase each other when these are equal."""

    agent: int
    verb: int
    patient: int
    frequency: int
    patient_is_person: bool
    negated: bool


def pick(rng: random.Random, options: Sequence[Item]) -> Item:
    """Return one of `options`; uses `Random.random` alone, whose sequence Python promises to keep across versions."""
    return options[int(rng.random() * len(options))]


def random_meaning(rng: random.Random, *, negated_share: float) -> Meaning:
    """Return a meaning drawn uniformly, except that `negated_share` of all meanings are negated."""
    on_person = rng.random() < 0.5
    agent = pick(rng, range(len(PEOPLE)))
    others = [i for i in range(len(PEOPLE)) if i != agent]
    return Meaning(
        agent=agent,
        verb=pick(rng, range(len(VERBS_ON_PEOPLE if on_person else VERBS_ON_THINGS))),
        patient=pick(rng, others if on_person else range(len(THINGS))),
        frequency=pick(rng, range(len(FREQUENCIES))),
        patient_is_person=on_person,
        negated=rng.random() < negated_share,
    )


def negate(meaning: Meaning) -> Meaning:
    """Return the opposite statement."""
    return replace(meaning, negated=not meaning.negated)


def reverse_frequency(meaning: Meaning) -> Meaning:
    """Return the statement with its adverb replaced by the opposite one."""
    return replace(meaning, frequency=1 - meaning.frequency)


def swap_roles(meaning: Meaning) -> Meaning:
    """Return the statement in which agent and patient, both people, change places."""
    return replace(meaning, agent=meaning.patient, patient=meaning.agent)


def replace_word(rng: random.Random, meaning: Meaning) -> Meaning:
    """Return the statement with its agent, verb or patient replaced by another of its kind."""
    on_person = meaning.patient_is_person
    people = {meaning.agent, meaning.patient} if on_person else {meaning.agent}
    match pick(rng, ("agent", "verb", "patient")):
        case "agent":
            return replace(meaning, agent=_other_than(rng, people, len(PEOPLE)))
        case "verb":
            verbs = VERBS_ON_PEOPLE if on_person else VERBS_ON_THINGS
            return replace(meaning, verb=_other_than(rng, {meaning.verb}, len(verbs)))
        case _:
            taken, count = (people, len(PEOPLE)) if on_person else ({meaning.patient}, len(THINGS))
            return replace(meaning, patient=_other_than(rng, taken, count))


def _other_than(rng: random.Random, taken: set[int], count: int) -> int:
    """Return an index below `count` that is not in `taken`."""
    return pick(rng, [index for index in range(count) if index not in taken])


@dataclass(frozen=True, slots=True, kw_only=True)
class Sentence:
    """One way of saying a meaning; `order` is (passive, adverb in front)."""

    text: str
    order: tuple[bool, bool]


def say(rng: random.Random, meaning: Meaning) -> Sentence:
    """Return `meaning` in randomly chosen words, voice and place of the adverb."""
    passive, fronted = rng.random() < 0.4, rng.random() < 0.4
    agent = pick(rng, PEOPLE[meaning.agent])
    patient = pick(rng, (PEOPLE if meaning.patient_is_person else THINGS)[meaning.patient])
    base, participle = pick(rng, (VERBS_ON_PEOPLE if meaning.patient_is_person else VERBS_ON_THINGS)[meaning.verb])
    frequency = pick(rng, FREQUENCIES[meaning.frequency])
    negation = "not " if meaning.negated else ""
    if passive:
        clause = f"{patient} are {negation}{participle} by {agent}"
    else:
        clause = f"{agent} {'do ' if meaning.negated else ''}{negation}{base} {patient}"
    text = f"{frequency} {clause}" if fronted else f"{clause} {frequency}"
    return Sentence(text=text, order=(passive, fronted))
