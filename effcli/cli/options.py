"""Flags of `effcli train`: one annotated type each. A default of None means "not given", so that recipes can say it."""

from __future__ import annotations

from typing import Annotated

import typer

MODEL, DATA, OPTIM, LOOP, OUTPUT = "Model", "Data", "Optimizer", "Loop", "Output"


def _option(help_text: str, *, panel: str, metavar: str | None = None, name: str | None = None) -> object:
    names = (name,) if name else ()
    return typer.Option(*names, help=help_text, metavar=metavar, rich_help_panel=panel, show_default=False)


Text = str | None
"""Numbers too: the specification reads them, so that a wrong one is refused in the same words everywhere."""
Texts = list[str] | None
Switch = bool | None

ModelArgument = Annotated[
    Text, typer.Argument(help="Local folder or hub id; without it the small built-in model.", show_default=False)
]
Model = Annotated[Text, _option("The same as the argument MODEL.", panel=MODEL)]
Task = Annotated[
    Text,
    _option("What is learnt. Guessed from model and data, and said.", panel=MODEL, metavar="classification|causal-lm"),
]
Freeze = Annotated[
    Texts, _option("Do not train parameters whose name matches; repeatable.", panel=MODEL, metavar="PATTERN")
]

Data = Annotated[
    Text,
    _option(
        "CSV, TSV, JSON lines or Parquet file, save_to_disk folder, or hub id like glue/mrpc. Default: built-in pairs.",
        panel=DATA,
    ),
]
EvalData = Annotated[Text, _option("Evaluation rows. Default: the data's validation split, if it has one.", panel=DATA)]
TextColumn = Annotated[Texts, _option("Text column; twice for pairs. Guessed by name.", panel=DATA, metavar="NAME")]
LabelColumn = Annotated[Text, _option("Label column. Guessed by name.", panel=DATA, metavar="NAME")]
Delimiter = Annotated[Text, _option("Field separator of CSV files. Guessed.", panel=DATA, metavar="CHARACTER")]
Encoding = Annotated[Text, _option("Text encoding of files. Default: utf-8.", panel=DATA)]
MaxLength = Annotated[
    Text,
    _option(metavar="INTEGER", help_text="Tokens kept per row. Default: the model's limit, at most 512.", panel=DATA),
]
LimitRows = Annotated[
    Text, _option(metavar="INTEGER", help_text="Use only the first rows of the training data.", panel=DATA)
]

Optim = Annotated[
    Text,
    _option(
        "Optimizer: adamw, adafactor, adafactor-torch, adam8bit, adamw8bit, paged-adamw8bit, sgd. Default: adamw.",
        panel=OPTIM,
        metavar="NAME",
    ),
]
LearningRate = Annotated[
    Text, _option(metavar="NUMBER", help_text="Learning rate. Default: the optimizer's.", panel=OPTIM, name="--lr")
]
Beta1 = Annotated[
    Text, _option(metavar="NUMBER", help_text="Decay of the first moment. Default: the optimizer's.", panel=OPTIM)
]
Beta2 = Annotated[
    Text, _option(metavar="NUMBER", help_text="Decay of the second moment. Default: the optimizer's.", panel=OPTIM)
]
Eps = Annotated[
    Text, _option(metavar="NUMBER", help_text="Term added to the denominator. Default: the optimizer's.", panel=OPTIM)
]
OptimArg = Annotated[
    Texts, _option("Another hyperparameter by its upstream name; repeatable.", panel=OPTIM, metavar="KEY=VALUE")
]
WeightDecay = Annotated[
    Text,
    _option(metavar="NUMBER", help_text="Decay of weights, never of biases and norms. Default: 0.01.", panel=OPTIM),
]
Keep32bit = Annotated[
    Texts,
    _option(
        "Keep the state of matching parameters in 32 bit; repeatable.",
        panel=OPTIM,
        metavar="PATTERN",
        name="--keep-32bit",
    ),
]
Min8bitSize = Annotated[
    Text,
    _option(
        metavar="INTEGER",
        help_text="Smaller parameters keep 32-bit state. Default: 4096.",
        panel=OPTIM,
        name="--min-8bit-size",
    ),
]

