"""`SearchRecord`: what a search for settings that fit found. Bytes are integers."""

from __future__ import annotations

from effcli.facts import Fact
from effcli.measure.estimate_record import GpuFacts
from effcli.measure.record import SCHEMA_VERSION, BatchFacts, ModelFacts
from effcli.spec import Shard
from effcli.units import Basis


class Configuration(Fact):
    """Settings of a run and what they take; `flags` is what to type after `effcli train MODEL`, `command` all of it.

    `spare_bytes` is what the card has left, the margin included; negative where it does not suffice. With several cards
    amounts are those of rank 0's, where no fewer elements lie than on another, and `batch.micro` and `batch.accum` are
    those of each.
    """

    optimizer: str
    precision: str
    batch: BatchFacts
    gradient_checkpointing: bool
    shard: Shard = "ddp"
    weights_bytes: int
    gradients_bytes: int
    optimizer_state_bytes: int
    peak_allocated_bytes: int
    peak_phase: str
    device_total_bytes: int
    spare_bytes: int
    flags: str
    command: str


class Way(Fact):
    """A change that was not asked for and would make the closest configuration fit."""

    flags: str
    device_total_bytes: int


class SearchRecord(Fact):
    """Configurations that fit, the fastest by assumption first.

    `allowed_bytes` is what the card has less the margin. `closest` is the configuration that takes least, and
    `ways_out` what would make it fit, where none does. `recipe` is the file that the chosen one was written to.
    `context_bytes` are in every need, and `context_source` says what they were learnt from where they were.
    """

    schema_version: int = SCHEMA_VERSION
    command: str = "plan"
    model: ModelFacts
    gpu: GpuFacts
    gpus: int = 1
    margin_percent: float
    allowed_bytes: int
    effective_batch: int
    max_length: int | None
    max_target_length: int | None = None
    tried: dict[str, tuple[str, ...]]
    num_predictions: int
    context_bytes: int | None = None
    context_basis: str = Basis.ASSUMED
    context_source: str | None = None
    assumed: tuple[str, ...]
    configurations: tuple[Configuration, ...]
    closest: Configuration | None = None
    ways_out: tuple[Way, ...] = ()
    chosen: int | None = None
    recipe: str | None = None
    notes: tuple[str, ...] = ()
