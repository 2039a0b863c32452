"""Files that a comparison is written into beside the terminal: the page, a picture, rows for a spreadsheet."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from effcli.errors import UsageError
from effcli.files import at_home, write_text
from effcli.packages import DRAWING, DRAWING_PIP, is_installed, require_installed

if TYPE_CHECKING:
    from effcli.measure.comparison_record import ComparisonRecord

_ENDINGS = {"--html": (".html", ".htm"), "--plot": (".png", ".svg"), "--csv": (".csv",)}
_DRAWN = ("--html", "--plot")

File = Path | str | None


def check_exports(*, html: File, plot: File, csv: File) -> None:
    """Refuse, before any work is done, files that could not be written afterwards; None is a file not asked for.

    Raises:
        UsageError: a file has no ending that its flag writes, or is a folder.
        MissingExtraError: a package that draws is not installed.
    """
    asked = {
        flag: at_home(file) for flag, file in (("--html", html), ("--plot", plot), ("--csv", csv)) if file is not None
    }
    for flag, path in asked.items():
        endings = _ENDINGS[flag]
        if path.suffix.lower() not in endings:
            raise UsageError(f"{flag} '{path}' must end in {' or '.join(endings)}")
        if path.is_dir():
            raise UsageError(f"{flag} '{path}' is a folder; give a file")
    for flag in filter(asked.get, _DRAWN):
        for package in DRAWING:
            require_installed(package, f"{flag} {asked[flag]}", pip=DRAWING_PIP)


def unasked_page(path: Path, *, quiet: bool) -> Path | None:
    """Return where the page goes that nobody asked for; None, said on stderr, where what draws it is not installed."""
    if all(map(is_installed, DRAWING)):
        return path
    if not quiet:
        sys.stderr.write(f"{path.name} is left out: its charts need a package; type: pip install {DRAWING_PIP}\n")
    return None


def write_exports(record: ComparisonRecord, *, html: File, plot: File, csv: File) -> dict[str, Path]:
    """Write the files that were asked for, and return them by what they are: page, plot, csv.

    Raises:
        WriteError: a file cannot be written.
    """
    written: dict[str, Path] = {}
    if html is not None:
        from effcli.report.page import write_page

        written["page"] = at_home(html)
        write_page(record, written["page"])
    if plot is not None:
        from effcli.report.plots import write_plot

        written["plot"] = at_home(plot)
        write_plot(record, written["plot"])
    if csv is not None:
        from effcli.report.csv_rows import csv_text

        written["csv"] = at_home(csv)
        write_text(written["csv"], csv_text(record))
    return written
