"""Made-up comparisons with plausible numbers, for tests of reports: three optimizers on distilbert-base-cased."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from effcli.measure.comparison_record import Attempt, ComparisonRecord, compared
from effcli.measure.record import EvalFacts, ProfiledUpdate, RunRecord, StateAmount, Throughput, UpdateFacts
from effcli.memory.plan import MemoryPlan, PhaseBytes, TimelinePoint
from tests import records

MIB = 2**20
WEIGHTS = 263_132_168
ACTIVATIONS = 360 * MIB
UPDATES = 60
STEPS = 12
HOSTILE_NAME = "</script><img src=x onerror=attacked=1>"
HOSTILE_TEXTS = (
    HOSTILE_NAME,
    '=HYPERLINK("http://x")',
    "a\x1b[31mred\rback\nline",
    "[bold]no[/] [PAD]",
    "long-" * 60,
    "</script><script>window.attacked=1</script>",
    '"><svg onload=window.attacked=1>',
    "a.b[0]",
    "__proto__",
    "constructor",
    "datum['x']); window.attacked=1; //",
    "${window.attacked=1}\u2028window.attacked=1",
    "javascript:window.attacked=1",
    "{{window.attacked=1}} \\u003cscript\\u003e",
)
"""Names that attack a page, its charts' library, a spreadsheet, a terminal, or whoever makes room for them."""


@dataclass(frozen=True)
class Kind:
    """What one optimizer of the made-up runs takes: exact state, the step's temporaries, and how well it learns."""

    tensors: dict[str, StateAmount]
    state_bytes: int
    state_elements: int
    rule_of_thumb_bytes: int | None
    step_temporaries_bytes: int
    seconds_per_update: float
    decay: float


KINDS = {
    "adamw": Kind(records.F2_ADAMW, 526_264_752, 131_566_188, 526_264_336, 263_152_648, 1.31, 0.055),
    "adafactor": Kind(
        {
            "step": StateAmount(elements=104, bytes=0),
            "exp_avg_sq_row": StateAmount(elements=70_208, bytes=280_832),
            "exp_avg_sq_col": StateAmount(elements=31_490, bytes=125_960),
            "exp_avg_sq": StateAmount(elements=76_806, bytes=307_224),
            "RMS": StateAmount(elements=104, bytes=416),
        },
        714_432, 178_712, None, 178_176_000, 1.58, 0.048,
    ),
    "adam8bit": Kind(
        {
            "state1": StateAmount(elements=65_783_042, bytes=65_960_000),
            "state2": StateAmount(elements=65_783_042, bytes=65_960_000),
            "absmax1": StateAmount(elements=0, bytes=1_041_144),
            "absmax2": StateAmount(elements=0, bytes=1_041_144),
            "qmap1": StateAmount(elements=0, bytes=1_024),
            "qmap2": StateAmount(elements=0, bytes=1_024),
            "step": StateAmount(elements=104, bytes=0),
        },
        134_004_336, 131_566_188, 131_566_084, 178_176_000, 1.44, 0.052,
    ),
}  # fmt: skip


def three(**changes: Any) -> ComparisonRecord:
    """Return adamw, adafactor and adam8bit, each once and completed."""
    return comparison([run(name) for name in KINDS], **changes)


def two_seeds() -> ComparisonRecord:
    """Return the three optimizers, each completed with two seeds."""
    return comparison([run(name, seed) for name in KINDS for seed in (42, 43)])


def planned_only() -> ComparisonRecord:
    """Return the three optimizers with nothing but their plans."""
    return comparison([planned(name) for name in KINDS], status="planned")


def one_failed() -> ComparisonRecord:
    """Return adamw completed, adafactor failed at its first update, adam8bit interrupted and lion8bit missing."""
    failed = run(
        "adafactor", updates=0, status="failed", failure="the loss is not finite at update 1: give a lower --lr"
    )
    interrupted = run("adam8bit", updates=20, status="interrupted", failure="stopped by SIGINT")
    done = comparison([run("adamw"), failed, interrupted], status="failed")
    missing = Attempt(name="lion8bit", seed=42, folder="lion8bit-42", failure=None)
    return compared([*done.attempts, missing], done.runs, status="failed", notes=done.notes)


def of_language_models() -> ComparisonRecord:
    """Return the three optimizers on a CUDA device, scored by perplexity."""
    return comparison([_language_model(record) for record in map(run, KINDS)])


