"""Where the processes of a run find each other, before they exchange anything: all there, and all of the same mind."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from effcli.errors import DeviceError, UsageError
from effcli.ranks import voice
from effcli.ranks.launch import Launch, timeout_s
from effcli.ranks.members import Member, gone, keep, myself
from effcli.ranks.store import find_store

if TYPE_CHECKING:
    from torch.distributed import Store

_STEP_S = 0.02
_runs = itertools.count()
"""Runs of one launch one after the other, as a script may make them: each has words of its own in the store."""


@contextmanager
def met(launch: Launch, facts: Mapping[str, str]) -> Iterator[Store | None]:
    """Yield the store of the launch when all processes are there; None where there is one process.

    What ends the run while this lasts is told to the others. `facts` are what all have to be started with, by name.

    Raises:
        UsageError: another process was started with other facts.
        DeviceError: the processes did not find each other.
    """
    if not launch.has_many:
        yield None
        return
    from torch.distributed import PrefixStore

    store = PrefixStore(f"effcli/{next(_runs)}", find_store(launch, wait_s=timeout_s()))
    voice.use_store(store)
    try:
        member = myself(launch.rank)
        found = _exchange(store, launch, "member", {"host": member.host, "process": str(member.process)})
        keep(Member(rank=number, host=of["host"], process=int(of["process"])) for number, of in enumerate(found))
        agree(store, launch, "facts", facts)
        yield store
    except BaseException as error:
        voice.leave_reason(error)
        raise
    finally:
        voice.end(launch)
        if not voice.is_ending():
            keep(())


def agree(store: Store, launch: Launch, name: str, facts: Mapping[str, str]) -> None:
    """Prove that all processes have the same facts; collective, without a process group.

    Raises:
        UsageError: they have not.
    """
    of_all = _exchange(store, launch, name, facts)
    for rank, others in enumerate(of_all):
        for fact in dict.fromkeys((*of_all[0], *others)):
            mine, other = of_all[0].get(fact, "none"), others.get(fact, "none")
            if mine != other:
                raise UsageError(
                    f"rank {rank} was started with another {fact} than rank 0, {other} and not {mine}; "
                    "start all processes with the same command, the same files and the same packages"
                )


def _exchange(store: Store, launch: Launch, name: str, facts: Mapping[str, str]) -> list[dict[str, str]]:
    """Return the facts of each process, in the order of the ranks.

    Looks for them again and again, because no signal is heard while torch itself waits.

    Raises:
        DeviceError: a process did not come, or has ended.
        EffcliError: another process has failed.
    """
    keys = [f"{name}/{rank}" for rank in range(launch.world_size)]
    store.set(keys[launch.rank], json.dumps(dict(facts)))
    limit_s = timeout_s()
    end_s = time.monotonic() + limit_s
    while not store.check(keys):
        if reason := voice.reason_of_another():
            raise reason.as_error()
        missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
        dead = [member.rank for member in gone() if member.rank in missing]
        if dead or time.monotonic() >= end_s:
            ranks = ", ".join(map(str, dead or missing))
            what = "ended before the run began" if dead else f"did not come within {limit_s:g} seconds"
            raise DeviceError(f"rank {ranks} of {launch.world_size} processes {what}; start again with torchrun")
        time.sleep(_STEP_S)
    return [json.loads(store.get(key)) for key in keys]
