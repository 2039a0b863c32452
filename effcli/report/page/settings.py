"""Settings and surroundings of the runs: what all share once, what differs run by run, and where their files are."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from effcli.report.charts.names import Named
from effcli.report.notes import notes_of
from effcli.report.number_text import NOT_AVAILABLE
from effcli.report.page.shell import escaped
from effcli.report.page.tables import text_table
from effcli.setting_texts import UNSET, dotted, setting_text

if TYPE_CHECKING:
    from effcli.measure.comparison_record import ComparisonRecord

_TOLD_BY_FILES = ("output.out", "out")
"""Keys of the folder of a run in its settings and in its environment."""


def settings_section(record: ComparisonRecord, names: Sequence[Named]) -> Iterable[str]:
    """Yield tables of settings, surroundings and files, and the notes."""
    runs = [(_label(named, seed, names), run) for named in names for seed, run, _ in named.runs]
    for title, verb, unset, facts in (
        ("Settings", "differ", UNSET, [(label, run.spec) for label, run in runs]),
        ("Environment", "differs", NOT_AVAILABLE, [(label, run.environment) for label, run in runs]),
    ):
        shared, differing = _split([_texts(values, unset) for _, values in facts], unset)
        if differing:
            labels = [label for label, _ in facts]
            yield f"<h3>{title} that {verb}</h3>"
            yield text_table(f"{title} that {verb}", ("setting", *labels), differing)
        if shared:
            every = f"{title} of {'every run' if len(runs) > 1 else 'the run'}"
            yield f"<details><summary>{every}</summary>{text_table(every, ('setting', 'value'), shared)}</details>"
    yield f"<details><summary>Files</summary>{_files(record)}</details>"
    notes = notes_of(record)
    if notes:
        yield "<h3>Notes</h3>"
        yield f'<ul class="notes">{"".join(f"<li>{escaped(note)}</li>" for note in notes)}</ul>'


def _label(named: Named, seed: int, names: Sequence[Named]) -> str:
    several = any(len(other.runs) > 1 for other in names)
    return f"{named.short}, seed {seed}" if several else named.short


def _texts(values: Mapping[str, Any], unset: str) -> dict[str, str]:
    return {name: setting_text(value, unset) for name, value in dotted(values).items()}


def _split(facts: Sequence[Mapping[str, str]], unset: str) -> tuple[list[tuple[str, ...]], list[tuple[str, ...]]]:
    """Return what all runs share and have set, as key and value, and what differs, as key and each run's value."""
    shared: list[tuple[str, ...]] = []
    differing: list[tuple[str, ...]] = []
    for key in dict.fromkeys(key for own in facts for key in own if key not in _TOLD_BY_FILES):
        own = [flat.get(key, unset) for flat in facts]
        if len(set(own)) == 1:
            shared += [(key, own[0])] if own[0] != unset else []
        else:
            differing.append((key, *own))
    return shared, differing


def _files(record: ComparisonRecord) -> str:
    rows = (
        (
            attempt.name,
            attempt.seed,
            attempt.status,
            NOT_AVAILABLE if attempt.exit_code is None else attempt.exit_code,
            attempt.folder or NOT_AVAILABLE,
        )
        for attempt in record.attempts
    )
    return text_table("Files", ("optimizer", "seed", "status", "exit code", "folder"), rows)