def _language_model(record: RunRecord) -> RunRecord:
    assert record.measured is not None
    changes = {
        "model": records.model("gpt2", architecture="GPT2LMHeadModel", task="causal-lm"),
        "environment": {**record.environment, "device": "cuda:0", "device_name": "NVIDIA H200"},
        "measured": record.measured.model_copy(update={"profiled": None}),
        "baselines": None,
        "eval": tuple(
            EvalFacts(
                epoch=line.epoch, update=line.update, eval_loss=line.eval_loss,
                eval_perplexity=math.exp(line.eval_loss or 0),
            )
            for line in record.eval
        ),
    }  # fmt: skip
    return record.model_copy(update=changes)


def hostile() -> ComparisonRecord:
    """Return a failed comparison in which every text that a user gives is an attack on what shows it."""
    runs = []
    for number, text in enumerate(HOSTILE_TEXTS):
        record = run(tuple(KINDS)[number % len(KINDS)])
        changes: dict[str, Any] = {
            "model": records.model(text, architecture=text),
            "optimizer": record.optimizer.model_copy(update={"name": text}),
            "notes": (f"note: {text}",),
            "spec": {**record.spec, text: text},
            "environment": {**record.environment, text: {text: [text]}},
            "failure": text,
            "status": "failed",
        }
        runs.append(record.model_copy(update=changes))
    done = comparison(runs, notes=[f"note: {text}" for text in HOSTILE_TEXTS])
    attempts = [attempt.model_copy(update={"folder": attempt.name}) for attempt in done.attempts]
    return compared(attempts, runs, status="failed", notes=done.notes)


def comparison(runs: Sequence[RunRecord], **changes: Any) -> ComparisonRecord:
    """Return the comparison of runs under the names of their optimizers."""
    attempts = [
        Attempt(
            name=record.optimizer.name,
            seed=record.spec["loop"]["seed"],
            folder=f"{record.optimizer.name}-{record.spec['loop']['seed']}",
            status=record.status,
            failure=record.failure,
            exit_code={"planned": None, "completed": 0, "interrupted": 130, "failed": 7}[record.status],
            run=place,
        )
        for place, record in enumerate(runs)
    ]
    given = {"status": "completed", "notes": ("All weights are random: the model comes without any.",), **changes}
    return compared(attempts, runs, **given)


def planned(name: str, seed: int = 42, **changes: Any) -> RunRecord:
    """Return the plan of one run."""
    kind = KINDS[name]
    given = {
        "spec": {
            "model": {"name": "distilbert-base-cased", "task": "classification"},
            "data": {"train": "pairs.csv", "max_length": 128},
            "optim": {"name": name, "lr": 5e-5, "weight_decay": 0.01},
            "loop": {"engine": "pytorch", "precision": "fp32", "device": "auto", "seed": seed, "batch_size": 8},
            "output": {"out": f"runs/comparison/{name}-{seed}"},
        },
        "environment": {
            "effcli": "0.1.0", "python": "3.11.7", "platform": "Linux x86_64", "cpus": 2, "torch_threads": 2,
            "device": "cpu", "device_name": "x86_64", "out": f"runs/comparison/{name}-{seed}",
            "packages": {"torch": "2.13.0+cpu", "transformers": "5.24.0", "bitsandbytes": "0.50.2"},
        },
        "optimizer": records.optimizer(
            name, kind.tensors, state_bytes=kind.state_bytes, state_elements=kind.state_elements,
            rule_of_thumb_bytes=kind.rule_of_thumb_bytes, plan=plan(kind),
            total_before_activations_bytes=2 * WEIGHTS + kind.state_bytes,
        ),
        "total_updates": UPDATES,
        "notes": ("All weights are random: the model comes without any.",),
    }  # fmt: skip
    return records.planned(**{**given, **changes})


