"""`DoctorRecord`: what works on this machine, check by check."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from effcli.facts import Fact

CheckStatus = Literal["ok", "note", "problem"]
"""`note`: nothing is broken, but something is not there, such as a GPU or a network."""


class Check(Fact):
    """One line: what was looked at, how it is, and how to mend it where it is not well (empty where it is)."""

    name: str
    status: CheckStatus
    text: str
    remedy: str = ""


class Reading(Fact):
    """Bytes of a card, or None and the `reason`; `how` says where they come from if not straight from the driver."""

    num_bytes: int | None = None
    reason: str | None = None
    how: str | None = None


class CardFacts(Fact):
    """One card, or MIG instance of the card `parent_uuid`, as driver and torch see it.

    `device` is torch's name for it, None where torch does not see it. On a `divided` card only its MIG instances can
    be used. `capability` is CUDA's compute capability, such as "9.0"; it, `bf16` and `unified` (memory shared with the
    machine) are None where torch does not say. `by_others` is what other processes hold. `unreadable` says why a card
    cannot be asked.
    """

    name: str | None
    uuid: str | None
    parent_uuid: str | None = None
    divided: bool = False
    device: str | None
    capability: str | None = None
    bf16: bool | None = None
    unified: bool | None = None
    total: Reading = Reading()
    free: Reading = Reading()
    by_others: Reading = Reading()
    unreadable: str | None = None


class DoctorRecord(Fact):
    """All checks, the cards, and whether the device that was asked for works (both None where none was).

    `device` is the one on which a training step was made, None where none succeeded. `optimizers` says of each 8-bit
    optimizer that was tried whether it made a step there, or on a CPU where that device is not there.
    """

    schema_version: int = 1
    command: str = "doctor"
    versions: dict[str, str | None] = Field(default_factory=dict)
    requested_device: str | None = None
    device_works: bool | None = None
    device: str | None = None
    optimizers: dict[str, bool] = Field(default_factory=dict)
    checks: tuple[Check, ...] = ()
    cards: tuple[CardFacts, ...] = ()

    @property
    def problems(self) -> tuple[Check, ...]:
        """Return the checks that found something broken."""
        return tuple(check for check in self.checks if check.status == "problem")
