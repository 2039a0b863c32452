"""`Share`: what one of several processes holds. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from effcli.spec import Shard
from effcli.units import ParamInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharding:
    """How a run is spread: what each of `world_size` processes holds."""

    shard: Shard = "ddp"
    world_size: int = 1


ALONE = Sharding()
"""One process, which holds everything."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """What the process `rank` holds.

    `parameters` are the tensors that its optimizer is given, with the shapes that they have there; a parameter of which
    nothing lies there has no elements. Bytes are true storage, padding included, of weights, of gradients where they
    are complete, and of what is held at most to exchange with other processes (gathered parameters, buckets).
    `master_bytes` are 32-bit copies of weights that the optimizer steps in their place, as DeepSpeed keeps them.
    """

    rank: int
    parameters: tuple[ParamInfo, ...]
    weights_bytes: int
    gradients_bytes: int
    communication_bytes: int
    master_bytes: int = 0
