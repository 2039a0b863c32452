"""Names of devices: which of the driver's cards a name from `CUDA_VISIBLE_DEVICES` or from torch stands for."""

from __future__ import annotations

from collections.abc import Sequence

from effcli.nvml.answers import CardIdentity
from effcli.units import cut


def readable(text: str) -> str:
    """Return a text of a driver or of a variable as one printable line of at most 96 characters, like NVML's names."""
    return cut("".join(letter if letter.isprintable() else "?" for letter in text).strip(), 96)


def matching(name: str, cards: Sequence[CardIdentity]) -> list[CardIdentity]:
    """Return the devices that a name stands for: one where it is good, none where unknown, several where ambiguous.

    A name is an identifier (`GPU-...`, `MIG-...`), the beginning of one with its prefix, or that of a MIG instance as
    drivers before 470 wrote it: `MIG-GPU-<identifier of the card>/<GPU instance>/<compute instance>`.
    """
    if not name.startswith(("GPU-", "MIG-")):
        return []
    exact = [card for card in cards if card.uuid == name]
    if exact:
        return exact[:1]
    parent, instance = _older_form(name)
    if instance is not None:
        return [card for card in cards if (card.parent_uuid, card.instance) == (parent, instance)]
    return [card for card in cards if card.uuid.startswith(name)]


def _older_form(name: str) -> tuple[str, tuple[int, int] | None]:
    """Return the card's identifier and the two ids of a name in the older form, or None for the ids."""
    parent, *ids = name.removeprefix("MIG-").split("/")
    if not parent.startswith("GPU-") or len(ids) != 2 or not all(part.isdecimal() for part in ids):
        return parent, None
    return parent, (int(ids[0]), int(ids[1]))
