"""`effcli estimate`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from effcli.cli import options as o
from effcli.cli import peak_options as p
from effcli.cli.flags import given_fields, one_model

Optimizers = Annotated[
    o.Texts,
    o.option(
        "Optimizer, by a name that `effcli optimizers` lists or as package.module:Class; repeatable; all: every one. "
        "Default: a choice from adamw to what saves most.",
        o.OPTIM,
        "NAME|CLASS|all",
        name="--optim",
    ),
]
PerLayer = Annotated[bool, o.option("Show the amounts of each layer.", o.OUTPUT, name="--per-layer")]
Top = Annotated[int, typer.Option("--top", help="Show so many of the largest tensors.", metavar="INTEGER", min=0)]


def estimate(
    ctx: typer.Context,
    model_argument: p.ModelArgument = None,
    model: o.Model = None,
    task: p.Task = None,
    num_labels: p.NumLabels = None,
    freeze: o.Freeze = None,
    trust_remote_code: o.TrustRemoteCode = None,
    stable_embedding: o.StableEmbedding = None,
    lora_r: o.LoraR = None,
    lora_targets: o.LoraTargets = None,
    optim: Optimizers = None,
    beta1: o.Beta1 = None,
    optim_arg: o.OptimArg = None,
    keep_32bit: o.Keep32bit = None,
    min_8bit_size: o.Min8bitSize = None,
    optim_bits: o.OptimBits = None,
    override: o.OverrideOption = None,
    world_size: p.WorldSize = None,
    shard: p.Shard = None,
    precision: o.Precision = None,
    batch_size: p.BatchSize = None,
    max_length: p.MaxLength = None,
    max_target_length: p.MaxTargetLength = None,
    accum: p.Accum = None,
    gradient_checkpointing: p.GradientCheckpointing = None,
    max_grad_norm: p.MaxGradNorm = None,
    attn: p.Attn = None,
    device: p.Device = None,
    gpu: p.Gpu = None,
    budget: p.Budget = None,
    timeline: p.Timeline = None,
    per_layer: PerLayer = False,
    top: Top = 0,
    as_json: o.Json = False,
    quiet: o.Quiet = False,
    verbose: o.Verbose = False,
) -> None:
    """Say what a model and optimizers hold before activations and, with --batch-size, --gpu, ..., at the peak.

    Needs no weights, no GPU and mostly no network.
    """
    flags = given_fields({**ctx.params, "model": one_model(model_argument, model)})

    from effcli import pipeline  # pydantic: not for --help
    from effcli.report.output import emit_estimate

    spec, notes = pipeline.resolve_estimate(flags)
    if timeline is not None:
        from effcli.report.timeline import require_plotting, write_timeline

        require_plotting(timeline)
    record = pipeline.estimate(spec, per_layer=per_layer, top=top, notes=notes)
    emit_estimate(record, json=as_json, quiet=quiet)
    if timeline is not None:
        write_timeline(record, Path(timeline))
    pipeline.check_budget(record)
