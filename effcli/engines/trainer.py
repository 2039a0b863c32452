"""The loop of transformers' `Trainer`, given our optimizer, schedule, batches and loss rule."""

from __future__ import annotations

import tempfile
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import DistributedDataParallelKwargs
from torch.utils.data import DataLoader
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainerState, TrainingArguments

from effcli.engines.base import Batch, Job, UpdateResult
from effcli.engines.distributing import replica_settings, whole
from effcli.engines.precision import check_scaler
from effcli.engines.process_state import check_spread
from effcli.engines.window import window_items, window_loss


def run(job: Job) -> None:
    """Drive the job through `Trainer.train`."""
    with tempfile.TemporaryDirectory(prefix="effcli-trainer-") as folder:
        arguments = _arguments(job, folder)
        trainer = _JobTrainer(job, arguments)
        check_scaler(job.loop, trainer.accelerator.scaler)
        trainer.remove_callback(PrinterCallback)
        trainer.add_callback(_Forward(job, trainer))
        resume = _write_state(job, arguments, Path(folder)) if job.start_update else None
        trainer.train(resume_from_checkpoint=resume)
        trainer.accelerator.unwrap_model(trainer.model_wrapped, keep_fp32_wrapper=False)


class _JobTrainer(Trainer):
    """`Trainer` with the job's batches: they, not a sampler of its own, decide the order of the rows."""

    def __init__(self, job: Job, args: TrainingArguments) -> None:
        self._job = job
        self._shares: torch.Tensor | float = 0.0
        self.window_loss = 0.0
        super().__init__(
            model=job.model,
            args=args,
            optimizers=(job.optimizer, job.scheduler),
            compute_loss_func=self._share_of_window,
        )
        # What transformers knows as sharded when it was loaded is stepped as it is, and not wrapped in a replica.
        self.is_distributed_loading_by_transformers = job.loop.shard == "fsdp"

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        """Let replicas exchange gradients as in every engine: no argument of Trainer's names all of it (5.24)."""
        settings = DistributedDataParallelKwargs(**replica_settings(self._job.loop))
        return {**super()._build_accelerator_args(**kwargs), "kwargs_handlers": [settings]}

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
        prepared = super()._prepare_for_training(*args, **kwargs)
        check_spread(self.accelerator, self.model_wrapped, self._job.loop)
        return prepared

    def _share_of_window(self, outputs: Any, labels: torch.Tensor, num_items_in_batch: int) -> torch.Tensor:
        share = self._job.window_loss.scaled(outputs["logits"], labels, num_items_in_batch)
        self._shares += share.detach()
        return share

    def _clip_grad_norm(self, model: torch.nn.Module) -> Any:
        """Show loss and norm to the observer between clipping and the step; no callback is given them there."""
        norm = whole(super()._clip_grad_norm(model))
        self.window_loss, self._shares = window_loss(self._shares), 0.0
        self._job.observer.before_step(loss=self.window_loss, grad_norm=float(norm))
        return norm

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> tuple[list[Batch], int]:
        """Count items by our rule: Trainer's own (5.24) leaves out a score of -100, and knows tasks by their loss."""
        window, _ = super().get_batch_samples(*args, **kwargs)
        return window, window_items(window)

    def get_train_dataloader(self) -> DataLoader[Any]:
        return self._job.loader

    def _defer_fsdp_gradient_reduction(self) -> AbstractContextManager[None]:
        """Exchange the gradients of each micro-batch: to hold a shard's back would mean to hold all of them."""
        return nullcontext()

    def _run_epoch(self, *, epoch: int, epochs_trained: int, **numbers: Any) -> None:
        """Give the first epoch the length that is left of it: a resumed run may have another window than before.

        Trainer's own way to skip batches counts them in the window of a whole run (transformers 5.24).
        """
        if epoch == epochs_trained:
            schedule, start_update = self._job.loop.window_schedule, self._job.start_update
            self._job.loader.skip_next(schedule.position(start_update).rows)
            left = schedule.micro_batches_left(start_update)
            numbers |= {"steps_in_epoch": left, "num_update_steps_per_epoch": -(-left // schedule.accum)}
        super()._run_epoch(epoch=epoch, epochs_trained=epochs_trained, **numbers)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: torch.nn.Module | None = None) -> None:
        """Load nothing: the pipeline has restored the model."""


class _Forward(TrainerCallback):
    """Passes each update on to the observer. `on_log` is the one event that carries the gradient norm."""

    def __init__(self, job: Job, trainer: _JobTrainer) -> None:
        self._job = job
        self._trainer = trainer

    def on_train_begin(self, args: TrainingArguments, state: Any, control: Any, **kwargs: Any) -> None:
        self._job.observer.train_begin(self._trainer.accelerator.scaler)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kwargs: Any) -> None:
        if logs is not None and "grad_norm" in logs:
            grad_norm = logs["grad_norm"]
            skipped = self._trainer.accelerator.optimizer_step_was_skipped
            result = UpdateResult(loss=self._trainer.window_loss, grad_norm=grad_norm, skipped=skipped)
            self._job.observer.after_update(result)


def _arguments(job: Job, folder: str) -> TrainingArguments:
    """Return arguments that leave saving, evaluating and reporting to the observer."""
    loop = job.loop
    return TrainingArguments(
        output_dir=folder,
        per_device_train_batch_size=loop.window_schedule.batch_size,
        gradient_accumulation_steps=loop.window_schedule.accum,
        max_steps=loop.total_updates + loop.window_schedule.offset,
        max_grad_norm=loop.clip_norm,
        average_tokens_across_devices=False,  # our loss is that of all processes already
        bf16=loop.precision == "bf16",
        fp16=loop.precision == "fp16",
        use_cpu=loop.device.type == "cpu",
        seed=loop.seed,
        logging_steps=1,
        logging_nan_inf_filter=False,
        save_strategy="no",
        eval_strategy="no",
        report_to="none",
        disable_tqdm=True,
        ignore_data_skip=True,
    )


def _write_state(job: Job, arguments: TrainingArguments, folder: Path) -> str:
    """Write the only file that Trainer needs to go on from `job.start_update`; return its folder."""
    state = TrainerState(
        global_step=job.start_update + job.loop.window_schedule.offset,
        epoch=job.loop.window_schedule.epochs(job.start_update),
        train_batch_size=job.loop.window_schedule.batch_size,
    )
    state.compute_steps(arguments, arguments.max_steps)
    state.save_to_json(str(folder / "trainer_state.json"))
    return str(folder)
