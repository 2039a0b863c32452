"""Flags of commands that predict the peak of an update."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from effcli.cli import options as o

PEAK = "Peak of an update"

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
BatchSize = Annotated[o.Text, o.option("Rows per micro-batch, in each process. Default: 8.", PEAK, "INTEGER")]
MaxLength = Annotated[
    o.Text, o.option("Tokens of every row. Default: the model's limit, at most 512.", PEAK, "INTEGER")
]
MaxTargetLength = Annotated[
    o.Text, o.option("Tokens of every seq2seq target. Default: as --max-length.", PEAK, "INTEGER")
]
Accum = Annotated[o.Text, o.option("Micro-batches accumulated per update. Default: 1.", PEAK, "INTEGER")]
GradientCheckpointing = Annotated[
    o.Switch, o.option("Recompute activations instead of keeping them.", PEAK, name="--gradient-checkpointing")
]
MaxGradNorm = Annotated[o.Text, o.option("Norm that gradients are clipped to; 0: never. Default: 1.", PEAK, "NUMBER")]
Attn = Annotated[o.Text, o.attn(PEAK)]
Device = Annotated[o.Text, o.option("cuda or cpu; it need not be there. Default: cuda.", PEAK, "NAME")]


WorldSize = Annotated[o.Text, o.option("Processes that train together, a device each. Default: 1.", o.LOOP, "INTEGER")]
Shard = Annotated[
    o.Text,
    o.option(
        "What each of them holds: ddp (all of it), fsdp, zero1, zero2 or zero3 (shares). Default: ddp.", o.LOOP, "NAME"
    ),
]


def gpu(panel: str) -> Any:
    """Return the option for the memory that there is, in a panel of the help."""
    return o.option("What there is: 24GiB, or a card that `effcli gpus` lists.", panel, "BYTES|CARD", name="--gpu")


Gpu = Annotated[o.Text, gpu(PEAK)]
Budget = Annotated[
    o.Text, o.option("The same as a check: exit code 6 where it does not fit.", PEAK, "BYTES|CARD", name="--budget")
]
Timeline = Annotated[o.Text, o.option("Draw live bytes over an update into a file: .html, .png or .svg.", PEAK, "FILE")]
