"""`effcli optimizers`: the table of optimizers, or everything about one, as text or as one JSON document."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer


def optimizers(
    name: Annotated[
        str | None,
        typer.Argument(
            help="Name or alias, or package.module:Class; without it the table.", metavar="NAME", show_default=False
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Show the optimizers and what state they keep; with a name its law, defaults and flags."""
    # Imported here: `effcli --help` must wait for neither registry nor rich's tables.
    from effcli.optim.registry import entries, find
    from effcli.optim.summary import REFERENCE_SHAPE, overview, page
    from effcli.report.optimizers import render_overview, render_page
    from effcli.report.output import emit_json, make_console

    if name is not None:
        described = page(find(name))
        if json:
            emit_json({"command": "optimizers", "reference_shape": REFERENCE_SHAPE, "optimizer": asdict(described)})
        else:
            render_page(described, make_console(stderr=False))
        return
    rows = [overview(entry) for entry in entries()]
    if json:
        emit_json(
            {
                "command": "optimizers",
                "reference_shape": REFERENCE_SHAPE,
                "optimizers": [asdict(row) for row in rows],
            }
        )
        return
    render_overview(rows, REFERENCE_SHAPE, make_console(stderr=False))
