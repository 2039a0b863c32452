"""Predicted against measured on the CUDA device of this machine: `max_memory_allocated` and `max_memory_reserved`.

    python -m tests.accuracy.gpu [--out FILE.md]

Each combination is measured in a process of its own, so that its allocator and cuBLAS start anew.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import torch
import transformers
from torch.nn.utils import clip_grad_norm_

from effcli.catalogue import lookup
from effcli.devices import weights_dtype
from effcli.engines.precision import autocast
from effcli.engines.window import WindowLoss
from effcli.memory.caching_allocator import CachingAllocator
from effcli.models.build import recompute_activations
from effcli.models.own_code import config_of
from effcli.models.tasks import head_for
from effcli.optim import registry
from effcli.optim.groups import decay_groups
from effcli.pipeline.predicting import Choice, Predictor, Settings, Subject, Target
from effcli.spec import OptimSpec
from effcli.trace.cuda import CudaKernels

MODELS = {
    "distilbert-base-uncased": "classification",
    "bert-base-uncased": "classification",
    "gpt2": "causal-lm",
    "HuggingFaceTB/SmolLM2-135M": "causal-lm",
    "t5-small": "seq2seq",
}
OPTIMIZERS = ("adamw", "adafactor", "adam8bit")
PRECISIONS = ("fp32", "bf16")
ROWS, TOKENS = 8, 256
UPDATES = 2
DEVICE = "cuda"
NO_DEVICE = 4

Case = Mapping[str, Any]


def main() -> int:
    """Measure and predict every combination, print the table and its summary."""
    parser = argparse.ArgumentParser(description="Predicted against measured memory on this machine's CUDA device.")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if not torch.cuda.is_available():
        print(f"error: torch {torch.__version__} finds no CUDA device to measure on", file=sys.stderr)
        return NO_DEVICE
    if asked.measure is not None:
        print(json.dumps(measured(json.loads(asked.measure))))
        return 0
    lines, errors = [], []
    for case in cases():
        real, ours = _measured_apart(case), predicted(case)
        found = [our / true - 1 for our, true in zip(ours, real, strict=True)] if real else []
        errors += found[:UPDATES]
        lines.append(_line(case, real, ours, found))
        print(lines[-1], flush=True)
    sizes = [abs(error) for error in errors]
    summary = f"{len(sizes)} peaks allocated: median absolute error {median(sizes):.2%}, largest {max(sizes):.2%}"
    print(summary)
    if asked.out is not None:
        title = f"{torch.cuda.get_device_name()}, torch {torch.__version__}, transformers {transformers.__version__}"
        asked.out.write_text("\n".join((title, "", *HEADER, *lines, "", summary, "")), encoding="utf-8")
    return 0


HEADER = (
    "| combination | first | predicted | error | later | predicted | error | reserved | predicted | error |",
    "|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
)


def cases() -> Iterator[Case]:
    """Yield the combinations."""
    for model, optim, precision, checkpointing in product(MODELS, OPTIMIZERS, PRECISIONS, (False, True)):
        yield {"model": model, "optim": optim, "precision": precision, "checkpointing": checkpointing}


def predicted(case: Case) -> list[int]:
    """Return the predicted peaks of a first and a later update and what is reserved, in bytes."""
    subject = Subject(
        build=lambda dtype, recompute: _model(case, dtype, recompute=recompute, device="meta"),
        config=_config(case),
        task=MODELS[case["model"]],
        can_recompute=True,
    )
    kernels = CudaKernels(capability=torch.cuda.get_device_capability())
    target = Target(device=DEVICE, kernels=kernels, allocator=CachingAllocator)
    settings = Settings(
        batch_size=ROWS,
        max_length=TOKENS,
        precision=case["precision"],
        gradient_checkpointing=case["checkpointing"],
    )
    entry = registry.find(case["optim"])
    choice = Choice.of(entry, registry.default_hyper(entry), OptimSpec())
    played = Predictor(subject, target).replay(settings, choice)
    peaks = [
        max(moment.total_bytes for moment in played.moments if moment.update == number) for number in range(UPDATES)
    ]
    return [*peaks, played.reserved_bytes]


def measured(case: Case) -> list[int]:
    """Return the same numbers as torch's counters have them."""
    model = _model(case, weights_dtype(case["precision"]), recompute=case["checkpointing"], device=DEVICE).train()
    entry, optim = registry.find(case["optim"]), OptimSpec()
    decay = optim.weight_decay if entry.takes_weight_decay else 0.0
    optimizer = entry.build(decay_groups(model, decay), registry.default_hyper(entry))
    update = _update_of(case, model, optimizer)
    peaks, reserved = [], 0
    for _ in range(UPDATES):
        torch.cuda.reset_peak_memory_stats()
        update()
        torch.cuda.synchronize()
        peaks.append(torch.cuda.max_memory_allocated())
        reserved = max(reserved, torch.cuda.max_memory_reserved())
    return [*peaks, reserved]


def _update_of(case: Case, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """Return the function that makes one update as the pytorch engine does."""
    task, device = MODELS[case["model"]], torch.device(DEVICE)
    window = WindowLoss(task) if task in ("classification", "causal-lm") else None
    parameters = list(model.parameters())

    def micro_step() -> None:
        ids = torch.ones(ROWS, TOKENS, dtype=torch.int64, device=device)
        labels = torch.ones(ROWS, dtype=torch.int64, device=device) if task == "classification" else ids
        with autocast(device, case["precision"]):
            outputs = model(input_ids=ids) if window else model(input_ids=ids, labels=labels).loss
        loss = window.scaled(outputs.logits, labels, labels.numel()) if window else outputs
        loss.backward()

    def update() -> None:
        micro_step()
        clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return update


def _model(case: Case, dtype: str, *, recompute: bool, device: str) -> torch.nn.Module:
    auto = getattr(transformers, head_for(MODELS[case["model"]]).auto_class)
    with torch.device(device):
        model = auto.from_config(_config(case), dtype=getattr(torch, dtype))
    if recompute:
        recompute_activations(model, case["model"])
    return model  # type: ignore[no-any-return]


def _config(case: Case) -> Any:
    known = lookup.find(case["model"])
    assert known is not None
    config = config_of(case["model"], known.config, trust=False)
    if getattr(config, "use_cache", None):
        config.use_cache = False  # as the engines have it
    return config


def _measured_apart(case: Case) -> list[int]:
    """Return what a process of its own measures; nothing where it ends with an error."""
    command = [sys.executable, "-m", "tests.accuracy.gpu", "--measure", json.dumps(case)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        print(f"{case}: {done.stderr.strip().splitlines()[-1:]}", file=sys.stderr)
        return []
    found: list[int] = json.loads(done.stdout.splitlines()[-1])
    return found


def _line(case: Case, real: Sequence[int], ours: Sequence[int], errors: Sequence[float]) -> str:
    name = f"{case['model']} {case['optim']} {case['precision']}{' checkpointing' if case['checkpointing'] else ''}"
    triples = zip(real or ("",) * 3, ours, errors or ("",) * 3, strict=True)
    cells = (f"{true:,} | {our:,} | {error:+.2%}" if true else f" | {our:,} | " for true, our, error in triples)
    return f"| {name} | {' | '.join(cells)} |"


if __name__ == "__main__":
    raise SystemExit(main())
