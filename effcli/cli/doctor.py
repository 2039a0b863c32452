"""`effcli doctor`."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from effcli.cli import options as o

DEVICE = "Device"


def doctor(
    device: Annotated[
        o.Text,
        o.option("Test this one: auto, cpu, cuda or cuda:N. Default: the one that a run takes.", DEVICE, "NAME"),
    ] = None,
    history: Annotated[
        bool, o.option("Show the predicted and measured memory of past runs instead.", o.OUTPUT, name="--history")
    ] = False,
    as_json: o.Json = False,
    quiet: Annotated[bool, o.option("Show problems only.", o.OUTPUT, name="--quiet")] = False,
    verbose: Annotated[
        bool, o.option("Show versions, tracebacks, and what libraries complained about.", o.OUTPUT, name="--verbose")
    ] = False,
) -> None:
    """Check what works on this machine, and say how to fix what does not: devices, packages, the hub, memory.

    The exit code is 4 where --device names a device that cannot work, and 0 whatever else is found.
    """
    if history and device is not None:
        raise typer.BadParameter("--history looks at no device; leave --device out", param_hint="--history")

    from effcli import pipeline  # pydantic: not for --help
    from effcli.report import output

    if history:
        output.emit_history(pipeline.read_history(), json=as_json)
        return
    with output.waiting("looking, and trying a step of torch and of 8-bit optimizers", quiet=quiet or as_json):
        record = pipeline.doctor(device, tell=_complain if verbose else None)
    output.emit_doctor(record, json=as_json, quiet=quiet, verbose=verbose)
    pipeline.check_requested_device(record)


def _complain(text: str) -> None:
    sys.stderr.write(f"{text.rstrip()}\n")
