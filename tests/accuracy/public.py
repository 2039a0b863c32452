"""Predicted against measured: public measurements of training memory on real GPUs.

    python -m tests.accuracy.public --measurements FILE [--envs DIR] [--only PATTERN] [--out FILE.md]

FILE is a JSON list of rows with `id`, `gpu`, `transformers`, `model`, `head`, `config_facts`, `batch`, `seq`,
`precision`, `optimizer`, `grad_checkpointing`, `attn`, `quantity`, `value_bytes` and `scope`. Each row runs
with the modelling code of its day, in an environment of its own, and beside it with the transformers installed here.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from tests.accuracy.environments import python_of
from tests.accuracy.public_rows import Case, Row, sorted_out

ROOT = Path(__file__).parents[2]
VARIABLE = "EFFCLI_MEASUREMENTS"
ENVIRONMENTS = Path.home() / ".cache" / "effcli-accuracy"
USAGE = 2

APART = "Readings of the device, not scored: reserved and an assumed context against sampled use and cache growth."

WITHIN = 0.02
LOW = -0.10


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One row of the table; `result` and `own` are what was said with the code of the day and with that of here."""

    row: Row
    result: Mapping[str, Any]
    own: Mapping[str, Any]

    def error(self, said: Mapping[str, Any]) -> float | None:
        """Return the signed relative error, or None where nothing was predicted."""
        predicted = said.get("predicted_bytes")
        return None if predicted is None else predicted / self.row["value_bytes"] - 1


def main() -> int:
    """Predict every row that can be imitated, print the table and its summary."""
    parser = argparse.ArgumentParser(description="Predicted against publicly measured memory.")
    parser.add_argument("--measurements", type=Path, default=os.environ.get(VARIABLE))
    parser.add_argument("--envs", type=Path, default=ENVIRONMENTS)
    parser.add_argument("--only", default="", help="rows whose id contains this")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    if asked.measurements is None or not Path(asked.measurements).is_file():
        print(f"error: no file of measurements; give one with --measurements FILE or {VARIABLE}", file=sys.stderr)
        return USAGE
    rows = [row for row in json.loads(Path(asked.measurements).read_text(encoding="utf-8")) if asked.only in row["id"]]
    cases, reasons = sorted_out(rows)
    results = _with_the_code_of_the_day(cases.values(), asked.envs)
    own = _answers(sys.executable, cases.values())
    lines = [Line(row=row, result=results[row["id"]], own=own[row["id"]]) for row in rows if row["id"] in cases]
    scored = [line for line in lines if cases[line.row["id"]]["quantity"] != "device"]
    apart = [line for line in lines if line not in scored]
    text = "\n".join((*_table(scored), "", *_summary(scored), "", APART, "", *_table(apart), "", *_left_out(reasons)))
    print(text)
    if asked.out is not None:
        asked.out.write_text(text + "\n", encoding="utf-8")
    return 0


def _with_the_code_of_the_day(cases: Iterable[Case], folder: Path) -> dict[str, dict[str, Any]]:
    by_version: defaultdict[str, list[Case]] = defaultdict(list)
    for case in cases:
        by_version[case["version"]].append(case)
    found: dict[str, dict[str, Any]] = {}
    for version, of_version in sorted(by_version.items()):
        found |= _answers(str(python_of(version, folder)), of_version)
    return found


def _answers(python: str, cases: Iterable[Case]) -> dict[str, dict[str, Any]]:
    """Return what a worker says about each case, by id. A case that kills it is named as such."""
    left = list(cases)
    found: dict[str, dict[str, Any]] = {}
    while left:
        done = subprocess.run(
            [python, "-m", "tests.accuracy.public_worker"],
            input=json.dumps(left),
            capture_output=True,
            text=True,
            cwd=ROOT,
            env={**os.environ, "HF_HUB_OFFLINE": "1"},
        )
        said = [json.loads(line) for line in done.stdout.splitlines()]
        found |= {result["id"]: result for result in said}
        left = left[len(said) :]
        if left and done.returncode:
            killed = left.pop(0)
            last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
            found[killed["id"]] = {"id": killed["id"], "error": last}
    return found


def _table(lines: Sequence[Line]) -> Iterator[str]:
    yield "| row | measured | predicted | error | transformers | phase | with those here | error |"
    yield "|---|--:|--:|--:|---|---|--:|--:|"
    for line in lines:
        said, own = line.result, line.own
        yield (
            f"| {line.row['id']} | {line.row['value_bytes']:,} | {_predicted(said)} | {_percent(line.error(said))} "
            f"| {said.get('transformers', '')} | {said.get('phase', '')} | {_predicted(own)} "
            f"| {_percent(line.error(own))} |"
        )


def _summary(lines: Sequence[Line]) -> Iterator[str]:
    for name, which in (("code of the day", "result"), ("transformers installed here", "own")):
        errors = [error for line in lines if (error := line.error(getattr(line, which))) is not None]
        if not errors:
            continue
        sizes = [abs(error) for error in errors]
        within = sum(size <= WITHIN for size in sizes) / len(sizes)
        yield (
            f"{name}: {len(errors)} rows, median absolute error {median(sizes):.2%}, {within:.0%} within {WITHIN:.0%}, "
            f"largest {max(errors, key=abs):+.2%}, lowest {min(errors):+.2%}, "
            f"{sum(error < LOW for error in errors)} more than {-LOW:.0%} low"
        )


def _left_out(reasons: Mapping[str, str]) -> Iterator[str]:
    by_reason: defaultdict[str, list[str]] = defaultdict(list)
    for name, reason in reasons.items():
        by_reason[reason].append(name)
    for reason, names in sorted(by_reason.items()):
        yield f"left out, {reason}: {len(names)} ({', '.join(names)})"


def _predicted(said: Mapping[str, Any]) -> str:
    return f"{said['predicted_bytes']:,}" if "predicted_bytes" in said else said.get("error", "")


def _percent(error: float | None) -> str:
    return "" if error is None else f"{error:+.2%}"


if __name__ == "__main__":
    raise SystemExit(main())
