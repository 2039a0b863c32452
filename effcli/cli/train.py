"""`effcli train`."""

from __future__ import annotations

import typer

from effcli.cli import options as o
from effcli.cli.flags import given_fields, one_model


def train(
    ctx: typer.Context,
    model_argument: o.ModelArgument = None,
    model: o.Model = None,
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
    optim: o.Optim = None,
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
    shard: o.Shard = None,
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
    profile_memory: o.ProfileMemory = None,
    seed: o.Seed = None,
    num_workers: o.NumWorkers = None,
    nvml_interval: o.NvmlInterval = None,
    out: o.Out = None,
    overwrite: o.Overwrite = False,
    resume: o.Resume = False,
    save_every: o.SaveEvery = None,
    keep: o.Keep = None,
    logging_steps: o.LoggingSteps = None,
    track: o.Track = None,
    tolerance: o.Tolerance = None,
    recipe: o.Recipe = None,
    sets: o.Set = None,
    dry_run: o.DryRun = False,
    as_json: o.Json = False,
    quiet: o.Quiet = False,
    verbose: o.Verbose = False,
) -> None:
    """Train a model and report its memory, estimated beside measured."""
    flags = given_fields({**ctx.params, "model": one_model(model_argument, model)})

    from effcli import pipeline  # pydantic and YAML: not for --help
    from effcli.ranks.launch import read_launch
    from effcli.report.output import emit
    from effcli.report.progress import make_progress

    spec = pipeline.resolve_spec(flags, recipe=recipe, sets=sets or (), resume_from=out if resume else None)
    is_main = read_launch().is_main
    progress = make_progress(spec.output.logging_steps, quiet or not is_main)
    if dry_run:
        record = pipeline.plan(spec, progress=progress)
    else:
        record = pipeline.train(spec, progress=progress, resume=resume, overwrite=overwrite)
    if not is_main:  # rank 0 speaks for all
        return
    emit(record, json=as_json, quiet=quiet)
    if spec.output.tolerance is not None:
        progress.note(pipeline.check_prediction(record, spec.output.tolerance))
