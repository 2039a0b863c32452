"""What each process holds under torch's `fully_shard` (FSDP2): shards of dimension 0, padded to the first. No torch.

Read from torch 2.13, `torch/distributed/fsdp/_fully_shard/`: `_fsdp_param.py` (shards), `_fsdp_collectives.py` and
`_fsdp_param_group.py` (what is gathered and reduced, and how long it is kept).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from effcli.errors import UsageError
from effcli.memory.sharding.groups import gather_groups
from effcli.memory.sharding.share import Share
from effcli.units import DTYPE_BYTES, ParamInfo, listed


def fully_sharded_shares(parameters: Sequence[ParamInfo], world_size: int) -> tuple[Share, ...]:
    """Return what each rank holds, with the local shapes of its parameters.

    Dimension 0 is cut as `torch.chunk` does: rows in chunks of ceil(rows / world), the last ones shorter or empty.
    Weights are stored padded to the first chunk on every rank, and so are gradients, which are views into one output
    of the reduce-scatter per group. The optimizer sees the shard without its padding.

    Raises:
        UsageError: a parameter has no dimension to cut.
    """
    scalars = [info.name for info in parameters if not info.shape]
    if scalars:
        raise UsageError(
            f"fsdp cannot shard parameters without a dimension ({listed(scalars)}): torch's fully_shard refuses them; "
            "choose --shard ddp"
        )
    weights_bytes = sum(_chunk_bytes(info, world_size) for info in parameters)
    gradients_bytes = sum(_chunk_bytes(info, world_size) for info in parameters if info.trainable)
    communication_bytes = _communication_bytes(parameters, world_size)
    starts = _breakpoints({info.shape[0] for info in parameters}, world_size)
    found: list[Share] = []
    local: dict[tuple[int, int], ParamInfo] = {}
    for start, end in zip(starts, [*starts[1:], world_size], strict=True):
        held = tuple(_local(index, info, start, world_size, local) for index, info in enumerate(parameters))
        found += [
            Share(
                rank=rank,
                parameters=held,
                weights_bytes=weights_bytes,
                gradients_bytes=gradients_bytes,
                communication_bytes=communication_bytes,
            )
            for rank in range(start, end)
        ]
    return tuple(found)


def _breakpoints(lengths: set[int], world_size: int) -> list[int]:
    """Return the ranks, from 0, at which a shape differs from the rank's before.

    Of `rows` rows the first `rows // chunk` ranks have a whole chunk; from rank ceil(rows / chunk) on there is none.
    """
    starts = {0}
    for rows in lengths:
        chunk = _chunk_rows(rows, world_size)
        starts.update((rows // chunk, -(-rows // chunk)))
    return sorted(start for start in starts if start < world_size)


def _local(
    index: int, info: ParamInfo, rank: int, world_size: int, known: dict[tuple[int, int], ParamInfo]
) -> ParamInfo:
    """Return a parameter with the shape of its shard; the few different ones are made once, and kept in `known`."""
    chunk = _chunk_rows(info.shape[0], world_size)
    rows = min(max(info.shape[0] - rank * chunk, 0), chunk)
    if (index, rows) not in known:
        known[index, rows] = replace(info, shape=(rows, *info.shape[1:]))
    return known[index, rows]


def _chunk_rows(rows: int, world_size: int) -> int:
    """Return the rows of the first shard, at least 1."""
    return max(-(-rows // world_size), 1)


def _chunk_bytes(info: ParamInfo, world_size: int) -> int:
    """Return the bytes of a parameter's first shard, which every rank stores."""
    rows = info.shape[0]
    if rows == 0:
        return 0
    return _chunk_rows(rows, world_size) * (info.num_elements // rows) * DTYPE_BYTES[info.dtype]


def _communication_bytes(parameters: Sequence[ParamInfo], world_size: int) -> int:
    """Return the bytes that are held at most, beside shards, to gather parameters and to reduce gradients.

    A group is gathered into one buffer and copied out of it, both padded. What belongs to no layer stays gathered from
    the start of the forward pass until the end of the backward pass. In the forward pass a group's buffer stays until
    the next one is copied out; in the backward pass the layer before is gathered while one computes, and the input of
    the last reduce-scatter stays until the next. Whole gradients live until their group is reduced; those of the rest
    are reduced last.

    Leaves out the sharded sum of a second micro-batch before it is added, both gradients of a tied parameter before
    autograd adds them, and copies that a backend makes: gloo copies each buffer once more.
    """
    groups = gather_groups(parameters)
    whole = {id(info): world_size * _chunk_bytes(info, world_size) for info in parameters}
    rest = sum(whole[id(info)] for info in groups.rest)
    rest_gradients = sum(info.num_bytes for info in groups.rest if info.trainable)
    rest_reduced = sum(whole[id(info)] for info in groups.rest if info.trainable)
    early = sum(info.num_bytes for info in groups.early if info.trainable)
    gathered = [sum(whole[id(info)] for info in layer) for layer in groups.layers]
    gradients = [sum(info.num_bytes for info in layer if info.trainable) for layer in groups.layers]
    reduced = [sum(whole[id(info)] for info in layer if info.trainable) for layer in groups.layers]

    moments = [2 * rest]
    for before, layer in zip([rest, *gathered], gathered, strict=False):
        moments.append(rest + before + 2 * layer)
    for index, layer in enumerate(gathered):
        before = gathered[index - 1] if index else 0
        after = reduced[index + 1] if index + 1 < len(reduced) else 0
        moments += [
            rest + early + 2 * layer + after,
            rest + early + layer + before + after + gradients[index],
            rest + early + before + gradients[index] + reduced[index],
        ]
    moments += [rest + rest_gradients + (reduced[0] if reduced else 0), rest_gradients + rest_reduced]
    return max(moments)
