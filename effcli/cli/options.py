"""Flags of commands: one annotated type each. A default of None means "not given", so that recipes can say it."""

from __future__ import annotations

from typing import Annotated, Any

import typer

MODEL, DATA, OPTIM, LOOP, OUTPUT = "Model", "Data", "Optimizer", "Loop", "Output"

Text = str | None
"""Numbers too: the specification reads them, so that a wrong one is refused in the same words everywhere."""
Texts = list[str] | None
Switch = bool | None


def option(help_text: str, panel: str, metavar: str | None = None, *, name: str | None = None) -> Any:
    """Return an option that is left to recipe and defaults where it is not given; `panel` is its part of the help."""
    names = (name,) if name else ()
    return typer.Option(*names, help=help_text, metavar=metavar, rich_help_panel=panel, show_default=False)


ModelArgument = Annotated[
    Text,
    typer.Argument(help="Folder or hub id; without it the built-in model.", metavar="MODEL", show_default=False),
]
Model = Annotated[Text, option("The same as the argument MODEL.", MODEL, "FOLDER|ID")]
Task = Annotated[Text, option("classification, causal-lm or seq2seq. Guessed, and said.", MODEL, "NAME")]
Freeze = Annotated[Texts, option("Do not train parameters whose name matches; repeatable.", MODEL, "PATTERN")]


def attn(panel: str) -> Any:
    """Return the option for the implementation of attention, in a panel of the help."""
    return option("Attention: sdpa, eager or flash_attention_2. Default: transformers' choice.", panel, "NAME")


Attn = Annotated[Text, attn(MODEL)]
TrustRemoteCode = Annotated[
    Switch,
    option("Run Python code that comes with the model. Default: refuse it.", MODEL, name="--trust-remote-code"),
]
StableEmbedding = Annotated[
    Switch,
    option("Replace embeddings by bitsandbytes' StableEmbedding (adds a LayerNorm).", MODEL, name="--stable-embedding"),
]
LoraR = Annotated[Text, option("Train LoRA adapters of this rank, and a new head, alone.", MODEL, "INTEGER")]
LoraTargets = Annotated[
    Texts, option("Layers that get adapters: names, or all-linear. Default: peft's choice.", MODEL, "NAME,NAME")
]
LoraAlpha = Annotated[Text, option("Scale of the adapters. Default: twice the rank.", MODEL, "NUMBER")]
LoraDropout = Annotated[Text, option("Dropout before the adapters. Default: 0.", MODEL, "NUMBER")]

Data = Annotated[
    Text,
    option(
        "CSV, TSV, JSON lines or Parquet file, save_to_disk folder, or hub id like glue/mrpc. Default: built-in pairs.",
        DATA,
        "PATH|ID",
    ),
]
EvalData = Annotated[
    Text, option("Evaluation rows. Default: the data's validation split, if it has one.", DATA, "PATH|ID")
]
EvalFraction = Annotated[
    Text, option("Keep this share of the training rows for evaluation, drawn by --seed. Default: none.", DATA, "NUMBER")
]
TextColumn = Annotated[Texts, option("Text (source) column; twice for pairs. Guessed by name.", DATA, "NAME")]
LabelColumn = Annotated[Text, option("Label (target text) column. Guessed by name.", DATA, "NAME")]
Delimiter = Annotated[Text, option("Field separator of CSV files. Guessed.", DATA, "CHARACTER")]
Encoding = Annotated[Text, option("Text encoding of files. Default: utf-8.", DATA, "NAME")]
MaxLength = Annotated[Text, option("Tokens kept per row. Default: the model's limit, at most 512.", DATA, "INTEGER")]
MaxTargetLength = Annotated[Text, option("Tokens kept of a seq2seq target. Default: as --max-length.", DATA, "INTEGER")]
LimitRows = Annotated[Text, option("Use only the first rows of the training data.", DATA, "INTEGER")]

Optim = Annotated[
    Text,
    option(
        "Optimizer, by a name that `effcli optimizers` lists or as package.module:Class. Default: adamw.",
        OPTIM,
        "NAME|CLASS",
    ),
]
LearningRate = Annotated[Text, option("Learning rate. Default: the optimizer's.", OPTIM, "NUMBER", name="--lr")]
Beta1 = Annotated[Text, option("Decay of the first moment. Default: the optimizer's.", OPTIM, "NUMBER")]
Beta2 = Annotated[Text, option("Decay of the second moment. Default: the optimizer's.", OPTIM, "NUMBER")]
Eps = Annotated[Text, option("Term added to the denominator. Default: the optimizer's.", OPTIM, "NUMBER")]
OptimArg = Annotated[Texts, option("Another hyperparameter by its upstream name; repeatable.", OPTIM, "KEY=VALUE")]
WeightDecay = Annotated[Text, option("Decay of weights, never of biases and norms. Default: 0.01.", OPTIM, "NUMBER")]
Keep32bit = Annotated[
    Texts,
    option("Keep the state of matching parameters in 32 bit; repeatable.", OPTIM, "PATTERN", name="--keep-32bit"),
]
Min8bitSize = Annotated[
    Text, option("Smaller parameters keep 32-bit state. Default: 4096.", OPTIM, "INTEGER", name="--min-8bit-size")
]
OptimBits = Annotated[
    Text, option("8 or 32: bits of bitsandbytes' state. Default: what the name says.", OPTIM, "INTEGER")
]
OverrideOption = Annotated[
    Texts,
    option(
        "Other hyperparameters for matching parameters, as in 'embed:lr=1e-5,beta2=0.98'; repeatable.",
        OPTIM,
        "PATTERN:KEY=VALUE",
        name="--override",
    ),
]

