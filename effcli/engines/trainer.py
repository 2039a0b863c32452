"""The loop of transformers' `Trainer`, given our optimizer, schedule, batches and loss rule."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainerState, TrainingArguments

from effcli.engines.base import Job, UpdateResult


def run(job: Job) -> None:
    """Drive the job through `Trainer.train`."""
    with tempfile.TemporaryDirectory(prefix="effcli-trainer-") as folder:
        arguments = _arguments(job, folder)
        trainer = _JobTrainer(job, arguments)
        trainer.remove_callback(PrinterCallback)
        trainer.add_callback(_Forward(job))
        resume = _write_state(job, arguments, Path(folder)) if job.start_update else None
        trainer.train(resume_from_checkpoint=resume)
        trainer.accelerator.unwrap_model(trainer.model_wrapped, keep_fp32_wrapper=False)


class _JobTrainer(Trainer):
    """`Trainer` with the job's batches: they, not a sampler of its own, decide the order of the rows."""

    def __init__(self, job: Job, args: TrainingArguments) -> None:
        self._job = job
        super().__init__(
            model=job.model,
            args=args,
            optimizers=(job.optimizer, job.scheduler),
            compute_loss_func=self._window_loss,
        )

    def _window_loss(self, outputs: Any, labels: torch.Tensor, num_items_in_batch: torch.Tensor) -> torch.Tensor:
        return self._job.window_loss.scaled(outputs["logits"], labels, num_items_in_batch)

    def get_train_dataloader(self) -> DataLoader[Any]:
        return self._job.loader

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: torch.nn.Module | None = None) -> None:
        """Load nothing: the pipeline has restored the model; Trainer only has to skip the batches already used."""


class _Forward(TrainerCallback):
    """Passes each update on to the observer. `on_log` is the one event that carries the gradient norm."""

    def __init__(self, job: Job) -> None:
        self._job = job

    def on_train_begin(self, args: TrainingArguments, state: Any, control: Any, **kwargs: Any) -> None:
        self._job.observer.train_begin()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kwargs: Any) -> None:
        if logs is not None and "grad_norm" in logs:
            grad_norm = logs["grad_norm"]
            skipped = args.fp16 and not torch.isfinite(torch.tensor(grad_norm)).item()
            self._job.observer.after_update(UpdateResult(loss=logs["loss"], grad_norm=grad_norm, skipped=skipped))


def _arguments(job: Job, folder: str) -> TrainingArguments:
    """Return arguments that leave saving, evaluating and reporting to the observer."""
    loop = job.loop
    return TrainingArguments(
        output_dir=folder,
        per_device_train_batch_size=loop.batch_size,
        gradient_accumulation_steps=loop.accum,
        max_steps=loop.total_updates,
        max_grad_norm=loop.clip_norm,
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
    )


def _write_state(job: Job, arguments: TrainingArguments, folder: Path) -> str:
    """Write the only file that Trainer needs to go on from `job.start_update`; return its folder."""
    state = TrainerState(
        global_step=job.start_update,
        epoch=job.start_update / job.loop.updates_per_epoch,
        train_batch_size=job.loop.batch_size,
    )
    state.compute_steps(arguments, job.loop.total_updates)
    state.save_to_json(str(folder / "trainer_state.json"))
    return str(folder)
