"""What is put around an engine while it runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from effcli.errors import EffcliError, OutOfMemoryError, TrainingFailedError, first_line

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from effcli.engines.session import TrainingSession
    from effcli.pipeline.prepare import Prepared


@contextmanager
def without_cache(model: PreTrainedModel) -> Iterator[None]:
    """Keep decoders from returning keys and values, which training never reads but which stay in memory."""
    had = getattr(model.config, "use_cache", None)
    if had is not None:
        model.config.use_cache = False
    try:
        yield
    finally:
        if had is not None:
            model.config.use_cache = had


@contextmanager
def explained_out_of_memory(prepared: Prepared) -> Iterator[None]:
    """Turn the allocator's error into one line that says what to change."""
    import torch

    loop = prepared.spec.loop
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        text = str(error)
        if not isinstance(error, torch.OutOfMemoryError | MemoryError) and "can't allocate memory" not in text:
            raise
        advice = []
        if loop.batch_size % 2 == 0:
            advice.append(f"--batch-size {loop.batch_size // 2} --accum {loop.accum * 2} (the same effective batch)")
        elif loop.batch_size > 1:
            advice.append("a smaller --batch-size")
        if not loop.gradient_checkpointing:
            advice.append("--gradient-checkpointing")
        if not prepared.entry.eight_bit:
            advice.append("--optim adam8bit")
        advice.append("a shorter --max-length")
        raise OutOfMemoryError(
            f"out of memory on {prepared.device} with --batch-size {loop.batch_size}; try {', or '.join(advice)}. "
            f"The allocator said: {first_line(error)}"
        ) from error


@contextmanager
def explained_failure(session: TrainingSession) -> Iterator[None]:
    """Turn what a model or an optimizer raises while it trains into one line that names the update.

    Raises:
        TrainingFailedError: anything but an error of ours was raised.
    """
    try:
        yield
    except EffcliError:
        raise
    except Exception as error:  # whatever their code raises
        raise TrainingFailedError(
            f"update {session.update + 1} failed in the model or the optimizer, {type(error).__name__}: "
            f"{first_line(error)}; --verbose shows where"
        ) from error


def refuse_weights_that_are_not_finite(model: PreTrainedModel) -> None:
    """Refuse to save a model that the last update broke, which no loss has shown yet.

    Raises:
        TrainingFailedError: a weight is infinite or not a number.
    """
    import torch

    for name, parameter in model.named_parameters():
        if not torch.isfinite(parameter).all():
            raise TrainingFailedError(f"the last update left weights of {name} that are not finite; try a lower --lr")
