"""`EstimateRecord`: what one model takes with several optimizers, before any run. Bytes are integers."""

from __future__ import annotations

from effcli.facts import Fact
from effcli.measure.rank_record import DistributionFacts, ModeAmounts
from effcli.measure.record import SCHEMA_VERSION, BatchFacts, ModelFacts, OptimizerFacts
from effcli.memory.layers import PartAmount


class GpuFacts(Fact):
    """What `--gpu` gave: the bytes that there are and, where a card was named, the card and the source of its bytes."""

    asked: str
    name: str | None
    usable_bytes: int
    source: str | None


class PeakFacts(Fact):
    """What the peak was predicted for. `budget_bytes` is what `--budget` allows, None without it.

    `max_length` is None for models that read no text, `max_target_length` for all but seq2seq. `versions` are those of
    the packages whose code was traced: a plan differs with them.
    """

    device: str
    batch: BatchFacts
    max_length: int | None
    max_target_length: int | None = None
    gradient_checkpointing: bool
    attn: str | None
    max_grad_norm: float
    gpu: GpuFacts | None
    budget_bytes: int | None
    versions: dict[str, str]


class EstimateRecord(Fact):
    """One model with several optimizers, before any run: what they hold before activations, and the peak if asked for.

    `peak` is None, as is the plan of every optimizer, unless a setting was given that matters to the peak alone.
    `buffers_bytes` are tensors that are no parameters; `tied` the names under which a parameter occurs again. `layers`
    and `largest` are empty unless they were asked for. With several processes `modes` says for the first optimizer what
    each way to spread the run would come to.
    """

    schema_version: int = SCHEMA_VERSION
    command: str = "estimate"
    precision: str
    distribution: DistributionFacts | None = None
    model: ModelFacts
    buffers_bytes: int
    tied: tuple[str, ...]
    peak: PeakFacts | None = None
    optimizers: tuple[OptimizerFacts, ...]
    modes: tuple[ModeAmounts, ...] = ()
    layers: tuple[PartAmount, ...] = ()
    largest: tuple[PartAmount, ...] = ()
    notes: tuple[str, ...] = ()
