"""`--auto-batch`: which sizes a run begins again with when memory ran out. No torch."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from effcli.measure.device_record import Doing
from effcli.measure.out_of_memory_record import BatchSizes
from effcli.memory.fit import largest_divisor

if TYPE_CHECKING:
    from effcli.pipeline.prepare import Prepared
    from effcli.spec import LoopSpec


def sizes_of(loop: LoopSpec) -> BatchSizes:
    """Return the sizes that a loop's settings ask for."""
    return BatchSizes(micro=loop.batch_size, accum=loop.accum, eval_batch=loop.eval_batch_size or loop.batch_size)


def smaller(sizes: BatchSizes, *, doing: Doing, train_rows: int, eval_rows: int) -> BatchSizes | None:
    """Return a smaller micro-batch with the same rows per update; None where one row ran out.

    The micro-batch is the largest that divides the rows of an update and is at most half of what ran out, rounded up;
    so 6 x 1 becomes 3 x 2, then 2 x 3, then 1 x 6, and 7 x 1 becomes 1 x 7. An evaluation that ran out has its own
    batch halved, which changes no result; otherwise the evaluation's batch is no larger than the micro-batch.
    """
    if doing == "evaluation":
        rows = min(sizes.eval_batch, eval_rows)
        return sizes.model_copy(update={"eval_batch": (rows + 1) // 2}) if rows > 1 else None
    rows = min(sizes.micro, train_rows)
    if rows == 1:
        return None
    effective = sizes.micro * sizes.accum
    micro = largest_divisor(effective, at_most=(rows + 1) // 2)
    return BatchSizes(micro=micro, accum=effective // micro, eval_batch=min(sizes.eval_batch, micro))


def with_sizes(prepared: Prepared, sizes: BatchSizes) -> Prepared:
    """Return the run with other sizes, which its resolved specification names."""
    loop = prepared.spec.loop
    follows = loop.eval_batch_size is None and sizes.eval_batch == sizes.micro
    eval_batch_size = None if follows else sizes.eval_batch
    changed = {"batch_size": sizes.micro, "accum": sizes.accum, "eval_batch_size": eval_batch_size}
    loop = loop.model_copy(update=changed)
    return replace(prepared, spec=prepared.spec.model_copy(update={"loop": loop}))
