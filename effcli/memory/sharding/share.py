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

    @property
    def has_many(self) -> bool:
        """Return whether there are several processes."""
        return self.world_size > 1

    @property
    def is_replicated(self) -> bool:
        """Return whether each of several processes holds the whole model (DDP)."""
        return self.has_many and self.shard == "ddp"

    @property
    def has_rows(self) -> bool:
        """Return whether each of several processes holds rows of every parameter (FSDP2)."""
        return self.has_many and self.shard == "fsdp"

    @property
    def is_flat(self) -> bool:
        """Return whether each of several processes steps a part of flat tensors (ZeRO)."""
        return self.has_many and is_zero(self.shard)


def is_zero(shard: Shard) -> bool:
    """Return whether DeepSpeed's ZeRO is meant."""
    return shard.startswith("zero")


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
