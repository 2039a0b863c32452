"""`effcli compare`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from effcli.cli import options as o
from effcli.cli.flags import given_fields

Optimizers = Annotated[
    list[str] | None,
    typer.Argument(
        help="Optimizers, by a name that `effcli optimizers` lists or as package.module:Class; with settings of its "
        "own: adam8bit,lr=1e-4,keep_32bit=embed. Default: adamw adafactor adam8bit.",
        metavar="OPTIM",
        show_default=False,
    ),
]
Model = Annotated[o.Text, o.option("Folder or hub id. Default: the built-in model.", o.MODEL, "FOLDER|ID")]
Out = Annotated[o.Text, o.option("Folder of the comparison. Default: a dated folder under runs/.", o.OUTPUT, "FOLDER")]
Overwrite = Annotated[bool, o.option("Replace the comparison that --out holds.", o.OUTPUT, name="--overwrite")]
Resume = Annotated[
    bool,
    o.option("Make the runs that the comparison in --out lacks; it knows its optimizers and flags.", o.OUTPUT,
             name="--resume"),
]  # fmt: skip
Keep = Annotated[
    o.Text, o.option("Checkpoints kept. Default: 1, and none of a run that is complete.", o.OUTPUT, "INTEGER")
]
EstimateOnly = Annotated[
    bool, o.option("Predict and stop: nothing is trained and, unless asked, written.", o.OUTPUT, name="--estimate-only")
]
Seeds = Annotated[
    int | None,
    o.option("Make each run with so many seeds, from --seed on. Default: 1.", o.LOOP, "INTEGER", name="--seeds"),
]
Html = Annotated[
    o.Text, o.option("Page with table and charts. Default: compare.html in --out.", o.OUTPUT, "FILE", name="--html")
]
Plot = Annotated[o.Text, o.option("Chart as .png or .svg. Default: none.", o.OUTPUT, "FILE", name="--plot")]
Csv = Annotated[o.Text, o.option("Table as .csv. Default: none.", o.OUTPUT, "FILE", name="--csv")]


def compare(
    ctx: typer.Context,
    optimizers: Optimizers = None,
    model: Model = None,
    task: o.Task = None,
    freeze: o.Freeze = None,
    attn: o.Attn = None,
    trust_remote_code: o.TrustRemoteCode = None,
    stable_embedding: o.StableEmbedding = None,
    lora_r: o.LoraR = None,
    lora_targets: o.LoraTargets = None,
    lora_alpha: o.LoraAlpha = None,
    lora_dropout: o.LoraDropout = None,
    data: o.Data = None,
    eval_data: o.EvalData = None,
    eval_fraction: o.EvalFraction = None,
    text_column: o.TextColumn = None,
    label_column: o.LabelColumn = None,
    delimiter: o.Delimiter = None,
    encoding: o.Encoding = None,
    max_length: o.MaxLength = None,
    max_target_length: o.MaxTargetLength = None,
    limit_rows: o.LimitRows = None,
    lr: o.LearningRate = None,
    beta1: o.Beta1 = None,
    beta2: o.Beta2 = None,
    eps: o.Eps = None,
    optim_arg: o.OptimArg = None,
    weight_decay: o.WeightDecay = None,
    keep_32bit: o.Keep32bit = None,
    min_8bit_size: o.Min8bitSize = None,
    optim_bits: o.OptimBits = None,
    override: o.OverrideOption = None,
    engine: o.Engine = None,
    device: o.Device = None,
    precision: o.Precision = None,
    batch_size: o.BatchSize = None,
    eval_batch_size: o.EvalBatchSize = None,
    accum: o.Accum = None,
    auto_batch: o.AutoBatch = None,
    longest_first: o.LongestFirst = None,
    epochs: o.Epochs = None,
    max_steps: o.MaxSteps = None,
    scheduler: o.Scheduler = None,
    warmup_ratio: o.WarmupRatio = None,
    max_grad_norm: o.MaxGradNorm = None,
    percentile_clipping: o.PercentileClipping = None,
    gradient_checkpointing: o.GradientCheckpointing = None,
    compile: o.Compile = None,  # noqa: A002
    seed: o.Seed = None,
    seeds: Seeds = None,
    num_workers: o.NumWorkers = None,
    nvml_interval: o.NvmlInterval = None,
    out: Out = None,
    overwrite: Overwrite = False,
    resume: Resume = False,
    save_every: o.SaveEvery = None,
    keep: Keep = None,
    logging_steps: o.LoggingSteps = None,
    track: o.Track = None,
    tolerance: o.Tolerance = None,
    recipe: o.Recipe = None,
    sets: o.Set = None,
    estimate_only: EstimateOnly = False,
    html: Html = None,
    plot: Plot = None,
    csv: Csv = None,
    as_json: o.Json = False,
    quiet: o.Quiet = False,
    verbose: o.Verbose = False,
) -> None:
    """Train with several optimizers, each from the same start in a process of its own, and compare them.

    Memory is predicted beside measured; speed and what was learnt stand beside it.
    """
    flags = given_fields(ctx.params)

    from effcli import pipeline  # pydantic and YAML: not for --help
    from effcli.report.exports import check_exports, unasked_page, write_exports
    from effcli.report.output import emit_comparison, emit_files
    from effcli.report.progress import make_progress

    comparison = pipeline.resolve_comparison(
        optimizers or (), flags, recipe=recipe, sets=sets or (), seeds=seeds, resume=resume
    )
    check_exports(html=html, plot=plot, csv=csv)
    progress = partial(make_progress, comparison.logging_steps, quiet)
    page: Path | str | None = html
    if estimate_only:
        record = pipeline.plan_comparison(comparison, make_progress=progress)
    else:
        page = html or unasked_page(comparison.page, quiet=quiet)
        record = pipeline.compare(
            comparison, make_progress=progress, resume=resume, overwrite=overwrite, verbose=verbose
        )
    emit_comparison(record, json=as_json, quiet=quiet, folder=None if estimate_only else comparison.out, said=True)
    with pipeline.checking_compared(record, comparison.out):
        emit_files(write_exports(record, html=page, plot=plot, csv=csv), json=as_json)
    if comparison.tolerance is not None:
        progress().note(pipeline.check_predictions(record, comparison.tolerance))
