"""`effcli inspect`."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from effcli.cli import options as o
from effcli.files import at_home

_VALUES = "--values"
EVERY = "*"
LARGEST = 20
MOST_VALUES = 20


class InspectCommand(TyperCommand):
    """A command whose `--values` may stand alone, for which Typer has no option."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Return the arguments that are left after parsing; `--values` without a pattern gets the one for all."""
        given = [
            f"{_VALUES}={EVERY}" if word == _VALUES and (not rest or rest[0].startswith("-")) else word
            for word, rest in ((word, args[index + 1 :]) for index, word in enumerate(args))
        ]
        return super().parse_args(ctx, given)


def inspect(
    path: Annotated[
        str | None,
        typer.Argument(
            help="File or folder with an optimizer's state: of Trainer, accelerate, torch, effcli, DeepSpeed.",
            metavar="PATH",
            show_default=False,
        ),
    ] = None,
    model: Annotated[
        str | None,
        o.option(
            "Model that the parameters are of, for their names; by default the one beside the state.",
            o.MODEL,
            "FOLDER|NAME",
        ),
    ] = None,
    values: Annotated[
        str | None,
        o.option(
            "Show values of the states whose parameter or parameter.name matches; without PATTERN of the first ones.",
            o.OUTPUT,
            "[PATTERN]",
            name=_VALUES,
        ),
    ] = None,
    top: Annotated[
        int,
        typer.Option(
            "--top",
            help="Show so many of the largest parameters.",
            metavar="INTEGER",
            min=0,
            rich_help_panel=o.OUTPUT,
        ),
    ] = LARGEST,
    per_layer: Annotated[bool, o.option("Show all parameters.", o.OUTPUT, name="--per-layer")] = False,
    as_json: o.Json = False,
    quiet: o.Quiet = False,
    verbose: o.Verbose = False,
) -> None:
    """Say what a saved optimizer state holds, which optimizer it looks like, and what others would take.

    Reads no values but those that --values asks for, and never runs what a file holds.
    """
    if path is None and values not in (None, EVERY):  # `--values PATH`
        path, values = values, EVERY
    if path is None:
        raise typer.BadParameter("name a file or folder with an optimizer's state", param_hint="PATH")

    from effcli import pipeline  # pydantic: not for --help
    from effcli.report.output import emit_inspection

    most = MOST_VALUES if values == EVERY and not as_json else None
    record = pipeline.inspect(at_home(path), model=model, values=values, most_values=most)
    emit_inspection(record, json=as_json, quiet=quiet, top=None if per_layer else top)