Engine = Annotated[
    Text, _option("The loop that runs. Default: pytorch.", panel=LOOP, metavar="pytorch|accelerate|trainer")
]
Device = Annotated[Text, _option("Default: auto.", panel=LOOP, metavar="auto|cpu|cuda|cuda:N")]
Precision = Annotated[
    Text,
    _option(
        "Default: fp32. bf16 and fp16 are autocast over fp32 weights.", panel=LOOP, metavar="fp32|bf16|fp16|bf16-pure"
    ),
]
BatchSize = Annotated[Text, _option(metavar="INTEGER", help_text="Rows per micro-batch. Default: 8.", panel=LOOP)]
EvalBatchSize = Annotated[
    Text, _option(metavar="INTEGER", help_text="Rows per evaluation batch. Default: the batch size.", panel=LOOP)
]
Accum = Annotated[
    Text, _option(metavar="INTEGER", help_text="Micro-batches accumulated per update. Default: 1.", panel=LOOP)
]
Epochs = Annotated[Text, _option(metavar="INTEGER", help_text="Passes over the training data. Default: 3.", panel=LOOP)]
MaxSteps = Annotated[
    Text, _option(metavar="INTEGER", help_text="Stop after this many updates, whatever --epochs says.", panel=LOOP)
]
Scheduler = Annotated[
    Text, _option("Learning-rate schedule over updates. Default: linear.", panel=LOOP, metavar="linear|cosine|constant")
]
WarmupRatio = Annotated[
    Text, _option(metavar="NUMBER", help_text="Share of the updates spent warming up. Default: 0.", panel=LOOP)
]
MaxGradNorm = Annotated[
    Text,
    _option(metavar="NUMBER", help_text="Clip the gradient norm once per update; 0: never. Default: 1.", panel=LOOP),
]
GradientCheckpointing = Annotated[
    Switch,
    _option(
        "Recompute activations instead of keeping them.",
        panel=LOOP,
        name="--gradient-checkpointing/--no-gradient-checkpointing",
    ),
]
Seed = Annotated[
    Text, _option(metavar="INTEGER", help_text="Seed of weights, dropout and data order. Default: 42.", panel=LOOP)
]
NumWorkers = Annotated[
    Text, _option(metavar="INTEGER", help_text="Processes that prepare batches. Default: 0.", panel=LOOP)
]

Out = Annotated[Text, _option("Run folder. Default: a dated folder under runs/.", panel=OUTPUT, metavar="FOLDER")]
Overwrite = Annotated[bool, _option("Replace the run that --out holds.", panel=OUTPUT, name="--overwrite")]
Resume = Annotated[bool, _option("Continue the run that --out holds.", panel=OUTPUT, name="--resume")]
SaveEvery = Annotated[
    Text, _option(metavar="INTEGER", help_text="Updates between checkpoints. Default: each epoch.", panel=OUTPUT)
]
Keep = Annotated[Text, _option(metavar="INTEGER", help_text="Checkpoints kept. Default: 2.", panel=OUTPUT)]
LoggingSteps = Annotated[
    Text, _option(metavar="INTEGER", help_text="Updates between progress lines. Default: 10.", panel=OUTPUT)
]
Recipe = Annotated[Text, _option("Start from a recipe; flags beat it.", panel=OUTPUT, metavar="NAME|FILE")]
Set = Annotated[
    Texts, _option("Set any field, such as loop.accum=2; repeatable.", panel=OUTPUT, metavar="A.B=C", name="--set")
]
DryRun = Annotated[
    bool, _option("Check everything, data included, print the plan, and stop.", panel=OUTPUT, name="--dry-run")
]
Json = Annotated[bool, _option("Print the record as one JSON document.", panel=OUTPUT, name="--json")]
Quiet = Annotated[bool, _option("No progress and no notes.", panel=OUTPUT, name="--quiet")]
Verbose = Annotated[bool, _option("Show the traceback of an unexpected fault.", panel=OUTPUT, name="--verbose")]
