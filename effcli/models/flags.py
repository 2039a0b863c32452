"""Flags that change the model: which go together, and whether their packages are there. Cheap checks, made first."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from effcli.errors import UsageError
from effcli.packages import require_package
from effcli.spec import ModelSpec

ALL_LINEAR = "all-linear"


def check_model_flags(model: ModelSpec) -> None:
    """Raise unless the settings fit together and what they need imports.

    Raises:
        UsageError: LoRA settings without a rank, trust without a model, or two ways of choosing what trains.
        MissingExtraError: peft or bitsandbytes is not installed.
    """
    if model.lora_r is None:
        for flag, given in (
            (f"--lora-targets {','.join(model.lora_targets)}", bool(model.lora_targets)),
            (f"--lora-alpha {model.lora_alpha}", model.lora_alpha is not None),
            (f"--lora-dropout {model.lora_dropout}", model.lora_dropout > 0),
        ):
            if given:
                raise UsageError(f"{flag} means nothing without --lora-r; add --lora-r 8, or leave the flag out")
    else:
        _check_lora(model)
    if model.trust_remote_code and model.name is None:
        raise UsageError("--trust-remote-code means nothing without a model of yours; add --model, or leave it out")
    if model.stable_embedding:
        require_package("bitsandbytes", "--stable-embedding")


def _check_lora(model: ModelSpec) -> None:
    if model.freeze:
        raise UsageError(
            f"--freeze {' '.join(model.freeze)} with --lora-r {model.lora_r}: LoRA freezes the whole model already, "
            "but for its head; give one of the two"
        )
    if model.stable_embedding:
        raise UsageError(
            f"--stable-embedding with --lora-r {model.lora_r}: adapters are saved without the embeddings' new "
            "LayerNorms; give one of the two"
        )
    if ALL_LINEAR in model.lora_targets and len(model.lora_targets) > 1:
        raise UsageError(
            f"--lora-targets {','.join(model.lora_targets)}: {ALL_LINEAR} stands for every linear layer; "
            "give it alone, or names alone"
        )
    with quiet_libraries():
        require_package("peft", "--lora-r")


@contextmanager
def quiet_libraries() -> Iterator[None]:
    """Keep warnings and log lines of other libraries off the terminal.

    peft imports torchao where it is installed, which logs about libraries for other devices, and warns about what it
    then sets right by itself, such as `fan_in_fan_out` for the layers of GPT-2 (peft 0.21).
    """
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
