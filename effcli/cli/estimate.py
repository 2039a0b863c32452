"""`effcli estimate`."""

from __future__ import annotations

from typing import Annotated

import typer

from effcli.cli import options as o
from effcli.cli.flags import given_fields, one_model

ModelArgument = Annotated[
    o.Text,
    typer.Argument(
        help="Name that `effcli models` lists, folder with a config.json, or hub id.",
        metavar="MODEL",
        show_default=False,
    ),
]
Task = Annotated[
    o.Text,
    o.option(
        "classification, causal-lm, masked-lm, seq2seq, token-classification, image-classification, ... "
        "Default: what people fine-tune such a model for.",
        o.MODEL,
        "NAME",
    ),
]
NumLabels = Annotated[
    o.Text, o.option("Classes of a classification head. Default: the model's own, or 2.", o.MODEL, "INTEGER")
]
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
    model_argument: ModelArgument = None,
    model: o.Model = None,
    task: Task = None,
    num_labels: NumLabels = None,
    freeze: o.Freeze = None,
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
    precision: o.Precision = None,
    per_layer: PerLayer = False,
    top: Top = 0,
    as_json: o.Json = False,
    quiet: o.Quiet = False,
    verbose: o.Verbose = False,
) -> None:
    """Say what a model and optimizers hold before activations; needs no weights, no GPU and mostly no network."""
    flags = given_fields({**ctx.params, "model": one_model(model_argument, model)})

    from effcli import pipeline  # pydantic: not for --help
    from effcli.report.output import emit_estimate

    spec, notes = pipeline.resolve_estimate(flags)
    record = pipeline.estimate(spec, per_layer=per_layer, top=top, notes=notes)
    emit_estimate(record, json=as_json, quiet=quiet)
