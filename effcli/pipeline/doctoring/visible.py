"""What `CUDA_VISIBLE_DEVICES` and `CUDA_DEVICE_ORDER` say, and what CUDA makes of it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

from effcli.measure.doctor_record import CardFacts, Check
from effcli.nvml.names import matching, readable
from effcli.nvml.visible import ORDER, VISIBLE, check_listing, read_listing
from effcli.pipeline.doctoring.cards import short
from effcli.pipeline.doctoring.driver import DriverFacts
from effcli.pipeline.doctoring.findings import Checks, note, ok, problem
from effcli.units import listed


def named_identifiers(driver: DriverFacts) -> tuple[str, ...]:
    """Return the identifiers of those cards and MIG instances that CUDA_VISIBLE_DEVICES names by identifier."""
    fitting = (matching(name, driver.identities) for name in read_listing(os.environ.get(VISIBLE, "")).entries)
    return tuple(cards[0].uuid for cards in fitting if len(cards) == 1)


def check_visible(cards: Sequence[CardFacts], driver: DriverFacts) -> Checks:
    """Return a line about each of the two variables that is set."""
    return (*_visible(cards, driver), *_order())


def _visible(cards: Sequence[CardFacts], driver: DriverFacts) -> Iterator[Check]:
    given = os.environ.get(VISIBLE)
    if given is None:
        return
    text, listing = f"{VISIBLE}={readable(given)}", read_listing(given)
    if given.strip() in ("", "-1"):
        yield note("visible", f"{text} hides all cards", f"unset {VISIBLE}")
        return
    if not driver.reason:
        listing = check_listing(listing, driver.identities)
    shown = [f"{card.device} is {card.name} ({short(card.uuid)})" for card in cards if card.device]
    seen = listed(sorted(shown), None) if shown else "torch sees no card"
    if listing.stopped is None:
        yield ok("visible", f"{text}: {seen}")
    else:
        remedy = f"export {VISIBLE}=IDENTIFIER (nvidia-smi -L lists them)"
        yield problem("visible", f"{text}: {listing.stopped}; {seen}", remedy)


def _order() -> Iterator[Check]:
    order = os.environ.get(ORDER)
    if order is not None:
        how = "numbers cards as nvidia-smi does" if order == "PCI_BUS_ID" else "has CUDA number them, the fastest first"
        yield ok("visible", f"{ORDER}={readable(order)} {how}")
