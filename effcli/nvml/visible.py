"""Which cards CUDA_VISIBLE_DEVICES makes visible, and in which order: by its text alone, or beside the driver's cards.

The rules are those of CUDA's programming guide (environment variables) and, where it is silent, those of
torch 2.13 (`torch.cuda._parse_visible_devices`): the first entry decides whether all are numbers, `GPU-` or `MIG-`
identifiers; CUDA stops at the first entry that is no such device; a device that is named twice leaves none.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from effcli.nvml.answers import CardIdentity
from effcli.nvml.failures import NvmlUnavailableError
from effcli.nvml.names import matching, readable

VISIBLE = "CUDA_VISIBLE_DEVICES"
ORDER = "CUDA_DEVICE_ORDER"

_DIVIDED = f"a card is divided into MIG instances: {VISIBLE} has to name one of them"

_NUMBER = re.compile(r"[+-]?[0-9]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """What CUDA takes of the variable: its `entries` in CUDA's order, and why it takes no more (None where it does)."""

    entries: tuple[str, ...] = ()
    stopped: str | None = None


def read_listing(text: str) -> Listing:
    """Return what the text says without a look at the cards: an entry may still stand for none."""
    prefix = next((prefix for prefix in ("GPU-", "MIG-") if text.startswith(prefix)), None)
    entries: list[str] = []
    for given in text.split(","):
        entry = _number(given) if prefix is None else given
        if entry in entries:
            return Listing(stopped=f"'{readable(entry)}' is in it twice")
        if not entry or (prefix is not None and not entry.startswith(prefix)):
            return Listing(entries=tuple(entries), stopped=f"CUDA stops at '{readable(given)}', which is no device")
        entries.append(entry)
    return Listing(entries=tuple(entries))


def check_listing(listing: Listing, cards: Sequence[CardIdentity]) -> Listing:
    """Return what is left of a listing on these cards, which are the driver's: CUDA stops at what is none of them."""
    places: list[CardIdentity] = []
    for entry in listing.entries:
        fitting = _fitting(entry, cards)
        if len(fitting) != 1:
            several = " and ".join(card.uuid for card in fitting)
            why = f"stands for more than one device, {several}" if fitting else "is no device here"
            return Listing(
                entries=listing.entries[: len(places)], stopped=f"CUDA stops at '{readable(entry)}', which {why}"
            )
        if fitting[0] in places:
            return Listing(stopped=f"'{fitting[0].uuid}' is in it twice")
        places.extend(fitting)
    return listing


def visible_cards(
    cards: Sequence[CardIdentity], environment: Mapping[str, str] | None = None
) -> tuple[CardIdentity, ...]:
    """Return the cards that CUDA shows, in its order: `cuda:0` first. `cards` are all, in the driver's order.

    `environment` is this process's where it is not given; CUDA reads it once, when it is first used.

    Raises:
        NvmlUnavailableError: only CUDA itself knows: cards are counted that differ, so that CUDA counts from the
            fastest on, or that the driver can't open; or a card is divided and its instance is not named.
    """
    variables = os.environ if environment is None else environment
    text = variables.get(VISIBLE)
    everything = tuple(str(card.index) for card in cards if card.index is not None)
    entries = everything if text is None else check_listing(read_listing(text), cards).entries
    if not entries:
        return ()
    chosen = tuple(_fitting(entry, cards)[0] for entry in entries)
    if _number(entries[0]):
        _check_counting(cards, variables.get(ORDER))
    elif any(card.mig_enabled for card in chosen):
        raise NvmlUnavailableError(_DIVIDED)
    if len(chosen) > 1 and chosen[0].parent_uuid is not None:
        raise NvmlUnavailableError(f"{VISIBLE} names several MIG instances, of which most drivers show the first only")
    return chosen


def _number(entry: str) -> str:
    """Return the number that an entry begins with, as CUDA reads it ("1gpu2" is 1); empty where it begins with none."""
    number = _NUMBER.match(entry.strip())
    return str(int(number.group())) if number and int(number.group()) >= 0 else ""


def _fitting(entry: str, cards: Sequence[CardIdentity]) -> list[CardIdentity]:
    """Return the cards that an entry stands for; a number counts them in the driver's order."""
    if _number(entry):
        return [card for card in cards if card.index is not None and str(card.index) == _number(entry)]
    return matching(entry, cards)


def _check_counting(cards: Sequence[CardIdentity], order: str | None) -> None:
    """Raise unless CUDA counts the cards as the driver does; equal cards are taken to stay in the order of the bus."""
    if any(card.unreadable for card in cards):
        raise NvmlUnavailableError("the driver can't open a card, and whether CUDA counts it is not known")
    if any(card.mig_enabled for card in cards):
        raise NvmlUnavailableError(_DIVIDED)
    if order != "PCI_BUS_ID" and len({card.name for card in cards if card.index is not None}) > 1:
        raise NvmlUnavailableError(
            f"the cards differ, and CUDA counts them from the fastest on; with {ORDER}=PCI_BUS_ID it counts as the "
            "driver does"
        )
