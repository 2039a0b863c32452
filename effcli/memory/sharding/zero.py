"""What each process holds under DeepSpeed's ZeRO: flat partitions of whole parameter groups. No torch.

Read from DeepSpeed 0.19.8, `deepspeed/runtime/zero/`: `stage_1_and_2.py`, `stage3.py`, `partition_parameters.py`,
`parameter_offload.py`, `partitioned_param_coordinator.py`, `config.py` (its defaults, which accelerate keeps where no
configuration file says `auto`). The idea is that of Rajbhandari et al. 2020, "ZeRO", arXiv 1910.02054, section 5.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate

from effcli.memory.sharding.share import Sharding, Share
from effcli.optim.groups import is_decayed
from effcli.units import DTYPE_BYTES, ParamInfo

REDUCE_BUCKET_ELEMENTS = 500_000_000
"""`reduce_bucket_size`: elements of the buffer for gradients on their way, allocated whole however small the model."""

PERSISTENT_ELEMENTS = 100_000
"""`stage3_param_persistence_threshold`: parameters up to this size stay gathered once they have been."""

MAX_LIVE_ELEMENTS = 1_000_000_000
"""`stage3_max_live_parameters` and `stage3_max_reuse_distance`: elements kept gathered, or fetched ahead, at most."""

SUB_GROUP_ELEMENTS = 1_000_000_000
"""`sub_group_size`: elements of a partition after which the next flat tensor begins, in stage 3."""

_START_ALIGNMENT = 2
"""`nccl_start_alignment_factor`: each rank's partition begins at a multiple of this many elements."""

_MASTER_DTYPE = "float32"


def zero_shares(parameters: Sequence[ParamInfo], sharding: Sharding, precision: str = "fp32") -> tuple[Share, ...]:
    """Return what each rank holds in stage 1, 2 or 3, in their order.

    `Share.parameters` are what the inner optimizer steps: one flat tensor of 32-bit numbers per parameter group
    (decayed weights, the rest), padding included, so a rule that asks for a tensor's size or dimensions sees the
    whole partition. DeepSpeed casts the model to the precision, and keeps a 32-bit copy of the partition even of a
    32-bit model. Left out is what only a step takes: see `step_bytes`.
    """
    width = _width(precision)
    if sharding.shard == "zero3":
        return _partitioned_weights(parameters, sharding.world_size, width)
    return _whole_weights(parameters, sharding, width)


def step_bytes(share: Share, sharding: Sharding, precision: str) -> int:
    """Return the bytes that a step takes beside the optimizer's own: the 32-bit gradient of one flat tensor after the
    other and, in stage 3, the buffer for gradients on their way, which is there all the time (`IPGBucketZ3`).
    """
    gradient = max(info.num_bytes for info in share.parameters) if share.parameters else 0
    bucket = REDUCE_BUCKET_ELEMENTS * _width(precision) if share.parameters and sharding.shard == "zero3" else 0
    return gradient + bucket


def _width(precision: str) -> int:
    """Return the bytes of an element of the model, which DeepSpeed casts."""
    return DTYPE_BYTES[_MASTER_DTYPE] if precision == "fp32" else DTYPE_BYTES["bfloat16"]


