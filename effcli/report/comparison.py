"""Several runs side by side on a screen of 80 columns; reads only the record.

Everything is built from `Text`, never from markup. Cells wrap where a terminal is narrow; nothing is cut off.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, TypeVar

from rich.console import Group
from rich.text import Text

from effcli.report.comparison_bars import memory_bars
from effcli.report.comparison_device import device_remarks, device_table
from effcli.report.comparison_memory import memory_remarks, memory_table
from effcli.report.comparison_results import results_remarks, results_table
from effcli.report.layout import fact_grid, print_parts, ruled_table
from effcli.report.narrow_tables import fitted
from effcli.report.notes import notes_of
from effcli.report.number_text import NOT_AVAILABLE
from effcli.report.settings import Difference, settings_of
from effcli.report.text import plain
from effcli.units import count, cut, format_count, listed

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table

    from effcli.measure.comparison_record import Attempt, ComparisonRecord, Summary

    _Named = TypeVar("_Named", Attempt, Summary)

_LONGEST_NAME = 100
_LOOK_OF_STATUS = {"completed": "bold green", "planned": "bold"}


def render_comparison(record: ComparisonRecord, console: Console, *, notes: bool, folder: str | None = None) -> None:
    """Print what was compared, memory, speed and results, what did not end, and what makes numbers incomparable.

    `notes` adds what the runs said.
    `folder` is where the comparison lies, for the command that completes it.
    """
    record = _with_short_names(record)
    settings = settings_of(record)
    facts = [*settings.shared, *_seeds(record)]
    parts: list[RenderableType] = [
        Group(_headline(record), fact_grid(facts)),
        *_differences(settings.differences),
        fitted(memory_table(record, console.encoding), console),
        fact_grid(memory_remarks(record)),
        fitted(device_table(record, console.encoding), console),
        fact_grid(device_remarks(record)),
        *memory_bars(record, console),
        fitted(results_table(record, console.encoding), console),
        fact_grid(results_remarks(record)),
        _unfinished(record),
        fact_grid(_to_type(record, folder)),
    ]
    parts.append(fact_grid(("note", note) for note in (notes_of(record) if notes else record.notes)))
    print_parts(parts, console)


def _with_short_names(record: ComparisonRecord) -> ComparisonRecord:
    """Return the record with names that leave room for what they name, unless two of them would become one."""
    short = {line.name: cut(plain(line.name), _LONGEST_NAME) for line in record.summary}
    if len(set(short.values())) < len(short):
        return record

    def renamed(one: _Named) -> _Named:
        return one.model_copy(update={"name": short.get(one.name, one.name)})

    changes = {"attempts": tuple(map(renamed, record.attempts)), "summary": tuple(map(renamed, record.summary))}
    return record.model_copy(update=changes)


def _headline(record: ComparisonRecord) -> Text:
    title = Text(f"effcli {plain(record.command)}: ", style="bold")
    title.append(record.status, style=_LOOK_OF_STATUS.get(record.status, "bold red"))
    ended = [attempt for attempt in record.attempts if attempt.ended_well]
    runs = count(len(record.attempts), "run")
    done = "planned" if _is_plan(record) else "completed"
    return title.append(f", {runs}" if len(ended) == len(record.attempts) else f", {len(ended)} of {runs} {done}")


def _is_plan(record: ComparisonRecord) -> bool:
    """Return whether nothing was to be trained."""
    return any(attempt.status == "planned" for attempt in record.attempts)


def _seeds(record: ComparisonRecord) -> Iterable[tuple[str, str]]:
    seeds = dict.fromkeys(attempt.seed for attempt in record.attempts)
    if not seeds:
        return
    repeated = any(len(line.seeds) > 1 for line in record.summary)
    means = "; amounts are means over them, with the sample's standard deviation below" if repeated else ""
    yield "seed" if len(seeds) == 1 else "seeds", f"{', '.join(map(str, seeds))}{means}"


def _differences(differences: Iterable[Difference]) -> Iterator[RenderableType]:
    """Yield what differs beside the optimizer, and a warning where that does not come with its choice."""
    told = list(differences)
    if not told:
        return
    yield Group(
        Text("Differs between the runs", style="bold"),
        fact_grid((difference.label, _by_value(difference)) for difference in told),
    )
    foreign = [difference.label for difference in told if not difference.expected]
    if foreign:
        yield fact_grid([("mind", f"they differ in {listed(foreign)}: the tables compare more than optimizers")])


def _by_value(difference: Difference) -> str:
    values = {
        value.removeprefix(f"{difference.label} ") or NOT_AVAILABLE: names for value, names in difference.values.items()
    }
    return "; ".join(f"{value}: {', '.join(names)}" for value, names in values.items())


def _unfinished(record: ComparisonRecord) -> Table:
    """Return the runs that did not end as they should, or could not be planned, with the reason."""
    table = ruled_table("Not planned" if _is_plan(record) else "Not completed", "optimizer", "seed")
    table.add_column("status", no_wrap=True)
    table.add_column("updates", justify="right", overflow="fold")
    table.add_column("reason", overflow="fold")
    for attempt in record.attempts:
        if attempt.ended_well:
            continue
        run = record.record_of(attempt)
        done = NOT_AVAILABLE if run is None else format_count(run.history[-1].update if run.history else 0)
        of = "" if run is None else f" of {format_count(run.total_updates)}"
        reason = attempt.failure or ("not started" if attempt.status == "missing" else "no reason was recorded")
        table.add_row(plain(attempt.name), str(attempt.seed), attempt.status, f"{done}{of}", plain(reason))
    return table


def _to_type(record: ComparisonRecord, folder: str | None) -> Iterable[tuple[str, str]]:
    """Yield the command that makes the runs that are missing."""
    unfinished = [attempt for attempt in record.attempts if not attempt.ended_well]
    if unfinished and folder is not None and record.command == "compare" and not _is_plan(record):
        command = f"effcli compare --resume --out {shlex.quote(folder)}"
        yield "to type", f"{command}: makes what is not completed, and nothing else"
