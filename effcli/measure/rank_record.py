"""What the processes of one run hold, each for itself: predicted and measured. Bytes are integers."""

from __future__ import annotations

from effcli.facts import Fact
from effcli.spec import Shard


class DistributionFacts(Fact):
    """How a run is spread over processes; None in a record of one process.

    Amounts of such a record outside `per_rank` are those of rank 0, which has no fewer elements than another. Another
    may still hold more: where its shares are too small for 8-bit state.
    """

    world_size: int
    shard: Shard


class RankAmounts(Fact):
    """What one process is predicted to hold before activations.

    `communication_bytes` are what it holds at most, beside its share, to exchange with others: parameters that are
    gathered for use, and buckets. `total_before_activations_bytes` is the sum of all four.
    """

    rank: int
    weights_bytes: int
    gradients_bytes: int
    optimizer_state_bytes: int
    optimizer_state_elements: int
    communication_bytes: int
    total_before_activations_bytes: int


class ModeAmounts(Fact):
    """What the fullest process holds where a run is spread in one of the modes, with one optimizer."""

    shard: Shard
    optimizer: str
    fullest: RankAmounts


class RankMeasured(Fact):
    """What one process really took, read as all were about to save the last checkpoint; see `Measured` for each amount.

    Amounts of rank 0 are those of the end of the run. Where the run made another update after that checkpoint and then
    failed, there are none of any rank.
    """

    rank: int
    device: str
    weights_bytes: int | None
    gradients_bytes: int | None
    optimizer_state_bytes: int
    optimizer_state_elements: int
    peak_allocated_bytes: int | None
    peak_rss_bytes: int
