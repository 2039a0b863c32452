"""One run of the history: what it was, and pairs of predicted and measured bytes."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from effcli.facts import Fact

SCHEMA_VERSION = 1

_Bytes = Annotated[int, Field(strict=True, ge=0, lt=2**63)]
_Date = Annotated[str, Field(pattern=r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d")]


class Pair(Fact):
    """An amount in bytes as predicted and as measured; None where that side is missing."""

    predicted_bytes: _Bytes | None = None
    measured_bytes: _Bytes | None = None

    @property
    def error(self) -> float | None:
        """Return predicted less measured, as a share of measured; None where either is missing or nothing was measured.

        It is positive where too much was predicted.
        """
        if self.predicted_bytes is None or not self.measured_bytes:
            return None
        return (self.predicted_bytes - self.measured_bytes) / self.measured_bytes


class HistoryEntry(Fact):
    """One run. `card` is the device as torch names it, None on a CPU; `date` is in ISO 8601 with the time zone.

    `status` says how the run ended. `pairs` have the names `optimizer_state`, `peak_allocated`, `peak_reserved`,
    `context` and `process`, as far as they were measured. `context_how` says how the context was measured where that
    was second best, or what else is in it; nothing is learnt of it then. Amounts of a run of several processes are
    those of its rank 0; `batch` has how many there were, and how they shared the model.
    """

    schema_version: int = SCHEMA_VERSION
    date: _Date
    effcli: str
    status: str = "completed"
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
