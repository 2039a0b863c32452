"""What a process holds on a card beside torch's allocator, as runs on such a card have measured it, or assumed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from effcli.history.entry import HistoryEntry
from effcli.history.file import history_file, read_lines
from effcli.history.read import entries_of
from effcli.memory.cards import CONTEXT_BYTES, cards_called
from effcli.nvml.names import readable
from effcli.packages import installed_version
from effcli.units import GIB, MIB, Basis, count

NUM_RUNS = 10
"""So many of the latest runs are learnt from: more of them would keep what an older driver took."""

SMALLEST_BYTES, LARGEST_BYTES = 32 * MIB, 4 * GIB
"""Bytes below or above these are no context of torch, but a reading that went wrong or that has something else in it.

CUDA alone takes some tens of MiB on the smallest cards; torch before 1.13, which loaded all kernels at once, took about
1.5 GiB.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """What a plan takes for the context in bytes, and on what basis; `source` says in words what it was learnt from."""

    num_bytes: int
    basis: Basis
    source: str | None = None


ASSUMED = Context(num_bytes=CONTEXT_BYTES, basis=Basis.ASSUMED)


def context_for(card: str | None) -> Context:
    """Return the context on a card, by its key or as torch names it; None for a device of which only the size is known.

    That is the largest of the latest runs on such a card in which the driver told what the process held, so that a plan
    rather asks for too much than runs out of memory. The context differs with torch and its kernels, so that runs
    with the version that is installed count alone where there are any; it differs little with the driver. Without such
    runs, or where the history cannot be read, it is assumed.
    """
    if card is None:
        return ASSUMED
    known = [run for run in _runs() if _measured_bytes(run) is not None and _is_same(card, run.card)]
    installed = installed_version("torch")
    runs = ([run for run in known if run.torch == installed] or known)[-NUM_RUNS:]
    if not runs:
        return ASSUMED
    num_bytes = max(amount for run in runs if (amount := _measured_bytes(run)) is not None)
    return Context(num_bytes=num_bytes, basis=Basis.LEARNT, source=_source(runs))


def _runs() -> tuple[HistoryEntry, ...]:
    """Return the runs of the history that have a context; none where it cannot be read."""
    try:
        path = history_file()
        lines = read_lines(path) if path else []
    except OSError:
        return ()
    return entries_of(line for line in lines if b'"context"' in line)[0]


def _measured_bytes(run: HistoryEntry) -> int | None:
    """Return the context of a run; None where it was not measured for the process itself, or cannot be one."""
    pair = run.pairs.get("context")
    amount = pair.measured_bytes if pair else None
    if amount is None or run.context_how is not None:
        return None
    return amount if SMALLEST_BYTES <= amount <= LARGEST_BYTES else None


def _is_same(card: str, other: str | None) -> bool:
    """Return whether two names can mean the same card; torch leaves out the size of some that come in several."""
    if other is None:
        return False
    return card == other or not {found.key for found in cards_called(card)}.isdisjoint(
        found.key for found in cards_called(other)
    )


def _source(runs: Sequence[HistoryEntry]) -> str:
    versions = {run.torch for run in runs}
    one = versions.pop() if len(versions) == 1 else None
    torch = f" with torch {readable(one)}" if one else " with other versions of torch" if versions else ""
    return f"learnt from {count(len(runs), 'run')} on this card{torch}, the last on {runs[-1].date[:10]}"
