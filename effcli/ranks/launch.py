"""`Launch`: which of how many processes this one is, read from the environment of the launcher. No torch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from effcli.errors import UsageError

RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""What a launcher tells each process; torch's rendezvous by environment reads the same."""

_MPI_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE")
"""What MPI tells its processes in place of `WORLD_SIZE`."""
_ACCELERATE = "ACCELERATE_MIXED_PRECISION"
"""What `accelerate launch` tells whatever it starts. Where more than one process was asked for it also sets
`MASTER_ADDR`, and without `--multi_gpu` starts a single one of them on a machine without several cards (1.15)."""

_RESTARTS = "TORCHELASTIC_RESTART_COUNT"
"""What torchrun tells its processes: how often it has started them again (`--max-restarts`)."""

TIMEOUT = "EFFCLI_RANK_TIMEOUT"
"""Seconds that a process waits for the others in an exchange before it gives the run up."""
TIMEOUT_S = 1800.0
"""What it is without: torch's own for gloo. NCCL's, 600 s, is less than rank 0 may need to write a large checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """The place of this process among those of its run; ranks count from 0, local ones within a machine."""

    world_size: int = 1
    rank: int = 0
    local_rank: int = 0
    local_world_size: int = 1

    @property
    def has_many(self) -> bool:
        """Return whether there are other processes."""
        return self.world_size > 1

    @property
    def is_main(self) -> bool:
        """Return whether this is the process that writes files and speaks."""
        return self.rank == 0


ALONE = Launch()
"""The only process of its run."""


def read_launch(environment: Mapping[str, str] = os.environ) -> Launch:
    """Return what the launcher said; one process where there was none.

    Raises:
        UsageError: a variable is no number or out of range, one that is needed is missing, MPI started the
            processes, of which torch would know nothing, or accelerate started one of several alone.
    """
    world_size = _number(environment, "WORLD_SIZE", at_least=1)
    if world_size is None or world_size == 1:
        for name in _MPI_SIZES:
            if (_number(environment, name, at_least=1) or 1) > 1 and world_size is None:
                raise UsageError(
                    f"{name} is {environment[name]}: processes that MPI starts would train unsynchronised copies; "
                    f"start them with torchrun --nproc-per-node {environment[name]} -m effcli"
                )
        if world_size is None and environment.get(_ACCELERATE) and environment.get("MASTER_ADDR"):
            raise UsageError(
                "accelerate launch was asked for several processes and started one; give it --multi_gpu, which starts "
                "them on CPUs too, or use torchrun --nproc-per-node N -m effcli; if one was meant, unset MASTER_ADDR"
            )
        return ALONE
    missing = [name for name in RANK_VARIABLES if name != "LOCAL_WORLD_SIZE" and not environment.get(name)]
    if missing:
        raise UsageError(
            f"WORLD_SIZE is {world_size}, but {', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not set; "
            f"start with torchrun --nproc-per-node {world_size} -m effcli, or unset WORLD_SIZE"
        )
    rank = _number(environment, "RANK", at_least=0, below=world_size)
    local_world_size = _number(environment, "LOCAL_WORLD_SIZE", at_least=1) or world_size
    local_rank = _number(environment, "LOCAL_RANK", at_least=0, below=local_world_size)
    assert rank is not None
    assert local_rank is not None
    return Launch(world_size=world_size, rank=rank, local_rank=local_rank, local_world_size=local_world_size)


def launch_command(num_processes: int) -> str:
    """Return what to type for effcli in so many processes on one machine."""
    return "effcli" if num_processes == 1 else f"torchrun --nproc-per-node {num_processes} -m effcli"


def restarts(environment: Mapping[str, str] = os.environ) -> int:
    """Return how often the launcher of this machine has started the processes again after one of them failed.

    Raises:
        UsageError: the variable is no number.
    """
    return _number(environment, _RESTARTS, at_least=0) or 0


def timeout_s(environment: Mapping[str, str] = os.environ) -> float:
    """Return the seconds that a process waits for the others.

    Raises:
        UsageError: the variable is no such number.
    """
    seconds = _number(environment, TIMEOUT, at_least=1)
    return TIMEOUT_S if seconds is None else float(seconds)


def _number(environment: Mapping[str, str], name: str, *, at_least: int, below: int | None = None) -> int | None:
    """Return a variable as a whole number, None where it is not set or empty.

    Raises:
        UsageError: it is no such number.
    """
    text = environment.get(name, "")
    if not text:
        return None
    if text.isdecimal() and text.isascii() and at_least <= int(text) and (below is None or int(text) < below):
        return int(text)
    allowed = f"{at_least} or more" if below is None else f"from {at_least} to {below - 1}"
    if name == TIMEOUT:
        raise UsageError(f"{name} is '{text}'; set it to a whole number of seconds, {allowed}, or unset it")
    raise UsageError(f"{name} is '{text}', which launchers set to a whole number, {allowed}; unset it, or use torchrun")
