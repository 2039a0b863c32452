"""Predicted peaks of CPU training beside the allocator's record of real updates: a table for the README.

    python -m tests.accuracy.cpu [--only MODEL] [--readme README.md]

Each combination trains a fresh model for two updates. The first has no optimizer state when it begins.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterator, Sequence
from datetime import date
from itertools import product
from pathlib import Path

import torch
import transformers

from effcli.units import MIB
from tests.accuracy.cpu_case import Case, Outcome, outcome
from tests.accuracy.cpu_models import ARCHITECTURES

OPTIMIZERS = ("adamw", "adafactor", "adam8bit", "sgd")
BEGIN, END = "<!-- accuracy-cpu -->\n", "<!-- /accuracy-cpu -->\n"


def cases() -> Iterator[Case]:
    """Yield the combinations.

    Every model meets all sixteen settings of precision, checkpointing, accumulation and dropout, four with each
    optimizer, where each value of a setting occurs twice; the next model meets them with the next optimizer. Weights in
    bf16 come on top: each model with two optimizers.
    """
    for place, model in enumerate(ARCHITECTURES):
        for bf16, checkpointing, accumulating, dropout in product((False, True), repeat=4):
            which = 2 * (bf16 ^ checkpointing ^ dropout) + (checkpointing ^ accumulating ^ dropout)
            yield Case(
                model=model,
                optim=OPTIMIZERS[(which + place) % len(OPTIMIZERS)],
                precision="bf16" if bf16 else "fp32",
                checkpointing=checkpointing,
                accum=1 + accumulating,
                dropout=dropout,
            )
        for further in range(2):
            yield Case(
                model=model,
                optim=OPTIMIZERS[(2 * further + place) % len(OPTIMIZERS)],
                precision="bf16-pure",
                checkpointing=bool(further),
                accum=1 + further,
                dropout=not further,
            )


def table(outcomes: Sequence[Outcome]) -> str:
    """Return the summary and the table of all combinations as Markdown."""
    errors = [abs(found.error) for found in outcomes]
    worst = max(outcomes, key=lambda found: abs(found.error))
    lines = [
        f"{len(outcomes)} combinations, two updates each: median error {statistics.median(errors):.4%}, worst "
        f"{max(errors):.4%} ({worst.case.model}, `{worst.case.optim}`). Measured on {date.today()} with torch "
        f"{torch.__version__}, transformers {transformers.__version__}, "
        f"{torch.backends.cpu.get_cpu_capability()}, threads: {torch.get_num_threads()}.",
        "",
        "<details><summary>All combinations</summary>",
        "",
        "Peaks in MiB of the first and of the second update; the error is that of the update where it is larger.",
        "",
        "| model | optimizer | precision | checkpointing | accum | dropout "
        "| measured 1 | predicted 1 | measured 2 | predicted 2 | error |",
        f"|{'---|' * 4}{'---:|' * 7}",
        *map(_row, outcomes),
        "",
        "</details>",
    ]
    return "\n".join(lines) + "\n"


def _row(found: Outcome) -> str:
    case = found.case
    peaks = [
        f"{num_bytes / MIB:.3f}" for pair in zip(found.measured, found.predicted, strict=True) for num_bytes in pair
    ]
    cells = [case.model, case.optim, case.precision, "yes" if case.checkpointing else "no", str(case.accum)]
    return f"| {' | '.join([*cells, '0.1' if case.dropout else '0', *peaks, f'{found.error:+.4%}'])} |"


def write(readme: Path, text: str) -> None:
    """Put the table between the markers of a file."""
    before, rest = readme.read_text().split(BEGIN)
    after = rest.split(END)[1]
    readme.write_text(before + BEGIN + text + END + after)


def main() -> None:
    """Run the combinations, print the table, and put it into the README if one is given."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=list(ARCHITECTURES))
    parser.add_argument("--readme", type=Path)
    asked = parser.parse_args()
    transformers.logging.set_verbosity_error()
    outcomes = []
    for case in cases():
        if asked.only in (None, case.model):
            outcomes.append(outcome(case))
            print(_row(outcomes[-1]), file=sys.stderr, flush=True)
    print(table(outcomes), end="")
    if asked.readme is not None:
        write(asked.readme, table(outcomes))


if __name__ == "__main__":
    main()
