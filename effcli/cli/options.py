"""Flags of `effcli train`: one annotated type each. A default of None means "not given", so that recipes can say it."""

from __future__ import annotations

from typing import Annotated

import typer

MODEL, DATA, OPTIM, LOOP, OUTPUT = "Model", "Data", "Optimizer", "Loop", "Output"


def _option(help_text: str, *, panel: str, metavar: str | None = None, name: str | None = None) -> object:
    names = (name,) if name else ()
    return typer.Option(*names, help=help_text, metavar=metavar, rich_help_panel=panel, show_default=False)


Text = str | None
Texts = list[str] | None
Number = float | None
Count = int | None
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
MaxLength = Annotated[Count, _option("Tokens kept per row. Default: the model's limit, at most 512.", panel=DATA)]
LimitRows = Annotated[Count, _option("Use only the first rows of the training data.", panel=DATA)]

Optim = Annotated[
    Text,
    _option(
        "Optimizer: adamw, adafactor, adafactor-torch, adam8bit, adamw8bit, paged-adamw8bit, sgd. Default: adamw.",
        panel=OPTIM,
        metavar="NAME",
    ),
]
LearningRate = Annotated[Number, _option("Learning rate. Default: the optimizer's.", panel=OPTIM, name="--lr")]
Beta1 = Annotated[Number, _option("Decay of the first moment. Default: the optimizer's.", panel=OPTIM)]
Beta2 = Annotated[Number, _option("Decay of the second moment. Default: the optimizer's.", panel=OPTIM)]
Eps = Annotated[Number, _option("Term added to the denominator. Default: the optimizer's.", panel=OPTIM)]
OptimArg = Annotated[
    Texts, _option("Another hyperparameter by its upstream name; repeatable.", panel=OPTIM, metavar="KEY=VALUE")
]
WeightDecay = Annotated[Number, _option("Decay of weights, never of biases and norms. Default: 0.01.", panel=OPTIM)]
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
    Count, _option("Smaller parameters keep 32-bit state. Default: 4096.", panel=OPTIM, name="--min-8bit-size")
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
BatchSize = Annotated[Count, _option("Rows per micro-batch. Default: 8.", panel=LOOP)]
EvalBatchSize = Annotated[Count, _option("Rows per evaluation batch. Default: the batch size.", panel=LOOP)]
Accum = Annotated[Count, _option("Micro-batches accumulated per update. Default: 1.", panel=LOOP)]
Epochs = Annotated[Count, _option("Passes over the training data. Default: 3.", panel=LOOP)]
MaxSteps = Annotated[Count, _option("Stop after this many updates, whatever --epochs says.", panel=LOOP)]
Scheduler = Annotated[
    Text, _option("Learning-rate schedule over updates. Default: linear.", panel=LOOP, metavar="linear|cosine|constant")
]
WarmupRatio = Annotated[Number, _option("Share of the updates spent warming up. Default: 0.", panel=LOOP)]
MaxGradNorm = Annotated[Number, _option("Clip the gradient norm once per update; 0: never. Default: 1.", panel=LOOP)]
GradientCheckpointing = Annotated[
    Switch,
    _option(
        "Recompute activations instead of keeping them.",
        panel=LOOP,
        name="--gradient-checkpointing/--no-gradient-checkpointing",
    ),
]
Seed = Annotated[Count, _option("Seed of weights, dropout and data order. Default: 42.", panel=LOOP)]
NumWorkers = Annotated[Count, _option("Processes that prepare batches. Default: 0.", panel=LOOP)]

Out = Annotated[Text, _option("Run folder. Default: a dated folder under runs/.", panel=OUTPUT, metavar="FOLDER")]
Overwrite = Annotated[bool, _option("Replace the run that --out holds.", panel=OUTPUT, name="--overwrite")]
Resume = Annotated[bool, _option("Continue the run that --out holds.", panel=OUTPUT, name="--resume")]
SaveEvery = Annotated[Count, _option("Updates between checkpoints. Default: each epoch.", panel=OUTPUT)]
Keep = Annotated[Count, _option("Checkpoints kept. Default: 2.", panel=OUTPUT)]
LoggingSteps = Annotated[Count, _option("Updates between progress lines. Default: 10.", panel=OUTPUT)]
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
