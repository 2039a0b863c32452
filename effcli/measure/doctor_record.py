"""`DoctorRecord`: what works on this machine, check by check."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from effcli.facts import Fact
from effcli.measure.device_record import Amount

CheckStatus = Literal["ok", "note", "problem"]
"""`note`: nothing is broken, but something is not there, such as a GPU or a network."""


class Check(Fact):
    """One line: what was looked at, how it is, and how to mend it where it is not well (empty where it is)."""

    name: str
    status: CheckStatus
    text: str
    remedy: str = ""


class CardFacts(Fact):
    """One card, or MIG instance, as driver and torch see it. `device` is torch's name for it, None where it is hidden.

    `by_others` is what other processes hold. `capability` is CUDA's compute capability, such as "9.0".
    """

    name: str | None
    uuid: str | None
    device: str | None
    capability: str | None = None
    total: Amount = Amount()
    free: Amount = Amount()
    by_others: Amount = Amount()


class DoctorRecord(Fact):
    """All checks, the cards, and whether the device that was asked for works (None where none was)."""

    schema_version: int = 1
    command: str = "doctor"
    versions: dict[str, str | None] = Field(default_factory=dict)
    requested_device: str | None = None
    device_works: bool | None = None
    checks: tuple[Check, ...] = ()
    cards: tuple[CardFacts, ...] = ()
