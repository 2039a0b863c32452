"""One run of the history: what it was, and pairs of predicted and measured bytes."""

from __future__ import annotations

from pydantic import Field

from effcli.facts import Fact


class Pair(Fact):
    """An amount in bytes as predicted and as measured; None where that side is missing."""

    predicted_bytes: int | None = None
    measured_bytes: int | None = None


class HistoryEntry(Fact):
    """One run. `card` is the device as torch names it, None on a CPU; `date` is in ISO 8601 with the time zone.

    `pairs` have the names `optimizer_state`, `peak_allocated`, `peak_reserved`, `context` and `process`, as far as they
    were measured. `context_how` says how the context was measured where that was second best; nothing is learnt of it.
    """

    schema_version: int = 1
    date: str
    effcli: str
    device: str
    card: str | None = None
    driver_version: str | None = None
    torch: str | None = None
    model: str
    optimizer: str
    engine: str
    precision: str
    batch: str
    pairs: dict[str, Pair] = Field(default_factory=dict)
    context_how: str | None = None
