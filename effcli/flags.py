"""Which command line flag sets which field of a specification. Needs neither torch nor pydantic."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

FLAG_OF: dict[str, str] = {
    "model.name": "--model",
    "model.task": "--task",
    "model.freeze": "--freeze",
    "model.attn": "--attn",
    "model.trust_remote_code": "--trust-remote-code",
    "model.stable_embedding": "--stable-embedding",
    "model.lora_r": "--lora-r",
    "model.lora_targets": "--lora-targets",
    "model.lora_alpha": "--lora-alpha",
    "model.lora_dropout": "--lora-dropout",
    "data.train": "--data",
    "data.eval": "--eval-data",
    "data.eval_fraction": "--eval-fraction",
    "data.text_columns": "--text-column",
    "data.label_column": "--label-column",
    "data.delimiter": "--delimiter",
    "data.encoding": "--encoding",
    "data.max_length": "--max-length",
    "data.max_target_length": "--max-target-length",
    "data.limit_rows": "--limit-rows",
    "optim.name": "--optim",
    "optim.lr": "--lr",
    "optim.beta1": "--beta1",
    "optim.beta2": "--beta2",
    "optim.eps": "--eps",
    "optim.args": "--optim-arg",
    "optim.weight_decay": "--weight-decay",
    "optim.keep_32bit": "--keep-32bit",
    "optim.min_8bit_size": "--min-8bit-size",
    "optim.optim_bits": "--optim-bits",
    "optim.overrides": "--override",
    "loop.engine": "--engine",
    "loop.device": "--device",
    "loop.shard": "--shard",
    "loop.precision": "--precision",
    "loop.batch_size": "--batch-size",
    "loop.eval_batch_size": "--eval-batch-size",
    "loop.accum": "--accum",
    "loop.auto_batch": "--auto-batch",
    "loop.longest_first": "--longest-first",
    "loop.epochs": "--epochs",
    "loop.max_steps": "--max-steps",
    "loop.scheduler": "--scheduler",
    "loop.warmup_ratio": "--warmup-ratio",
    "loop.max_grad_norm": "--max-grad-norm",
    "loop.percentile_clipping": "--percentile-clipping",
    "loop.gradient_checkpointing": "--gradient-checkpointing",
    "loop.compile": "--compile",
    "loop.profile_memory": "--profile-memory",
    "loop.seed": "--seed",
    "loop.num_workers": "--num-workers",
    "loop.nvml_interval": "--nvml-interval",
    "output.out": "--out",
    "output.save_every": "--save-every",
    "output.keep": "--keep",
    "output.logging_steps": "--logging-steps",
    "output.track": "--track",
    "output.tolerance": "--tolerance",
}
"""Dotted field of `RunSpec` -> flag, in the order of the sections."""

ESTIMATE_FLAG_OF: dict[str, str] = {
    "model.num_labels": "--num-labels",
    "loop.world_size": "--world-size",
    "loop.gpu": "--gpu",
    "loop.budget": "--budget",
    "output.timeline": "--timeline",
}
"""Dotted field of an estimate or a search, and of no run -> flag."""

SEARCH_FLAG_OF: dict[str, str] = {
    "loop.effective_batch": "--effective-batch",
    "loop.gpus": "--gpus",
    "loop.margin": "--margin",
    "output.choose": "--choose",
}
"""Dotted field that only a search has -> flag."""


def field_label(dotted: str) -> str:
    """Return how a message names a field: `--accum (loop.accum)`, or the dotted name where no flag sets it.

    A position or key inside a field, as in `data.text_columns.2`, is named after the flag of that field, as is a field
    of one of several optimizers, `optim.0.lr`.
    """
    field = ".".join([part for part in dotted.split(".") if not part.isdecimal()][:2])
    flag = {**FLAG_OF, **ESTIMATE_FLAG_OF, **SEARCH_FLAG_OF}.get(field)
    return f"{flag} ({dotted})" if flag else dotted


def nest(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return dotted fields and their values as nested sections: `{"loop.accum": 2}` -> `{"loop": {"accum": 2}}`."""
    sections: dict[str, Any] = {}
    for dotted, value in values.items():
        *path, key = dotted.split(".")
        section = sections
        for name in path:
            section = section.setdefault(name, {})
        section[key] = value
    return sections
