"""Keeps a run that has ended in the history."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from effcli.files import at_home
from effcli.history.entry import HistoryEntry, Pair
from effcli.history.file import OFF, VARIABLE, append, history_file, why
from effcli.units import Placement, cut

if TYPE_CHECKING:
    from effcli.measure.record import Measured, RunRecord

_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
_LONGEST_NAME = 100


def remember(record: RunRecord) -> str | None:
    """Keep a run in the history; return in a sentence why that could not be, None where it was kept or is not to be.

    Runs that made no update are not kept, nor is one that begins again with a smaller batch: that is another record.
    """
    if record.measured is None or _begins_again(record):
        return None
    path: Path | None = None
    try:
        path = history_file()
        if path is not None:
            append(path, entry_of(record, datetime.now().astimezone()).model_dump_json().encode())
    except OSError as error:
        where = f"'{path}': " if path else ""
        return f"The history does not have this run: {where}{why(error)}. {VARIABLE}={OFF} keeps none."
    return None


def entry_of(record: RunRecord, now: datetime) -> HistoryEntry:
    """Return the line of a run that has been measured and ended at `now`.

    It names neither data nor folders nor the machine; of a model in a folder it has the last part of the name.
    """
    environment, loop, measured = record.environment, record.spec.get("loop", {}), record.measured
    assert measured is not None
    return HistoryEntry(
        date=now.isoformat(timespec="seconds"),
        effcli=str(environment.get("effcli", "")),
        status=record.status,
        device=str(environment.get("device", "")),
        card=_text(str(environment.get("device_name"))) if record.is_on_cuda else None,
        driver_version=measured.nvml.driver_version,
        torch=(environment.get("packages") or {}).get("torch"),
        model=_model_name(record.model.name),
        optimizer=_text(record.optimizer.name),
        engine=str(loop.get("engine", "")),
        precision=str(loop.get("precision", "")),
        batch=" x ".join(map(str, _batch(record))),
        pairs=_pairs(record, measured),
        context_how=_context_how(record, measured),
    )


def _batch(record: RunRecord) -> Iterator[int | str]:
    """Yield the rows of a micro-batch, how many make an update, and the processes where there are several."""
    yield from (record.batch.micro, record.batch.accum)
    if record.distribution is not None:
        yield f"{record.distribution.world_size} {record.distribution.shard}"


def _pairs(record: RunRecord, measured: Measured) -> dict[str, Pair]:
    """Return what was measured, each with what was predicted for it: of the allocator, what updates took.

    The context is that of the last reading, when nothing is allocated any more: the driver and the allocator are asked
    one after the other, and meanwhile a run takes more.
    """
    plan, nvml = record.optimizer.plan, measured.nvml
    amounts = {
        "optimizer_state": (record.optimizer.state_bytes, measured.optimizer_state_bytes),
        "peak_allocated": (record.comparable_planned_peak_bytes, measured.update_peak_allocated_bytes),
        "peak_reserved": (record.comparable_planned_reserved_bytes, measured.update_peak_reserved_bytes),
        "context": (plan.context_bytes if plan else None, nvml.context.last_bytes),
        "process": (record.comparable_planned_process_bytes, nvml.process.peak_bytes),
    }
    return {
        name: Pair(predicted_bytes=predicted, measured_bytes=amount)
        for name, (predicted, amount) in amounts.items()
        if amount is not None and amount >= 0  # a difference of readings that do not belong together is no amount
    }


def _context_how(record: RunRecord, measured: Measured) -> str | None:
    """Return how the context was measured where that was second best; None also where it was not measured.

    Of several processes each holds NCCL's buffers beside the context, outside torch's allocator, so that a plan for one
    process must not learn from it.
    """
    context = measured.nvml.context
    if context.how is not None or context.last_bytes is None:
        return context.how
    if record.distribution is not None:
        return f"with what {record.distribution.world_size} processes exchange through"
    if measured.nvml.reason is not None:  # kernels are loaded when they are first used, so that more came later
        return "read last before the run's end"
    if record.optimizer.placements.get(Placement.PAGED):
        return "with what the optimizer's paged state has on the device"
    return None


def _begins_again(record: RunRecord) -> bool:
    last = record.out_of_memory[-1] if record.out_of_memory else None
    return record.status == "failed" and last is not None and last.next_sizes is not None


def _model_name(name: str) -> str:
    """Return the name of a model as it was given, of a folder the last part alone."""
    folder = at_home(name)
    if (
        os.path.exists(folder)
        or ("/" in name and not _HUB_ID.fullmatch(name))
        or "\\" in name
        or name.startswith((".", "~"))
    ):
        name = Path(os.path.abspath(folder)).name
    return _text(name)


def _text(name: str) -> str:
    """Return a name that can be encoded, of `_LONGEST_NAME` characters at most."""
    return cut(name.encode(errors="backslashreplace").decode(), _LONGEST_NAME)
