"""The command line: which commands there are. Imports neither torch nor pydantic."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from effcli import __version__
from effcli.cli import recipes
from effcli.cli.boundary import interrupt_on_signals, run_guarded
from effcli.cli.compare import compare
from effcli.cli.doctor import doctor
from effcli.cli.estimate import estimate
from effcli.cli.gpus import gpus
from effcli.cli.inspect import InspectCommand, inspect
from effcli.cli.models import models
from effcli.cli.optimizers import optimizers
from effcli.cli.plan import plan
from effcli.cli.report import report
from effcli.cli.train import train
from effcli.errors import UsageError
from effcli.ranks.launch import read_launch
from effcli.ranks.voice import has_met_others
from effcli.streams import bear_lost_streams, leave_out_advice

app = typer.Typer(
    name="effcli",
    help="Train Hugging Face models in little memory, and tell the truth about memory.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    pretty_exceptions_show_locals=False,  # in any case: locals can hold tokens
)


def _show_version(value: bool) -> None:
    if value:
        typer.echo(f"effcli {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    ctx: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """Train Hugging Face models in little memory, and tell the truth about memory."""
    launch = read_launch()
    if launch.has_many and ctx.invoked_subcommand != "train":
        raise UsageError(
            f"{launch.world_size} processes were launched, and {ctx.invoked_subcommand} needs one: only train spreads "
            f"over several; start it as effcli {ctx.invoked_subcommand}, without torchrun"
        )


app.command()(train)
app.command()(estimate)
app.command()(compare)
app.command()(plan)
app.command(cls=InspectCommand)(inspect)
app.command()(models)
app.command()(gpus)
app.command()(report)
app.command()(optimizers)
app.command()(doctor)
app.add_typer(recipes.app, name="recipes")


def main() -> None:
    """Entry point of the console script; ends the process with the right exit code."""
    bear_lost_streams()
    leave_out_advice()
    interrupt_on_signals()
    code = run_guarded(lambda: app(standalone_mode=False), verbose="--verbose" in sys.argv)
    if has_met_others():
        _leave(code)
    sys.exit(code)


def _leave(code: int) -> None:
    """End the process at once. A thread that a process group left behind may abort the interpreter's own end, after
    which a launcher would call a completed run failed (torch 2.13, gloo)."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)
