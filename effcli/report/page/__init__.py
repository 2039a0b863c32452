"""`compare.html`: a comparison on one page that needs no network."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from effcli.files import write_text
from effcli.report.charts.names import Named, names_of
from effcli.report.headline import failures, headline, title_of, what_ran
from effcli.report.page.sections import sections_of
from effcli.report.page.settings import settings_section
from effcli.report.page.shell import document, escaped
from effcli.report.page.tables import summary_table

if TYPE_CHECKING:
    from effcli.measure.comparison_record import ComparisonRecord


def write_page(record: ComparisonRecord, path: Path) -> None:
    """Write the page of a comparison, also of one with a single run or with plans alone.

    Raises:
        WriteError: the file cannot be written.
    """
    names = names_of(record)
    sections = sections_of(names)
    body = (
        *_header(record, names),
        "<main>",
        *(line for section in sections for line in section.html),
        "<section><h2>Configuration</h2>",
        *settings_section(record, names),
        "</section>",
        "</main>",
        "<footer>Written by effcli. This page holds all it shows and asks nobody for anything.</footer>",
    )
    charts = {key: chart for section in sections for key, chart in section.charts.items()}
    write_text(path, document(title=title_of(names), body=body, charts=charts))


def _header(record: ComparisonRecord, names: Sequence[Named]) -> Iterable[str]:
    yield f'<header><p class="over">effcli {escaped(record.command)}: {escaped(record.status)}</p>'
    yield f"<h1>{escaped(headline(names))}</h1>"
    yield f'<p class="lead">{escaped(what_ran(names))}</p>'
    wrong = failures(record)
    if wrong:
        yield f'<ul class="failures">{"".join(f"<li>{escaped(line)}</li>" for line in wrong)}</ul>'
    yield summary_table(names)
    first = names[0].name if names else ""
    spread = (
        " &plusmn; is the standard deviation over the seeds." if any(len(named.runs) > 1 for named in names) else ""
    )
    if len(names) > 1:
        yield f'<p class="how">&times; is the ratio to {escaped(first)}.{spread}</p>'
    yield "</header>"
