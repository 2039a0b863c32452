"""A comparison of what runs would take, none of which is made. No torch before the first is planned."""

from __future__ import annotations

from effcli.errors import EffcliError
from effcli.masking import masked
from effcli.measure.comparison_record import Attempt, ComparisonRecord, compared
from effcli.measure.record import RunRecord
from effcli.pipeline.comparing.run_events import MakeProgress, SaidOnce
from effcli.pipeline.comparing.settings import Comparison


def plan_comparison(comparison: Comparison, *, make_progress: MakeProgress) -> ComparisonRecord:
    """Return the record of runs that are planned and not made, one for each name; nothing is written.

    Raises:
        EffcliError: no run can be planned, all for the same reason.
    """
    from effcli import pipeline

    said: set[str] = set()
    attempts: list[Attempt] = []
    records: list[RunRecord] = []
    errors: list[EffcliError] = []
    for wanted in comparison.runs:
        if wanted.name in (attempt.name for attempt in attempts):  # bytes are the same whatever the seed
            continue
        attempt = Attempt(name=wanted.name, seed=wanted.seed, spec=wanted.asked)
        try:
            records.append(pipeline.plan(wanted.spec, progress=SaidOnce(make_progress(), said)))
        except EffcliError as error:
            errors.append(error)
            update = {"status": "failed", "failure": masked(str(error)), "exit_code": error.exit_code}
        else:
            update = {"status": "planned", "run": len(records) - 1}
        attempts.append(attempt.model_copy(update=update))
    if errors and len(errors) == len(attempts) and len({str(error) for error in errors}) == 1:
        raise errors[0]
    return compared(attempts, records, status="failed" if errors else "planned", notes=comparison.notes)
