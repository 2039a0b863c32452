"""The cards, each as the driver and as torch knows it, matched by their identifiers and never by a number."""

from __future__ import annotations

import os
from collections.abc import Sequence

from effcli.measure.doctor_record import CardFacts, Check, Reading
from effcli.nvml.answers import Answer, CardReading
from effcli.nvml.visible import VISIBLE
from effcli.pipeline.doctoring.driver import DriverCard, DriverFacts
from effcli.pipeline.doctoring.findings import Checks, note, ok, problem
from effcli.pipeline.doctoring.torch_check import TorchDevice, TorchFacts, hides_all
from effcli.units import format_bytes

WITH_DRIVERS = "with what the driver keeps for itself"
_SHORT = 12
"""Characters of an identifier, its prefix included."""


def known_cards(driver: DriverFacts, torch: TorchFacts, named: Sequence[str]) -> tuple[CardFacts, ...]:
    """Return the driver's cards in its order, each with torch's device, then devices that only torch knows.

    `named` are the identifiers of the MIG instances that CUDA_VISIBLE_DEVICES names.
    """
    left = list(torch.devices)
    known = []
    for card in driver.cards:
        device = next((one for one in left if _is_same(one, card, driver, named)), None)
        if device is not None:
            left.remove(device)
        known.append(_facts(card, device))
    return (*known, *(_only_torchs(device, driver) for device in left))


def _is_same(device: TorchDevice, card: DriverCard, driver: DriverFacts, named: Sequence[str]) -> bool:
    """Return whether torch's device is a card or MIG instance; nothing runs on the whole of a divided card.

    CUDA before 12 gives a MIG instance the identifier of its card. A process has one instance at most: the one that
    CUDA_VISIBLE_DEVICES names, else the first.
    """
    identity = card.identity
    if device.uuid is None or identity.mig_enabled:
        return False
    if identity.parent_uuid is None or _bare(identity.uuid) == _bare(device.uuid):
        return _bare(identity.uuid) == _bare(device.uuid)
    instances = [one.identity.uuid for one in driver.cards if one.identity.parent_uuid == identity.parent_uuid]
    chosen = next((uuid for uuid in named if uuid in instances), instances[0])
    return _bare(identity.parent_uuid) == _bare(device.uuid) and identity.uuid == chosen


def _bare(uuid: str) -> str:
    return uuid.lower().removeprefix("gpu-").removeprefix("mig-")


def _facts(card: DriverCard, device: TorchDevice | None) -> CardFacts:
    identity, reading = card.identity, card.reading
    return CardFacts(
        name=identity.name,
        uuid=identity.uuid or None,
        parent_uuid=identity.parent_uuid,
        divided=identity.mig_enabled,
        device=f"cuda:{device.index}" if device else None,
        capability=device.capability if device else None,
        bf16=device.bf16 if device else None,
        unified=device.unified if device else None,
        total=_known(reading.total),
        free=_known(_free(reading.total, reading.used, reading.driver_reserved)),
        by_others=_by_others(reading),
        unreadable=identity.unreadable,
    )


def _only_torchs(device: TorchDevice, driver: DriverFacts) -> CardFacts:
    """Return a device that the driver does not list; its memory is as torch says, what is free stays unknown."""
    reason = driver.reason or "the driver does not list this device"
    total = Reading(num_bytes=device.total_bytes, how="as torch says")
    return CardFacts(
        name=device.name,
        uuid=device.uuid,
        device=f"cuda:{device.index}",
        capability=device.capability,
        bf16=device.bf16,
        unified=device.unified,
        total=total if device.total_bytes is not None else Reading(reason=device.failure or reason),
        free=Reading(reason=reason),
        by_others=Reading(reason=reason),
        unreadable=device.failure or None,
    )


def _by_others(reading: CardReading) -> Reading:
    """Return all that is in use: whoever asked holds nothing of it."""
    used = _known(reading.used)
    apart = reading.driver_reserved.num_bytes is not None or used.num_bytes is None
    return used if apart else used.model_copy(update={"how": WITH_DRIVERS})


def _known(answer: Answer) -> Reading:
    return Reading(num_bytes=answer.num_bytes, reason=answer.reason)


def _free(total: Answer, used: Answer, kept: Answer) -> Answer:
    """Return what nobody holds; what the driver keeps is part of `used` where it does not tell it apart."""
    if total.num_bytes is None or used.num_bytes is None:
        return Answer(reason=total.reason or used.reason)
    return Answer(num_bytes=max(0, total.num_bytes - used.num_bytes - (kept.num_bytes or 0)))


def check_cards(cards: Sequence[CardFacts], driver: DriverFacts) -> Checks:
    """Return a line about each card and MIG instance."""
    torch_sees = any(card.device for card in cards)
    hidden = VISIBLE in os.environ and (torch_sees or hides_all(driver))
    parents = {card.parent_uuid for card in cards}
    return tuple(
        _divided(card, card.uuid in parents)
        if card.divided and not card.unreadable
        else _check(card, torch_sees=torch_sees, hidden=hidden)
        for card in cards
    )


def _divided(card: CardFacts, has_instances: bool) -> Check:
    what = f"{card.name or 'a card without a name'} {_where(card, hidden=False)}: divided"
    if has_instances:
        return ok("card", f"{what} into MIG instances, on which runs go")
    return note(
        "card", f"{what}, but shows no MIG instance to run on", "nvidia-smi mig -lgi lists them, -cgi makes one"
    )


def _check(card: CardFacts, *, torch_sees: bool, hidden: bool) -> Check:
    """Return the line about a card; `torch_sees` says that torch sees any, `hidden` that a variable hides the rest."""
    what = f"{card.name or 'a card without a name'} {_where(card, hidden)}"
    if card.unreadable:
        return problem("card", f"{what}: n/a: {card.unreadable}", "look at what nvidia-smi says")
    text = f"{what}: {', '.join([_memory(card), *_abilities(card)])}"
    if card.device is None and hidden:
        return note("card", text)
    if card.device is None and torch_sees:
        return note("card", f"{text}; torch does not see it")
    return ok("card", text) if card.total.num_bytes is not None else note("card", text)


def _where(card: CardFacts, hidden: bool) -> str:
    device = card.device or (f"hidden by {VISIBLE}" if hidden else "")
    return f"({', '.join(filter(None, (device, short(card.uuid))))})"


def short(uuid: str | None) -> str:
    """Return the beginning of an identifier, which tells cards apart in practice."""
    return uuid[:_SHORT] if uuid else "without an identifier"


def _memory(card: CardFacts) -> str:
    total, free, others = card.total.num_bytes, card.free.num_bytes, card.by_others.num_bytes
    shared = " unified with the machine's" if card.unified else ""
    if total is None:
        return f"memory{shared} n/a: {card.total.reason}"
    if free is None or others is None:
        return f"{format_bytes(total)}{shared}, what is free n/a: {card.free.reason}"
    driver = " and the driver" if card.by_others.how == WITH_DRIVERS else ""
    return f"{format_bytes(total)}{shared}, {format_bytes(free)} free, {format_bytes(others)} used by others{driver}"


def _abilities(card: CardFacts) -> list[str]:
    known = [f"compute capability {card.capability}"] if card.capability else []
    return known if card.bf16 is None else [*known, "bf16" if card.bf16 else "no bf16"]
