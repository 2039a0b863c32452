"""What the NVIDIA driver says of itself and of each card, asked in a process of its own: a broken driver hangs."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from typing import Any

from effcli.measure.doctor_record import Check
from effcli.nvml.answers import Answer, CardIdentity, CardReading
from effcli.nvml.failures import NO_PACKAGE, OLD_PACKAGE, NvmlReturn, NvmlUnavailableError, code_of
from effcli.nvml.hardware import has_nvidia_card
from effcli.nvml.session import NvmlSession, cards, find_card
from effcli.packages import installed_version
from effcli.pipeline.doctoring.asking import Reply
from effcli.pipeline.doctoring.findings import Checks, note, ok, problem
from effcli.pipeline.doctoring.installed import pip_install
from effcli.units import count

REMEDY = (
    "look at what nvidia-smi says; install the NVIDIA driver, or reboot after an update of it; start a container with "
    "--gpus all"
)

_NOTHING_THERE = frozenset({NvmlReturn.DRIVER_NOT_LOADED, NvmlReturn.LIBRARY_NOT_FOUND, NvmlReturn.GPU_NOT_FOUND})


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverCard:
    """A card or MIG instance as the driver sees it, with its memory, or why that cannot be read."""

    identity: CardIdentity
    reading: CardReading


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverFacts:
    """The driver's versions and cards; `reason` says why there are none, `code` is NVML's number for it.

    A divided card stands before its MIG instances.
    """

    driver: str | None = None
    nvml: str | None = None
    cuda: str | None = None
    cards: tuple[DriverCard, ...] = ()
    reason: str = ""
    code: int | None = None

    @property
    def usable_cards(self) -> tuple[DriverCard, ...]:
        """Return cards and MIG instances on which something could run."""
        return tuple(card for card in self.cards if card.identity.uuid and not card.identity.mig_enabled)

    @property
    def identities(self) -> tuple[CardIdentity, ...]:
        """Return all cards and MIG instances that have an identifier."""
        return tuple(card.identity for card in self.cards if card.identity.uuid)


def ask_driver() -> dict[str, Any]:
    """Return `DriverFacts` as values that JSON has."""
    try:
        session = NvmlSession.open()
    except NvmlUnavailableError as error:
        code = code_of(error.__cause__) if isinstance(error.__cause__, Exception) else None
        return asdict(DriverFacts(reason=error.reason, code=code))
    with session:
        return asdict(_opened(session))


def _opened(session: NvmlSession) -> DriverFacts:
    reason = ""
    try:
        found = tuple(DriverCard(identity=card, reading=_reading(session, card)) for card in cards(session))
    except NvmlUnavailableError as error:
        found, reason = (), error.reason
    return DriverFacts(
        driver=session.driver_version,
        nvml=session.nvml_version,
        cuda=session.cuda_version,
        cards=found,
        reason=reason,
    )


def _reading(session: NvmlSession, card: CardIdentity) -> CardReading:
    """Return a card's memory; nothing runs on the whole of a divided card, so that its own is not asked for."""
    reason = card.unreadable or ("divided into MIG instances" if card.mig_enabled else None)
    if reason is None:
        try:
            return find_card(session, (card.uuid,)).read(os.getpid())
        except NvmlUnavailableError as error:
            reason = error.reason
    unknown = Answer(reason=reason)
    return CardReading(total=unknown, used=unknown, driver_reserved=unknown, process=unknown)


def driver_facts(reply: Reply) -> DriverFacts:
    """Return what the driver's process answered; when it did not, that as the reason."""
    if reply.answer is None:
        return DriverFacts(reason=f"the NVIDIA driver could not be asked: {reply.failure}")
    answer = dict(reply.answer)
    found = tuple(
        DriverCard(
            identity=_identity(card["identity"]),
            reading=CardReading(**{part: Answer(**said) for part, said in card["reading"].items()}),
        )
        for card in answer.pop("cards")
    )
    return DriverFacts(**answer, cards=found)


def _identity(said: dict[str, Any]) -> CardIdentity:
    """Return an identity that came as JSON, which has no tuples."""
    instance = said["instance"]
    return CardIdentity(**{**said, "instance": tuple(instance) if instance else None})


def check_driver(facts: DriverFacts) -> Checks:
    """Return the line about the driver: its versions, or why it does not answer."""
    if facts.reason:
        return (_not_answering(facts),)
    versions = [f"NVIDIA {facts.driver or 'n/a'}"]
    versions += [f"CUDA up to {facts.cuda}"] if facts.cuda else []
    versions += [f"NVML {facts.nvml}"] if facts.nvml else []
    whole = [card for card in facts.cards if card.identity.parent_uuid is None]
    instances = len(facts.cards) - len(whole)
    held = count(len(whole), "card") + (f" with {count(instances, 'MIG instance')}" if instances else "")
    text = f"{', '.join(versions)}: {held}"
    if facts.cards:
        return (ok("driver", text),)
    return (problem("driver", text, REMEDY) if has_nvidia_card() else note("driver", text),)


def _not_answering(facts: DriverFacts) -> Check:
    if facts.reason in (NO_PACKAGE, OLD_PACKAGE):
        why, _, _ = facts.reason.partition("; pip ")
        broken = why if installed_version("nvidia-ml-py") is None else f"{why}, or damaged"
        return problem("driver", f"n/a: {broken}", f"{pip_install('nvidia-ml-py')} --force-reinstall")
    if facts.code in _NOTHING_THERE and not has_nvidia_card():
        return note("driver", f"n/a: {facts.reason}; this machine shows no NVIDIA card")
    return problem("driver", f"n/a: {facts.reason}", REMEDY)