def run(name: str, seed: int = 42, *, updates: int = UPDATES, **changes: Any) -> RunRecord:
    """Return one run after so many updates; without any it has neither measurements nor results."""
    kind, record = KINDS[name], planned(name, seed)
    if not updates:
        return record.model_copy(update={"status": "completed", **changes})
    slower = 1 + (seed - 42) / 50
    totals = [total for update, total in _totals(kind) if update]
    profiled = ProfiledUpdate(
        update=3, rows=8, tokens=128, peak_allocated_bytes=max(totals) + 2048,
        planned_peak_allocated_bytes=max(totals), timeline_bytes=tuple(total + 2048 for total in totals),
    )  # fmt: skip
    speed = 1 / (kind.seconds_per_update * slower)
    given = {
        "history": tuple(_update(kind, seed, number, slower) for number in range(1, updates + 1)),
        "eval": tuple(
            EvalFacts(
                epoch=update * 3 / UPDATES, update=update, eval_loss=_loss(kind, seed, update) + 0.05,
                eval_accuracy=0.6 + 0.3 * update / UPDATES * kind.decay / 0.055,
                eval_f1=0.7 + 0.22 * update / UPDATES * kind.decay / 0.055,
            )
            for update in (20, 40, 60) if update <= updates
        ),
        "measured": records.measured(
            record, peak_allocated_bytes=profiled.peak_allocated_bytes, profiled=profiled,
            peak_rss_bytes=1_100 * MIB + max(totals),
        ),
        "throughput": Throughput(
            updates_per_second=speed, samples_per_second=8 * speed, tokens_per_second=8 * 61.3 * speed
        ),
    }  # fmt: skip
    return records.completed(record, **{**given, **changes})


def plan(kind: Kind) -> MemoryPlan:
    """Return the plan of a batch of 8 x 128 for one optimizer."""
    first, later = _phases(kind, first=True), _phases(kind, first=False)
    peak_phase = max(later, key=lambda phase: later[phase].total_bytes or 0)
    peak = later[peak_phase].total_bytes
    return MemoryPlan.model_validate(
        {
            "phases": later, "first_phases": first, "peak_phase": peak_phase, "peak_update": "later",
            "peak_allocated_bytes": peak, "peak_reserved_bytes": peak, "context_bytes": 0, "device_total_bytes": peak,
            "device": "cpu", "timeline": _timeline(kind),
            "basis": {
                "weights": "exact", "gradients": "exact", "optimizer_state": "exact", "activations": "traced",
                "temporaries": "traced",
            },
        }
    )  # fmt: skip


def _phases(kind: Kind, *, first: bool) -> dict[str, PhaseBytes]:
    """Return the highest moment of each phase, taken from the timeline, so that the two agree."""
    best: dict[str, TimelinePoint] = {}
    for point in _timeline(kind):
        if (point.update == 0) == first and (point.phase not in best or _sum(point) > _sum(best[point.phase])):
            best[point.phase] = point
    return {
        phase: PhaseBytes(**point.model_dump(exclude={"update", "micro", "phase"}), total_bytes=_sum(point))
        for phase, point in best.items()
    }


def _timeline(kind: Kind) -> tuple[TimelinePoint, ...]:
    """Return two updates: activations grow and go, gradients come, and the first step makes the state."""
    points: list[tuple[int, str, int, int, int, int]] = []
    for update in (0, 1):
        state = kind.state_bytes if update else 0
        for step in range(STEPS):
            points.append((update, "forward", 0, state, ACTIVATIONS * (step + 1) // STEPS, step % 3 * 4 * MIB))
        for step in range(STEPS):
            gradients, kept = WEIGHTS * (step + 1) // STEPS, ACTIVATIONS * (STEPS - step - 1) // STEPS
            points.append((update, "backward", gradients, state, kept, (step + 1) % 3 * 6 * MIB))
        for temporaries in (kind.step_temporaries_bytes, 0):
            points.append((update, "step", WEIGHTS, kind.state_bytes, 0, temporaries))
    return tuple(
        TimelinePoint(
            update=update, micro=0, phase=phase, weights_bytes=WEIGHTS, gradients_bytes=gradients,
            optimizer_state_bytes=state, activations_bytes=activations, temporaries_bytes=temporaries,
        )
        for update, phase, gradients, state, activations, temporaries in points
    )  # fmt: skip


def _sum(point: TimelinePoint) -> int:
    return sum(value for key, value in point.model_dump().items() if key.endswith("_bytes"))


def _totals(kind: Kind) -> list[tuple[int, int]]:
    return [(point.update, _sum(point)) for point in _timeline(kind)]


def _loss(kind: Kind, seed: int, update: int) -> float:
    return 0.3 + 0.4 * math.exp(-kind.decay * update) + 0.02 * math.sin(update * 1.7 + seed)


def _update(kind: Kind, seed: int, number: int, slower: float) -> UpdateFacts:
    return UpdateFacts(
        update=number,
        epoch=number * 3 / UPDATES,
        loss=_loss(kind, seed, number),
        lr=5e-5 * (1 - (number - 1) / UPDATES),
        grad_norm=1.0 + 0.5 * math.sin(number),
        training_s=number * kind.seconds_per_update * slower,
    )
