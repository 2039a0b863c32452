"""`Saving`: the state that a run starts from, and what it saves."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from effcli.engines.checkpoint import CheckpointStore, restore
from effcli.engines.whole_tensors import is_sharded, whole_weights
from effcli.files import write_folder
from effcli.models.lora import save_model
from effcli.pipeline.running.guards import (
    explained_saving,
    refuse_replicas_that_differ,
    refuse_weights_that_are_not_finite,
)
from effcli.pipeline.running.resuming import Start, saved_state
from effcli.ranks.agreeing import on_all
from effcli.ranks.group import is_main

if TYPE_CHECKING:
    import torch

    from effcli.engines.session import TrainingSession
    from effcli.measure.record import ProfiledUpdate
    from effcli.pipeline.prepare import Prepared
    from effcli.run_folder import RunFolder


@dataclass(frozen=True, slots=True, kw_only=True)
class Saving:
    """What is saved of a run, and where; all processes call the methods, rank 0 writes."""

    prepared: Prepared
    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler
    folder: RunFolder
    store: CheckpointStore
    start: Start
    first_window: int

    def begin(self, scaler: torch.amp.GradScaler | None) -> None:
        """Set the state that the first update starts from.

        Called after the engine's preparation, which in accelerate casts the optimizer's state once more. Each process
        draws random numbers of its own.
        """
        seed = self.prepared.spec.loop.seed
        if self.start.checkpoint is None:
            from transformers import set_seed

            set_seed(seed + self.prepared.launch.rank)
            return
        with on_all():
            restore(
                self.start.checkpoint,
                model=self.model,
                optimizer=self.optimizer,
                scheduler=self.scheduler,
                scaler=scaler,
                seed=seed,
            )

    def checkpoint(self, session: TrainingSession, profiled: ProfiledUpdate | None) -> None:
        """Write a checkpoint.

        Raises:
            TrainingFailedError: weights are not finite, or not the same in all processes.
            WriteError: it could not be written.
        """
        self._check()
        with explained_saving(session.update):
            self.store.save(
                saved_state(self.prepared, session, first_window=self.first_window, profiled=profiled),
                model=self.model,
                optimizer=self.optimizer,
                scheduler=self.scheduler,
                scaler=session.scaler,
            )

    def final_model(self) -> None:
        """Write the trained model and its tokenizer.

        Raises:
            TrainingFailedError: its weights are not finite, or not the same in all processes.
            WriteError: they could not be written.
        """
        self._check()
        weights = whole_weights(self.model) if is_sharded(self.model) else None

        def fill(path: Path) -> None:
            save_model(self.model, path, self.folder.model, weights=weights)
            self.prepared.tokenizer.save_pretrained(path)

        with on_all():
            if is_main():
                write_folder(self.folder.model, fill)

    def _check(self) -> None:
        refuse_weights_that_are_not_finite(self.model)
        if not is_sharded(self.model):
            refuse_replicas_that_differ(self.model)
