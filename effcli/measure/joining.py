"""One comparison out of saved runs and comparisons, under names that tell the runs apart. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from effcli.measure.comparison_record import Attempt, ComparisonRecord, compared
from effcli.measure.record import RunRecord, Status
from effcli.run_folder import COMPARISON, RECORD
from effcli.setting_texts import UNSET, mapping, run_settings, setting_label, setting_text
from effcli.spec import RunSpec
from effcli.units import cut

_MOST_SETTINGS = 2
"""A name that needs more settings than these to be told apart is called by its folder."""


NO_OTHER_RUN = frozenset({"loop.seed", "loop.device", "loop.profile_memory"})
"""Settings that make no other run of it: the seed, what `auto` stands for, and what is watched."""


@dataclass(kw_only=True)
class _Member:
    """One run on its way into the comparison; `label` is what its name is made different with where it has to be."""

    attempt: Attempt
    record: RunRecord | None
    place: str
    settings: Mapping[str, str] = field(default_factory=dict)
    label: str = ""

    @property
    def name(self) -> str:
        """Return the name of its column."""
        return f"{self.attempt.name} {self.label}" if self.label else self.attempt.name


def joined(sources: Sequence[tuple[Path, RunRecord | ComparisonRecord]]) -> ComparisonRecord:
    """Return saved runs and comparisons, with the paths they were read from, as one comparison in that order.

    Runs that differ in nothing but their seeds share a name. A single comparison stays as it is; its summary is made
    anew from its runs like that of several.
    """
    first = sources[0][1]
    if len(sources) == 1 and isinstance(first, ComparisonRecord):
        again = compared(first.attempts, first.runs, status=first.status, notes=first.notes)
        return again.model_copy(update={"command": first.command})
    members = [member for path, source in sources for member in _members(path, source)]
    for name in dict.fromkeys(member.attempt.name for member in members):
        _tell_apart([member for member in members if member.attempt.name == name])
    _make_unique(members)
    runs = [member.record for member in members if member.record is not None]
    places = iter(range(len(runs)))
    attempts = [
        member.attempt.model_copy(update={"name": member.name, "run": None if member.record is None else next(places)})
        for member in members
    ]
    notes = dict.fromkeys(
        note for _, source in sources if isinstance(source, ComparisonRecord) for note in source.notes
    )
    done = compared(attempts, runs, status=_status(attempts), notes=notes)
    return done.model_copy(update={"command": "report"})


def _members(path: Path, source: RunRecord | ComparisonRecord) -> list[_Member]:
    place = str(path.parent if path.name in (RECORD, COMPARISON) else path)
    if isinstance(source, RunRecord):
        attempt = Attempt(
            name=source.optimizer.name,
            seed=_seed(source),
            folder=place,
            status=source.status,
            failure=source.failure,
        )
        return [_Member(attempt=attempt, record=source, place=place, settings=_told_apart_by(source))]
    settings: dict[str, Mapping[str, str]] = {}
    for attempt in source.attempts:
        if attempt.name not in settings and (record := source.record_of(attempt)) is not None:
            settings[attempt.name] = _told_apart_by(record)
    return [
        _Member(
            attempt=attempt,
            record=source.record_of(attempt),
            place=place,
            settings=settings.get(attempt.name, {}),
        )
        for attempt in source.attempts
    ]


def _seed(record: RunRecord) -> int:
    seed = mapping(record.spec.get("loop")).get("seed")
    return seed if isinstance(seed, int) else RunSpec().loop.seed


def _told_apart_by(record: RunRecord) -> Mapping[str, str]:
    """Return everything in which two runs of one optimizer may differ, as texts; the seed is none of it."""
    settings = {key: setting_text(value) for key, value in run_settings(record.spec).items() if key not in NO_OTHER_RUN}
    if settings["model.name"] == UNSET:
        settings["model.name"] = record.model.name
    settings["environment.device"] = str(record.environment.get("device_name") or record.environment.get("device"))
    versions = mapping(record.environment.get("packages"))
    return {**settings, **{f"packages.{package}": str(version) for package, version in versions.items()}}


def _tell_apart(members: Sequence[_Member]) -> None:
    """Label the runs of one optimizer by the settings that they do not share, or by folders where these don't help."""
    keys = list(dict.fromkeys(key for member in members for key in member.settings))
    differing = [key for key in keys if len({member.settings.get(key) for member in members}) > 1]
    for member in members:
        alike = [other for other in members if other.settings == member.settings]
        if len({other.attempt.seed for other in alike}) < len(alike) or len(differing) > _MOST_SETTINGS:
            places = {other.place for other in members}
            member.label = f"({_folder(member, members)})" if len(places) > 1 else ""
        elif differing:
            member.label = " ".join(
                f"{setting_label(key)}={cut(member.settings.get(key, UNSET), 30)}" for key in differing
            )


def _folder(member: _Member, members: Sequence[_Member]) -> str:
    """Return the last part of the path that a run was read from, or the whole where others end alike."""
    name = Path(member.place).name
    same = [other for other in members if Path(other.place).name == name and other.place != member.place]
    return member.place if same or not name else name


def _make_unique(members: Sequence[_Member]) -> None:
    """Number what still has the name and the seed of another, such as one record that was given twice."""
    seen: dict[tuple[str, int], int] = {}
    for member in members:
        key = (member.name, member.attempt.seed)
        seen[key] = seen.get(key, 0) + 1
        if seen[key] > 1:
            member.label = f"{member.label} ({seen[key]})".strip()


def _status(attempts: Sequence[Attempt]) -> Status:
    """Return how it all ended: the worst of the runs."""
    ended = {attempt.status for attempt in attempts}
    if "failed" in ended:
        return "failed"
    if ended & {"interrupted", "missing"}:
        return "interrupted"
    return "planned" if ended == {"planned"} else "completed"
