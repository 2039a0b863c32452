"""What a comparison and its runs said, once each; reads only the record."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from effcli.report.text import plain

if TYPE_CHECKING:
    from effcli.measure.comparison_record import Attempt, ComparisonRecord


def notes_of(record: ComparisonRecord) -> list[str]:
    """Return the comparison's notes, then those of its runs; one that not all runs have begins with whose it is."""
    attempts = [attempt for attempt in record.attempts if attempt.run is not None]
    said: dict[str, list[Attempt]] = dict.fromkeys(record.notes, attempts)
    for attempt in attempts:
        run = record.record_of(attempt)
        for note in dict.fromkeys(run.notes if run else ()):
            if note not in record.notes:
                said.setdefault(note, []).append(attempt)
    return [
        plain(note) if len(who) == len(attempts) else f"{'; '.join(_labels(who, attempts))}: {plain(note)}"
        for note, who in said.items()
    ]


def _labels(who: Sequence[Attempt], attempts: Sequence[Attempt]) -> list[str]:
    """Return the names whose runs all said something, and of the others the seeds."""
    labels: dict[str, None] = {}
    for attempt in who:
        whole = sum(other.name == attempt.name for other in who) == sum(one.name == attempt.name for one in attempts)
        labels[plain(attempt.name) if whole else f"{plain(attempt.name)}, seed {attempt.seed}"] = None
    return list(labels)
