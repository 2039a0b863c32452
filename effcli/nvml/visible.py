"""Which cards CUDA_VISIBLE_DEVICES makes visible, and in which order: by its text alone, or beside the driver's cards.

The rules are those of CUDA's programming guide (environment variables) and, where it is silent, those of
torch 2.13 (`torch.cuda._parse_visible_devices`): the first entry decides whether all are numbers, `GPU-` or `MIG-`
identifiers; CUDA stops at the first entry that is no such device; a device that is named twice leaves none.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from effcli.nvml.answers import CardIdentity
from effcli.nvml.names import matching, readable

VISIBLE = "CUDA_VISIBLE_DEVICES"
ORDER = "CUDA_DEVICE_ORDER"

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
            return Listing(stopped=f"'{readable(entry)}' is named twice")
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
            return Listing(stopped=f"'{fitting[0].uuid}' is named twice")
        places.extend(fitting)
    return listing


def _number(entry: str) -> str:
    """Return the number that an entry begins with, as CUDA reads it ("1gpu2" is 1); empty where it begins with none."""
    number = _NUMBER.match(entry.strip())
    return str(int(number.group())) if number and int(number.group()) >= 0 else ""


def _fitting(entry: str, cards: Sequence[CardIdentity]) -> list[CardIdentity]:
    """Return the cards that an entry of a listing stands for; a number counts them in the driver's order."""
    if entry.isdecimal():
        return [card for card in cards if card.index == int(entry)]
    return matching(entry, cards)
