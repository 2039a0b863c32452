"""`Watchers`: what looks on while a run trains. Engines know of none of them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from effcli.engines.clipping import PercentileClipping, clipping_notes
from effcli.measure.device_monitor import DeviceMonitor
from effcli.measure.optimizer_size import state_notes
from effcli.measure.peak import StepProbe
from effcli.measure.precision import WeightChanges, precision_notes
from effcli.measure.throughput import ThroughputMeter
from effcli.measure.whereabouts import Whereabouts
from effcli.optim.learning_rate import current_lr
from effcli.pipeline.running.measured import OfAll, gather, held_by, measured, on_this_rank
from effcli.pipeline.running.profiling import Profiling
from effcli.ranks.group import world_size

if TYPE_CHECKING:
    import torch

    from effcli.engines.base import Loop
    from effcli.engines.session import TrainingSession
    from effcli.measure.rank_record import RankMeasured
    from effcli.measure.record import Measured, Throughput
    from effcli.pipeline.prepare import Prepared
    from effcli.pipeline.running.resuming import Start


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What was measured of a run, None where it made no update, and what should be said about it."""

    measured: Measured | None
    throughput: Throughput | None
    notes: tuple[str, ...]


class Watchers:
    """What hooks into model and optimizer of a run: for its rates, sizes, times and places, and for clipping."""

    def __init__(
        self,
        prepared: Prepared,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        loop: Loop,
        start: Start,
        monitor: DeviceMonitor,
    ) -> None:
        before_s = start.history[-1].training_s if start.history else 0.0
        self._optimizer, self._loop, self._monitor = optimizer, loop, monitor
        self._of_all: OfAll | None = None
        self.first_steps = monitor.first_steps(optimizer, is_resumed=start.checkpoint is not None)
        self.probe = StepProbe(model, optimizer, current_lr)
        self.meter = ThroughputMeter(model, time.perf_counter, before_s=before_s)
        self.whereabouts = Whereabouts(model, optimizer, monitor.enter)
        self.weight_changes = WeightChanges(model, optimizer)
        self.clipping = PercentileClipping(model, optimizer, loop)
        self.clipping.remember(start.history)
        self.profiling = Profiling(prepared, model, optimizer, self.meter, start.profiled)
        if self.first_steps is not None:
            self.first_steps.arm()

    def detach(self) -> None:
        """Take the hooks off, the profiler's first."""
        self.profiling.detach()
        for watcher in (self.probe, self.meter, self.whereabouts, self.weight_changes, self.clipping, self.first_steps):
            if watcher is not None:
                watcher.detach()

    def gathering(self, save: Callable[[TrainingSession], object]) -> Callable[[TrainingSession], None]:
        """Return `save`, before which all processes tell what they hold.

        They save after the same update, the last one of a run or of a stop included. Nothing else may gather: where a
        run fails each ends on its own.
        """

        def gathered_and_saved(session: TrainingSession) -> None:
            if world_size() > 1:
                self._of_all = gather(self._on_this_rank(), self.weight_changes, update=session.update)
            save(session)

        return gathered_and_saved

    def _on_this_rank(self) -> RankMeasured:
        peaks, profiled = self._monitor.peaks(), self.profiling.facts
        peak_bytes = peaks.allocated_bytes if peaks else profiled.peak_allocated_bytes if profiled else None
        size = held_by(self._optimizer)
        return on_this_rank(self._loop.device, size=size, probe=self.probe, peak_allocated_bytes=peak_bytes)

    def seen(self, session: TrainingSession, *, num_updates: int, predicted_state_bytes: int) -> Seen:
        """Return what is known after as many updates of this process, where that many bytes of state were predicted."""
        size = held_by(self._optimizer)
        predicted_bytes = predicted_state_bytes if num_updates else 0
        unused = state_notes(
            size,
            without_gradient=self.probe.without_gradient,
            predicted_bytes=predicted_bytes,
            in_buckets=world_size() > 1 and self._loop.shard == "ddp",
        )
        of_all = self._of_all if self._of_all and self._of_all.update == session.update else None
        facts = None
        if num_updates:
            facts = measured(
                session,
                device=self._loop.device,
                monitor=self._monitor,
                size=size,
                probe=self.probe,
                weight_changes=self.weight_changes,
                profiled=self.profiling.facts,
                of_all=of_all,
            )
        clipped = clipping_notes(self._loop, session.history)
        return Seen(
            measured=facts,
            throughput=self.meter.result(num_updates) if num_updates else None,
            notes=(*unused, *clipped, *precision_notes(facts), *self.profiling.notes),
        )
