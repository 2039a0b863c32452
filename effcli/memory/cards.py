"""GPU cards by name, and budgets of memory as people write them. No torch.

`cards.json` has one card a line. `usable_bytes` is what a process can be given, as CUDA reports it on Linux
(`torch.cuda.get_device_properties().total_memory`), or as nvidia-smi does where its `reading` says so; that is less
than what is sold, because the driver keeps some and error correction takes a sixteenth of GDDR memory. It differs by
some tens of MiB between driver versions. A card without a public reading has what is sold.
"""

from __future__ import annotations

import difflib
import json
import re
from dataclasses import dataclass
from decimal import Decimal
from functools import cache
from importlib import resources
from typing import Any

from effcli.errors import UsageError
from effcli.units import GIB, KIB, MIB, listed

CARDS = "cards.json"

CONTEXT_BYTES = 504_658_657
"""What a process holds on the device beside the allocator: driver state and loaded kernels.

Assumed for every card, unless `effcli.history.context` has learnt it from runs.

0.47 GiB is the figure for torch 2.1 with CUDA 12.1 on an A100 (stas00/ml-engineering, training/performance). Near it
are 426 MiB for torch 2.10 with CUDA 13.0 on an RTX 6000 Ada (unslothai/unsloth-zoo, pull request 1053) and "around
400 MB" (pytorch, issue 109888). All load kernels when they are first used, as torch does by default since 1.13; the
gigabyte and more that older versions took no longer applies.
"""

UNIT_BYTES = {
    "b": 1,
    "kb": 1000,
    "mb": 1000**2,
    "gb": 1000**3,
    "tb": 1000**4,
    "kib": KIB,
    "mib": MIB,
    "gib": GIB,
    "tib": 1024 * GIB,
}
"""Bytes of a unit: decimal without an i, binary with one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """One GPU card; `usable_bytes` is `nominal_bytes` where `source` is None.

    `capability` is the compute capability. From (8, 0) on a card computes in bf16 and has kernels of flash attention
    in torch; (9, 0), which is Hopper, has cuBLAS workspaces of 32 MiB for 8.125 MiB elsewhere
    (`parseChosenWorkspaceSize` in aten/src/ATen/cuda/CublasHandlePool.cpp).
    """

    key: str
    name: str
    also: tuple[str, ...]
    nominal_bytes: int
    usable_bytes: int
    capability: tuple[int, int]
    reading: str | None
    source: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """How much device memory there is; `card` is None where an amount was given."""

    num_bytes: int
    card: Card | None


@cache
def cards() -> tuple[Card, ...]:
    """Return all cards, the older architectures first."""
    text = resources.files(__package__).joinpath(CARDS).read_text(encoding="utf-8")
    return tuple(_card(key, facts) for key, facts in json.loads(text).items())


def matching_cards(pattern: str | None) -> tuple[Card, ...]:
    """Return the cards whose key or name contains `pattern`, whatever the case; all of them without one.

    Raises:
        UsageError: there is none.
    """
    wanted = (pattern or "").strip().lower()
    found = tuple(card for card in cards() if wanted in card.key or wanted in card.name.lower())
    return found or (find_card(wanted),)


def find_card(text: str) -> Card:
    """Return the card that is meant by its key, by its name as torch prints it, or by a shorter form such as `4090`.

    Raises:
        UsageError: no card is called so, or several are.
    """
    wanted, found = _compact(text), cards_called(text)
    if len(found) == 1:
        return found[0]
    if found:
        keys = listed([card.key for card in found], None, last="or")
        raise UsageError(f"several cards are called '{text}'; write {keys}")
    close = difflib.get_close_matches(wanted, _by_form())
    near = list(dict.fromkeys(card.key for form in close for card in _by_form()[form]))[:3]
    meant = f" Did you mean {listed(near, last='or')}?" if near else ""
    raise UsageError(f"no card '{text}' is known.{meant} `effcli gpus` lists all; or write an amount such as 24GiB")


def cards_called(text: str) -> tuple[Card, ...]:
    """Return the cards that a key or a name can mean, as in `find_card`; none where no card is called so."""
    return _by_form().get(_compact(text), ())


def parse_budget(text: str) -> Budget:
    """Return the memory that is meant by an amount (`16GiB`, `16 GB`, `24576MiB`) or by the name of a card.

    `GiB` is 1024^3 bytes and `GB` is 1000^3; the case of letters makes no difference.

    Raises:
        UsageError: it is neither, or an amount without a clear unit.
    """
    amount = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", text.strip().lower())
    if amount is None or _compact(text) in _by_form():
        card = find_card(text)
        return Budget(num_bytes=card.usable_bytes, card=card)
    number, unit = amount.groups()
    if unit not in UNIT_BYTES:
        raise UsageError(
            f"memory '{text}' has no unit of bytes; write {number}GiB (1024^3 bytes each) or {number}GB (1000^3), "
            "or the name of a card such as rtx-4090"
        )
    num_bytes = int(Decimal(number) * UNIT_BYTES[unit])
    if num_bytes == 0:
        raise UsageError(f"memory '{text}' is no memory; write an amount such as 16GiB")
    return Budget(num_bytes=num_bytes, card=None)


def _card(key: str, facts: dict[str, Any]) -> Card:
    nominal_bytes = facts["nominal_gib"] * GIB
    major, minor = facts["capability"].split(".")
    return Card(
        key=key,
        name=facts["name"],
        also=tuple(facts.get("also", ())),
        nominal_bytes=nominal_bytes,
        usable_bytes=facts.get("usable_bytes", nominal_bytes),
        capability=(int(major), int(minor)),
        reading=facts.get("reading"),
        source=facts.get("source"),
    )


@cache
def _by_form() -> dict[str, tuple[Card, ...]]:
    """Return the cards by every form of their names; one without the size of the memory may mean several."""
    forms: dict[str, tuple[Card, ...]] = {}
    for card in cards():
        names = {card.key, card.name.lower(), *card.also}
        names = {_compact(name) for name in names | {re.sub(r"[ -]\d+gb$", "", name) for name in names}}
        for name in names | {re.sub(r"^[rg]tx", "", name) for name in names}:
            forms[name] = (*forms.get(name, ()), card)
    return forms


def _compact(name: str) -> str:
    """Return a name without what people leave out or write differently: `NVIDIA A100-SXM4-80GB` -> `a100sxm480gb`."""
    name = re.sub(r"nvidia|geforce|tesla|graphics|generation|gpu", "", name.lower()).replace("mobile", "laptop")
    return re.sub(r"(\d)g(ib)?$", r"\1gb", re.sub(r"[^a-z0-9]", "", name))
