"""`effcli report`: tables, or one JSON document, from saved records."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def report(
    records: Annotated[list[Path], typer.Argument(help="Records (record.json), or run folders that hold one.")],
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document with all records as its runs.")] = False,
) -> None:
    """Show what saved runs estimated, measured and reached."""
    # Imported here: `effcli --help` must not wait for pydantic and rich's tables.
    from effcli.measure.record import SCHEMA_VERSION, read_record
    from effcli.report.output import emit_json, make_console
    from effcli.report.tables import render_run
    from effcli.run_folder import RECORD

    runs = [read_record(path / RECORD if path.is_dir() else path) for path in records]
    if json:
        dumped = [run.model_dump(mode="json") for run in runs]
        emit_json({"schema_version": SCHEMA_VERSION, "command": "report", "runs": dumped})
        return
    console = make_console(stderr=False)
    for number, run in enumerate(runs):
        if number:
            console.rule()
        render_run(run, console)
