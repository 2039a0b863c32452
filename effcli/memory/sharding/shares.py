"""What each of several processes holds, by the way a run is sharded. No torch."""

from __future__ import annotations

from collections.abc import Sequence

from effcli.memory.sharding.fully_sharded import fully_sharded_shares
from effcli.memory.sharding.share import Sharding, Share
from effcli.units import ParamInfo


def shares(parameters: Sequence[ParamInfo], sharding: Sharding, precision: str = "fp32") -> tuple[Share, ...]:
    """Return what each rank holds, in their order; `parameters` are the whole model's, a tied one listed once.

    `precision` matters to the modes of DeepSpeed, which cast the model itself.

    Raises:
        UsageError: a parameter cannot be sharded so.
    """
    if not sharding.has_many or sharding.shard == "ddp":
        return _replicated(parameters, sharding.world_size)
    if sharding.shard == "fsdp":
        return fully_sharded_shares(parameters, sharding.world_size)
    from effcli.memory.sharding.zero import zero_shares

    return zero_shares(parameters, sharding, precision)


def _replicated(parameters: Sequence[ParamInfo], world_size: int) -> tuple[Share, ...]:
    """Return whole models: `DistributedDataParallel` keeps all of it on each rank.

    Gradients are views into the buckets that are reduced (`gradient_as_bucket_view=True`), so the buckets add nothing:
    they are the gradients, and live as long as the model does (torch 2.13, `torch/nn/parallel/distributed.py` and
    `torch/csrc/distributed/c10d/reducer.cpp`). A bucket is one all-reduce of up to 25 MiB, the first of up to 1 MiB.
    """
    whole = tuple(parameters)
    weights_bytes = sum(info.num_bytes for info in whole)
    gradients_bytes = sum(info.num_bytes for info in whole if info.trainable)
    return tuple(
        Share(
            rank=rank,
            parameters=whole,
            weights_bytes=weights_bytes,
            gradients_bytes=gradients_bytes,
            communication_bytes=0,
        )
        for rank in range(world_size)
    )
