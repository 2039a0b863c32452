"""`effcli report`: tables, page, picture, rows or one JSON document, from saved records."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from effcli.cli import options as o

Html = Annotated[Path | None, o.option("Write a page that works offline.", o.OUTPUT, "FILE")]
Plot = Annotated[Path | None, o.option("Draw a picture: .png or .svg.", o.OUTPUT, "FILE")]
Csv = Annotated[Path | None, o.option("Write a row for each run.", o.OUTPUT, "FILE")]


def report(
    records: Annotated[
        list[Path],
        typer.Argument(
            help="record.json of runs, comparison.json of comparisons, or folders that hold one.", metavar="RECORD"
        ),
    ],
    html: Html = None,
    plot: Plot = None,
    csv: Csv = None,
    as_json: o.Json = False,
    quiet: o.Quiet = False,
    verbose: o.Verbose = False,
) -> None:
    """Show what saved runs estimated, measured and reached; several, or a comparison, side by side."""
    # Imported here: `effcli --help` must not wait for pydantic and rich's tables.
    from effcli.measure.joining import joined
    from effcli.measure.reading import read_document
    from effcli.measure.record import RunRecord
    from effcli.report.exports import check_exports, write_exports
    from effcli.report.output import emit_comparison, emit_files, emit_saved_run

    check_exports(html=html, plot=plot, csv=csv)
    documents = [(path, read_document(path)) for path in records]
    comparison = joined(documents)
    first = documents[0][1]
    if len(documents) == 1 and isinstance(first, RunRecord) and not as_json:
        emit_saved_run(first, quiet=quiet)
    else:
        path = records[0]
        emit_comparison(comparison, json=as_json, quiet=quiet, folder=str(path if path.is_dir() else path.parent))
    emit_files(write_exports(comparison, html=html, plot=plot, csv=csv), json=as_json)