def _whole_weights(parameters: Sequence[ParamInfo], sharding: Sharding, width: int) -> tuple[Share, ...]:
    """Return the shares of stages 1 and 2, where weights are whole on every rank.

    The trainable ones of a group lie in one flat tensor, padded to a multiple of 2 x world; a rank's partition is an
    equal part of it. In stage 1 gradients are whole when they are complete, in stage 2 a rank keeps those of the
    parameters that its partition touches, each of them whole (`copy_grads_in_partition`).
    """
    world_size = sharding.world_size
    groups = _groups(parameters)
    sizes = [-(-_num_elements(group) // (_START_ALIGNMENT * world_size)) * _START_ALIGNMENT for _, group in groups]
    trainable = sum(_num_elements(group) for _, group in groups)
    frozen = sum(info.num_elements for info in parameters if not info.trainable)
    flat = _flat_tensors({key: [size] for (key, _), size in zip(groups, sizes, strict=True)})
    bucket = REDUCE_BUCKET_ELEMENTS * width if groups else 0
    in_flight = min(REDUCE_BUCKET_ELEMENTS, trainable) * width  # a bucket is flattened once more when it is reduced
    ends = [list(accumulate(info.num_elements for info in group)) for _, group in groups]
    return tuple(
        Share(
            rank=rank,
            parameters=flat,
            weights_bytes=(sum(sizes) * world_size + frozen) * width,
            gradients_bytes=width
            * (
                trainable
                if sharding.shard == "zero1"
                else sum(_touched(end, size, rank) for end, size in zip(ends, sizes, strict=True))
            ),
            communication_bytes=bucket + in_flight,
            master_bytes=sum(sizes) * DTYPE_BYTES[_MASTER_DTYPE],
        )
        for rank in range(world_size)
    )


def _touched(ends: Sequence[int], size: int, rank: int) -> int:
    """Return the elements of all parameters of which a part lies in a rank's partition of `size` elements.

    `ends` are where the parameters of the group end in the flat tensor.
    """
    start, end = size * rank, min(size * (rank + 1), ends[-1])
    if start >= end:
        return 0
    first, last = bisect_right(ends, start), bisect_right(ends, end - 1)
    return ends[last] - (ends[first - 1] if first else 0)


def _partitioned_weights(parameters: Sequence[ParamInfo], world_size: int, width: int) -> tuple[Share, ...]:
    """Return the shares of stage 3, which are the same on every rank: of each parameter ceil(elements / world).

    Frozen parameters are partitioned too. What is gathered at most: all that stays gathered (small parameters) and
    as much of the rest as may be live, or its largest parameter. That bounds it from above, since a parameter is
    released after its module unless it comes again within the reuse distance.
    """
    held = {id(info): -(-info.num_elements // world_size) for info in parameters}
    groups = _groups(parameters)
    sizes = {key: [sum(held[id(info)] for info in part) for part in _parts(group, held)] for key, group in groups}
    partition = sum(sum(parts) for parts in sizes.values())
    trainable = sum(_num_elements(group) for _, group in groups)
    persistent = sum(info.num_elements for info in parameters if info.num_elements <= PERSISTENT_ELEMENTS)
    released = [info.num_elements for info in parameters if info.num_elements > PERSISTENT_ELEMENTS]
    gathered = persistent + min(sum(released), max([MAX_LIVE_ELEMENTS, *released]))
    bucket = REDUCE_BUCKET_ELEMENTS + min(REDUCE_BUCKET_ELEMENTS, trainable) if groups else 0
    flat = _flat_tensors(sizes)
    return tuple(
        Share(
            rank=rank,
            parameters=flat,
            weights_bytes=sum(held.values()) * width,
            gradients_bytes=partition * width,
            communication_bytes=(gathered + bucket) * width,
            master_bytes=partition * DTYPE_BYTES[_MASTER_DTYPE],
        )
        for rank in range(world_size)
    )


def _parts(group: Sequence[ParamInfo], held: dict[int, int]) -> Iterable[list[ParamInfo]]:
    """Yield the parameters of each flat tensor: the next begins once one has `SUB_GROUP_ELEMENTS` on a rank."""
    part: list[ParamInfo] = []
    size = 0
    for info in group:
        part.append(info)
        size += held[id(info)]
        if size >= SUB_GROUP_ELEMENTS:
            yield part
            part, size = [], 0
    if part:
        yield part


def _groups(parameters: Sequence[ParamInfo]) -> list[tuple[str, list[ParamInfo]]]:
    """Return the parameter groups as names and dimensions tell them: decayed weights, then the rest; none is empty.

    Matrices that a normalisation module owns count as decayed here, and do not in `decay_groups`, which sees modules.
    """
    groups: dict[str, list[ParamInfo]] = {"decayed": [], "undecayed": []}
    for info in parameters:
        if info.trainable:
            groups["decayed" if is_decayed(info.name, len(info.shape)) else "undecayed"].append(info)
    return [(key, group) for key, group in groups.items() if group]


def _flat_tensors(sizes: Mapping[str, Sequence[int]]) -> tuple[ParamInfo, ...]:
    """Return the flat tensors that the optimizer steps: those of each group, by their elements."""
    return tuple(
        ParamInfo(name=f"flat.{key}.{index}", shape=(size,), dtype=_MASTER_DTYPE)
        for key, parts in sizes.items()
        for index, size in enumerate(parts)
    )


def _num_elements(group: Iterable[ParamInfo]) -> int:
    return sum(info.num_elements for info in group)
