"""What a driver answers: an amount, or the reason why there is none."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Bytes, or None and the `reason` in one line; 0 never stands for unknown. One of the two is None."""

    num_bytes: int | None = None
    reason: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CardReading:
    """One reading of a card's memory: all of it, what is in use, what the driver keeps, and what a process holds.

    `used` has no part of `driver_reserved` where the driver tells them apart; `process` is that of the process id
    that was asked for.
    """

    total: Answer
    used: Answer
    driver_reserved: Answer
    process: Answer


@dataclass(frozen=True, slots=True, kw_only=True)
class CardIdentity:
    """One card, or one MIG instance of a card (`parent_uuid` is then that of the card).

    `uuid` is the driver's, with its prefix (`GPU-`, `MIG-`). `index` is the driver's number, in the order of the PCI
    bus, which is not CUDA's; None for a MIG instance. `instance` are the ids of a MIG instance's GPU instance and
    compute instance, None where the driver does not tell. `unreadable` says why a card cannot be asked, None where it
    can; where the driver does not even give its identifier, `uuid` is empty.
    """

    uuid: str
    name: str | None
    index: int | None
    parent_uuid: str | None = None
    instance: tuple[int, int] | None = None
    mig_enabled: bool = False
    unreadable: str | None = None
