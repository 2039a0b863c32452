"""What a prepared and built run says about itself: the parts of a record that exist before training."""

from __future__ import annotations

import os
import platform
from typing import TYPE_CHECKING, Any

from effcli import __version__
from effcli.data.baselines import baselines
from effcli.measure.allocator_settings import allocator_settings
from effcli.measure.record import (
    Baselines,
    BatchFacts,
    DataFacts,
    GroupFacts,
    RunRecord,
)
from effcli.memory.plan import MemoryPlan, exact_plan
from effcli.memory.state import paged_notes, predict_state
from effcli.models.lora import plain_model
from effcli.optim.groups import split_groups
from effcli.packages import installed_version
from effcli.pipeline.amounts import model_facts, optimizer_facts
from effcli.pipeline.ranks import distribution, spread
from effcli.units import Placement, format_bytes

if TYPE_CHECKING:
    from effcli.pipeline.build import Built
    from effcli.pipeline.prepare import Prepared

PACKAGES = ("torch", "transformers", "accelerate", "datasets", "bitsandbytes", "tokenizers", "safetensors", "peft",
    "torchao", "galore-torch", "schedulefree", "pytorch_optimizer")  # fmt: skip


def planned_record(prepared: Prepared, built: Built, plan: MemoryPlan | None, *, out: str | None) -> RunRecord:
    """Return the record of a run that has not started: specification, environment, model, data and plan.

    Without a plan, where the model could not be traced, the plan has what follows from shapes alone. Of several
    processes the amounts are those of the first, and each has its own.

    Raises:
        UsageError: a parameter cannot be sharded as asked.
    """
    loop = prepared.spec.loop
    held = spread(built.parameters, prepared.sharding, loop.precision)
    state = predict_state(prepared.entry, held[0].parameters, built.hyper) if held else built.state
    model = model_facts(
        name=prepared.source.name,
        architecture=own_class_name(plain_model(built.model)),
        task=prepared.problem.task,
        parameters=built.parameters,
        share=held[0] if held else None,
    )
    optimizer = optimizer_facts(prepared.entry, built.hyper, state, model, device=prepared.device.type, held=held)
    notes = plan.notes if plan else paged_notes(prepared.entry, state, device=prepared.device.type)
    plan = plan or exact_plan(
        weights_bytes=model.weights_bytes,
        gradients_bytes=model.gradients_bytes,
        optimizer_state_bytes=optimizer.placements.get(Placement.DEVICE, 0),
        accum=loop.accum,
        state_basis=state.basis,
    )
    return RunRecord(
        command="train",
        spec=prepared.spec.model_dump(mode="json"),
        environment=environment(prepared, out),
        distribution=distribution(prepared.sharding),
        model=model,
        optimizer=optimizer.model_copy(update={"plan": plan}),
        batch=BatchFacts.of(micro=loop.batch_size, accum=loop.accum, world_size=prepared.launch.world_size),
        groups=tuple(
            GroupFacts(
                weight_decay=group["weight_decay"],
                num_tensors=len(group["params"]),
                num_elements=sum(parameter.numel() for parameter in group["params"]),
            )
            for group in split_groups(built.groups, built.hyper)
        ),
        data=DataFacts(
            train_rows=prepared.data.train_rows,
            eval_rows=prepared.data.eval_rows,
            skipped_rows=prepared.data.skipped_rows,
            truncated_rows=prepared.data.truncated_rows,
            truncated_targets=prepared.data.truncated_targets,
        ),
        total_updates=prepared.total_updates,
        baselines=_baselines(prepared),
        notes=(*prepared.notes, *built.weight_notes, *built.notes, *notes),
    )


def own_class_name(model: object) -> str:
    """Return the name of a model's class, below the one that torch's `fully_shard` (2.13) makes over it."""
    own = (kind for kind in type(model).__mro__ if not kind.__module__.startswith("torch.distributed"))
    return next(own).__name__


def expectation(record: RunRecord) -> str:
    """Return the sentence that is said before training: predicted bytes, part by part; of many, rank 0's."""
    model, optimizer = record.model, record.optimizer
    exchange_bytes = optimizer.per_rank[0].communication_bytes if optimizer.per_rank else 0
    exchange = f" + exchange {format_bytes(exchange_bytes)}" if exchange_bytes else ""
    whose = " on rank 0" if optimizer.per_rank else ""
    return (
        f"Expected before activations{whose}: {format_bytes(optimizer.total_before_activations_bytes)} = "
        f"weights {format_bytes(model.weights_bytes)} + gradients {format_bytes(model.gradients_bytes)} + "
        f"optimizer state {format_bytes(optimizer.state_bytes)}{exchange}."
    )


def environment(prepared: Prepared, out: str | None) -> dict[str, Any]:
    """Return versions, machine and device; no name of host or user beyond the paths that were given."""
    import torch

    device = prepared.device
    return {
        "effcli": __version__,
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "cpus": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "device": str(device),
        "allocator_settings": allocator_settings() if device.type == "cuda" else None,
        "device_name": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine(),
        "packages": {package: installed_version(package) for package in PACKAGES},
        "out": out,
    }


def _baselines(prepared: Prepared) -> Baselines | None:
    """Return the scores of two trivial models on the built-in data, so that leakage is not mistaken for learning."""
    raw, problem = prepared.raw, prepared.problem
    if prepared.spec.data.train is not None or problem.labels is None or raw.eval is None:
        return None
    train, evaluation = (
        (
            list(zip(*(table[column] for column in problem.text_columns), strict=True)),
            [int(problem.labels.encode(label)) for label in table[problem.label_column]],
        )
        for table in (raw.train, raw.eval)
    )
    return Baselines(**baselines(*train, *evaluation))