Engine = Annotated[Text, option("pytorch, accelerate or trainer. Default: pytorch.", LOOP, "NAME")]
Device = Annotated[Text, option("auto, cpu, cuda or cuda:N. Default: auto.", LOOP, "NAME")]
Shard = Annotated[
    Text,
    option(
        "What each process that torchrun starts holds: ddp (all), fsdp, zero1 to zero3 (shares). Default: ddp.",
        LOOP,
        "NAME",
    ),
]
Precision = Annotated[
    Text, option("fp32; bf16 or fp16 autocast over fp32 weights; bf16-pure. Default: fp32.", LOOP, "NAME")
]
BatchSize = Annotated[Text, option("Rows per micro-batch, in each process. Default: 8.", LOOP, "INTEGER")]
EvalBatchSize = Annotated[Text, option("Rows per evaluation batch. Default: the batch size.", LOOP, "INTEGER")]
Accum = Annotated[Text, option("Micro-batches accumulated per update. Default: 1.", LOOP, "INTEGER")]
AutoBatch = Annotated[
    Switch,
    option(
        "When memory runs out, go on with a smaller batch and a larger --accum; the rows per update stay the same.",
        LOOP,
        name="--auto-batch",
    ),
]
LongestFirst = Annotated[
    Switch,
    option("Begin with the longest rows: what cannot fit fails at once.", LOOP, name="--longest-first"),
]
Epochs = Annotated[Text, option("Passes over the training data. Default: 3.", LOOP, "INTEGER")]
MaxSteps = Annotated[Text, option("Stop after this many updates, whatever --epochs says.", LOOP, "INTEGER")]
Scheduler = Annotated[Text, option("linear, cosine or constant over updates. Default: linear.", LOOP, "NAME")]
WarmupRatio = Annotated[Text, option("Share of the updates spent warming up. Default: 0.", LOOP, "NUMBER")]
MaxGradNorm = Annotated[Text, option("Clip the gradient norm once per update; 0: never. Default: 1.", LOOP, "NUMBER")]
PercentileClipping = Annotated[
    Text, option("Clip at this percentile of the last 100 gradient norms. Default: off.", LOOP, "NUMBER")
]
GradientCheckpointing = Annotated[
    Switch,
    option(
        "Recompute activations instead of keeping them.",
        LOOP,
        name="--gradient-checkpointing",
    ),
]
Compile = Annotated[Switch, option("Compile the layers of the model with torch.compile.", LOOP, name="--compile")]
ProfileMemory = Annotated[
    Switch,
    option("On a CPU: measure the allocated peak of one warm update.", LOOP, name="--profile-memory"),
]
Seed = Annotated[Text, option("Seed of weights, dropout and data order. Default: 42.", LOOP, "INTEGER")]
NumWorkers = Annotated[Text, option("Processes that prepare batches. Default: 0.", LOOP, "INTEGER")]
NvmlInterval = Annotated[
    Text, option("On a GPU: seconds between readings of the NVIDIA driver; 0: none. Default: 0.2.", LOOP, "SECONDS")
]

Out = Annotated[Text, option("Run folder. Default: a dated folder under runs/.", OUTPUT, "FOLDER")]
Overwrite = Annotated[bool, option("Replace the run that --out holds.", OUTPUT, name="--overwrite")]
Resume = Annotated[bool, option("Continue the run that --out holds.", OUTPUT, name="--resume")]
SaveEvery = Annotated[Text, option("Updates between checkpoints. Default: each epoch.", OUTPUT, "INTEGER")]
Keep = Annotated[Text, option("Checkpoints kept. Default: 2.", OUTPUT, "INTEGER")]
LoggingSteps = Annotated[
    Text, option("Updates between progress lines, and tracked losses. Default: 10.", OUTPUT, "INTEGER")
]
Track = Annotated[
    Texts, option("Log to tensorboard, wandb, mlflow or trackio as well; repeatable. Default: none.", OUTPUT, "NAME")
]
Tolerance = Annotated[
    Text,
    option(
        "After the run, exit with code 6 where memory is off its prediction by more than this. Default: never.",
        OUTPUT,
        "PERCENT",
    ),
]
Recipe = Annotated[Text, option("Start from a recipe; flags beat it.", OUTPUT, "NAME|FILE")]
Set = Annotated[Texts, option("Set any field, such as loop.accum=2; repeatable.", OUTPUT, "A.B=C", name="--set")]
DryRun = Annotated[bool, option("Check everything, data included, print the plan, and stop.", OUTPUT, name="--dry-run")]
Json = Annotated[bool, option("Print the record as one JSON document.", OUTPUT, name="--json")]
Quiet = Annotated[bool, option("No progress and no notes.", OUTPUT, name="--quiet")]
Verbose = Annotated[bool, option("Show the traceback of an unexpected fault.", OUTPUT, name="--verbose")]
