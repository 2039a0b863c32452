"""`effcli gpus`: the cards that `--gpu` knows by name."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from effcli.cli import options as o


def gpus(
    pattern: Annotated[str | None, typer.Argument(help="Part of a name.", metavar="FILTER", show_default=False)] = None,
    json: o.Json = False,
) -> None:
    """List the GPU cards that --gpu and --budget know, with the bytes that a process can have there."""
    # Imported here: `effcli --help` must not wait for rich's tables.
    from effcli.memory.cards import matching_cards
    from effcli.report.gpus import render_gpus
    from effcli.report.output import emit_json, make_console

    found = matching_cards(pattern)
    if json:
        emit_json({"command": "gpus", "gpus": [asdict(card) for card in found]})
        return
    render_gpus(found, make_console(stderr=False))
