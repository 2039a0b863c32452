"""`effcli models`: the models that are known without a network."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from effcli.cli import options as o


def models(
    pattern: Annotated[
        str | None,
        typer.Argument(help="Part of a name, or of a model type such as llama.", metavar="FILTER", show_default=False),
    ] = None,
    json: o.Json = False,
) -> None:
    """List the models that `effcli estimate` knows offline, with their parameters as counted and as published."""
    # Imported here: `effcli --help` must not wait for the catalogue and rich's tables.
    from effcli.catalogue import lookup as catalogue
    from effcli.report.models import render_models
    from effcli.report.output import emit_json, make_console

    found = catalogue.matching(pattern)
    if json:
        dumped = [{key: value for key, value in asdict(model).items() if key != "config"} for model in found]
        emit_json({"command": "models", "transformers": catalogue.transformers_version(), "models": dumped})
        return
    render_models(found, catalogue.transformers_version(), make_console(stderr=False))
