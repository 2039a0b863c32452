"""`Profiling`: the one update of a run on a CPU whose memory is recorded, and what is planned for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from effcli.data.order import row_lengths
from effcli.measure.profiled import NotRecordedError, Recorded, UpdateProfiler
from effcli.measure.record import ProfiledUpdate
from effcli.pipeline.running.profiled_window import Window, batch_bytes, choose_window

if TYPE_CHECKING:
    import torch

    from effcli.data.batches import EpochLoader
    from effcli.measure.throughput import ThroughputMeter
    from effcli.pipeline.prepare import Prepared

PlanWindow = Callable[["Prepared", Window, int], int | None]
"""The run, a window and the bytes of the batches held in it -> the peak in bytes that is planned for a warm update."""


class Profiling:
    """Starts and stops the clock of a run, and with it the profiler around one update.

    That is the update with the largest micro-batch, of those that this process makes after its first: state exists
    then, and the order of the rows tells which it is. It is slowed down, so the meter leaves it out. A resumed run
    profiles one of the updates that were left to it, and keeps of `before` and its own the one with the higher peak.
    Several processes all profile the same update, that with the largest micro-batch of any, each its own part of it.
    """

    def __init__(
        self,
        prepared: Prepared,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        meter: ThroughputMeter,
        before: ProfiledUpdate | None,
    ) -> None:
        self._prepared, self._meter = prepared, meter
        self._asked = prepared.spec.loop.profile_memory and prepared.device.type == "cpu"
        self._profiler = UpdateProfiler(model, optimizer)
        self._facts = before if prepared.launch.is_main else None  # a checkpoint has that of rank 0
        self._window: Window | None = None
        self._planned_bytes: int | None = None
        self._why_not: str | None = None

    def watching(self, collate: Callable[[Any], dict[str, torch.Tensor]]) -> Callable[[Any], dict[str, torch.Tensor]]:
        """Return a collator whose batches the profiler knows of; the same where worker processes make them."""
        in_this_process = self._asked and not self._prepared.spec.loop.num_workers
        return self._profiler.watching(collate) if in_this_process else collate

    def choose(self, loader: EpochLoader, start_update: int, plan_window: PlanWindow) -> None:
        """Choose the update that is profiled, if one was asked for, and plan its peak."""
        if not self._asked:
            return
        prepared, lengths = self._prepared, row_lengths(self._prepared.data.train)
        loop = prepared.spec.loop
        if loop.engine == "accelerate" and loop.num_workers:
            self._why_not = "with --num-workers accelerate holds a batch that was made before, which is not seen"
            return
        lays_buckets_anew = prepared.launch.has_many and loop.shard == "ddp"  # in its second forward pass (torch 2.13)
        window = choose_window(
            loader.batch_sampler,
            lengths,
            prepared.window_schedule,
            start_update=start_update,
            total_updates=prepared.total_updates,
            num_cold=2 if lays_buckets_anew else 1,
        )
        if window is None:
            self._why_not = (
                "the first two updates are made cold, since DDP lays out its buckets anew, and there is no other"
                if lays_buckets_anew
                else "the first update is made cold, and there is no other"
            )
            return
        self._window, self._why_not = window, f"the run ended before update {window.update}, the one to profile"
        example = loader.collate_fn([prepared.data.train[row] for row in window.example])
        self._planned_bytes = plan_window(prepared, window, _held_bytes(window, example, loop.engine))

    def start_clock(self, update: int) -> None:
        """Let an update begin, whose number this is."""
        if self._window is not None and update == self._window.update:
            try:
                self._profiler.start()
            except NotRecordedError as error:
                self._why_not = str(error)
        self._meter.start(self._batches_with_rows(update))

    def _batches_with_rows(self, update: int) -> int:
        """Return how many micro-batches of an update have rows of this process; a last one of few rows may have none.

        Its stand-in makes another one, which no rate counts.
        """
        import torch

        schedule, part = self._prepared.window_schedule, self._prepared.part
        rows = min(schedule.window, schedule.num_rows - schedule.position(update - 1).rows)
        whole, rest = divmod(rows, schedule.batch_size * part.world_size)
        return whole + bool(part.of(torch.arange(rest)))

    def pause_clock(self) -> None:
        """Let the update end that goes on, if one does."""
        if not self._profiler.is_recording:
            self._meter.pause()
            return
        self._meter.leave_out()
        try:
            facts = self._described(self._profiler.stop())
        except NotRecordedError as error:
            self._why_not = str(error)
            return
        if self._facts is None or facts.peak_allocated_bytes >= self._facts.peak_allocated_bytes:
            self._facts = facts

    @property
    def facts(self) -> ProfiledUpdate | None:
        """Return the profiled update with the highest peak so far; None where none is."""
        return self._facts

    @property
    def notes(self) -> tuple[str, ...]:
        """Return why nothing was profiled, where it was asked for."""
        return (f"--profile-memory: n/a, {self._why_not}.",) if self._facts is None and self._why_not else ()

    def detach(self) -> None:
        """Stop the profiler, without a result where an update is going on. May be called more than once."""
        self._profiler.detach()

    def _described(self, recorded: Recorded) -> ProfiledUpdate:
        window = self._window
        assert window is not None
        as_planned = recorded.rows * recorded.tokens == max(batch.rows * batch.tokens for batch in window.batches)
        return ProfiledUpdate(
            update=window.update,
            rows=recorded.rows,
            tokens=recorded.tokens,
            peak_allocated_bytes=recorded.peak_allocated_bytes,
            planned_peak_allocated_bytes=self._planned_bytes if as_planned else None,
            timeline_bytes=recorded.timeline_bytes,
        )


def _held_bytes(window: Window, example: Mapping[str, torch.Tensor], engine: str) -> int:
    """Return the bytes of the batches that a loop holds during a window; accelerate has the next one too (1.15)."""
    ahead = (window.following,) if engine == "accelerate" and window.following is not None else ()
    return batch_bytes((*window.batches, *ahead), example)
