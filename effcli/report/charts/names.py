"""The names of a comparison, each with its look, its line of the summary and its runs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from effcli.report.charts.series import Point, losses
from effcli.report.charts.style import DASHES, SERIES
from effcli.report.text import plain
from effcli.units import cut

if TYPE_CHECKING:
    from effcli.measure.comparison_record import ComparisonRecord, Summary
    from effcli.measure.record import RunRecord

_SHORT = 40


class Seeded(NamedTuple):
    """One run of a name, and the losses of its updates, which charts look at more than once."""

    seed: int
    run: RunRecord
    losses: tuple[Point, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Named:
    """One name of a comparison. `key` stands for it in charts, where a name that a user gave could mean something.

    `runs` are those of its seeds that left a record, `run` the one that stands for them where one is shown, None where
    there is none.
    """

    key: str
    name: str
    colour: str
    dash: tuple[int, ...]
    summary: Summary
    runs: tuple[Seeded, ...]
    run: RunRecord | None

    @property
    def short(self) -> str:
        """Return the name, cut where it would crowd out what it names."""
        return cut(self.name, _SHORT)


def names_of(record: ComparisonRecord) -> tuple[Named, ...]:
    """Return the names in the order in which they were asked for."""
    names = []
    for place, summary in enumerate(record.summary):
        attempts = [attempt for attempt in record.attempts if attempt.name == summary.name]
        names.append(
            Named(
                key=f"n{place}",
                name=plain(summary.name),
                colour=SERIES[place % len(SERIES)],
                dash=DASHES[place // len(SERIES) % len(DASHES)],
                summary=summary,
                runs=tuple(
                    Seeded(attempt.seed, run, losses(run))
                    for attempt in attempts
                    if (run := record.record_of(attempt)) is not None
                ),
                run=record.run_for(summary.name),
            )
        )
    return tuple(names)


def key_scale(names: Sequence[Named], *, legend: bool, dashes: bool = False) -> dict[str, object]:
    """Return how a field with keys of names is drawn: its colours, and its dashes for lines."""
    import altair as alt

    keys = [named.key for named in names]
    look = {"symbolType": "stroke", "symbolOpacity": 1, "symbolStrokeWidth": 3, "labelLimit": 140, "columns": 2}
    shown = alt.Legend(orient="bottom", labelExpr=label_of(names), **look) if legend else None
    colours = alt.Scale(domain=keys, range=[named.colour for named in names])
    drawn: dict[str, object] = {"color": alt.Color("key:N", title=None, sort=keys, scale=colours, legend=shown)}
    if dashes:
        scale = alt.Scale(domain=keys, range=[list(named.dash) for named in names])
        drawn["strokeDash"] = alt.StrokeDash("key:N", title=None, sort=keys, scale=scale, legend=shown)
    return drawn


def label_of(names: Sequence[Named]) -> str:
    """Return Vega's expression for the name that a label's key stands for.

    Names begin with a blank there that is taken off again: a text such as `constructor`, which every object of
    JavaScript knows, breaks the whole chart where it stands in an expression by itself (vega 6.2).
    """
    return f"slice({json.dumps([f' {named.short}' for named in names])}[toNumber(slice(datum.label, 1))], 1)"
