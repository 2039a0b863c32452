"""`effcli plan`."""

from __future__ import annotations

from typing import Annotated

import typer

from effcli.cli import options as o
from effcli.cli import peak_options as p
from effcli.cli.flags import given_fields, one_model

SEARCH = "What must fit, and what is tried"

Optimizers = Annotated[
    o.Texts,
    o.option(
        "Optimizer to try, by a name that `effcli optimizers` lists; repeatable; all: every one. "
        "Default: adamw, adafactor and adamw8bit.",
        SEARCH,
        "NAME|CLASS|all",
        name="--optim",
    ),
]
Precisions = Annotated[
    o.Texts,
    o.option("Precision to try; repeatable. Default: bf16 (fp16 on older cards) and fp32.", SEARCH, "NAME"),
]
Gpu = Annotated[o.Text, p.gpu(SEARCH)]
Gpus = Annotated[o.Text, o.option("Cards of this kind, one process each. Default: 1.", SEARCH, "INTEGER")]
Shards = Annotated[
    o.Texts,
    o.option(
        "What each of several cards holds: ddp (all of it), fsdp, zero1, zero2 or zero3 (shares); repeatable. "
        "Default: ddp and fsdp.",
        SEARCH,
        "NAME",
        name="--shard",
    ),
]
Margin = Annotated[o.Text, o.option("Percent of it that stays free. Default: 10.", SEARCH, "NUMBER")]
EffectiveBatch = Annotated[
    o.Text, o.option("Rows per update: micro-batch times accumulation times cards. Default: 32.", SEARCH, "INTEGER")
]
Out = Annotated[o.Text, o.option("Write the chosen configuration as a recipe.", o.OUTPUT, "FILE")]
Choose = Annotated[o.Text, o.option("Row of the table that --out writes. Default: 1.", o.OUTPUT, "INTEGER")]
Overwrite = Annotated[bool, o.option("Replace the file that --out names.", o.OUTPUT, name="--overwrite")]


def plan(
    ctx: typer.Context,
    model_argument: p.ModelArgument = None,
    model: o.Model = None,
    task: p.Task = None,
    num_labels: p.NumLabels = None,
    freeze: o.Freeze = None,
    attn: o.Attn = None,
    trust_remote_code: o.TrustRemoteCode = None,
    stable_embedding: o.StableEmbedding = None,
    lora_r: o.LoraR = None,
    lora_targets: o.LoraTargets = None,
    gpu: Gpu = None,
    gpus: Gpus = None,
    shard: Shards = None,
    margin: Margin = None,
    effective_batch: EffectiveBatch = None,
    max_length: p.MaxLength = None,
    max_target_length: p.MaxTargetLength = None,
    max_grad_norm: p.MaxGradNorm = None,
    optim: Optimizers = None,
    precision: Precisions = None,
    optim_arg: o.OptimArg = None,
    keep_32bit: o.Keep32bit = None,
    min_8bit_size: o.Min8bitSize = None,
    out: Out = None,
    choose: Choose = None,
    overwrite: Overwrite = False,
    as_json: o.Json = False,
    quiet: o.Quiet = False,
    verbose: o.Verbose = False,
) -> None:
    """Search settings that fit a card: optimizer, micro-batch, accumulation, precision and recomputation."""
    flags = given_fields({**ctx.params, "model": one_model(model_argument, model)})

    from effcli import pipeline  # pydantic: not for --help
    from effcli.report.output import emit_search

    spec, notes = pipeline.resolve_search(flags)
    record = pipeline.search(spec, overwrite=overwrite, notes=notes)
    emit_search(record, json=as_json, quiet=quiet)
    pipeline.check_found(record)
