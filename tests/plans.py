"""A made-up plan of a peak with plausible numbers, for tests of reports."""

from __future__ import annotations

from typing import Any

from effcli.measure.estimate_record import EstimateRecord
from effcli.memory.plan import MemoryPlan, PhaseBytes, TimelinePoint
from tests import records
from tests.records import F2_ADAMW

MIB = 2**20
GIB = 2**30
WEIGHTS = 263_132_168
STATE = 526_264_752
CONTEXT = 450 * MIB
STEPS = 12


def phase(gradients: int, activations: int, temporaries: int, state: int = STATE) -> PhaseBytes:
    """Return the highest moment of a phase of distilbert-base-cased with AdamW."""
    return PhaseBytes(
        weights_bytes=WEIGHTS,
        gradients_bytes=gradients,
        optimizer_state_bytes=state,
        activations_bytes=activations,
        temporaries_bytes=temporaries,
        total_bytes=WEIGHTS + gradients + state + activations + temporaries,
    )


def timeline(accum: int = 1) -> tuple[TimelinePoint, ...]:
    """Return the ups and downs of two updates, the state made in the first step."""
    points = []
    for update in (0, 1):
        state = STATE if update else 0
        kept = {"update": update, "weights_bytes": WEIGHTS}
        for micro in range(accum):
            held = WEIGHTS if micro else 0
            for step in range(STEPS):
                points.append({**kept, "micro": micro, "phase": "forward", "gradients_bytes": held,
                    "optimizer_state_bytes": state, "activations_bytes": (step + 1) * 100 * MIB,
                    "temporaries_bytes": step % 3 * 20 * MIB})  # fmt: skip
            for step in range(STEPS):
                made = max(held, WEIGHTS * (step + 1) // STEPS)
                points.append({**kept, "micro": micro, "phase": "backward", "gradients_bytes": made,
                    "optimizer_state_bytes": state, "activations_bytes": (STEPS - step) * 100 * MIB,
                    "temporaries_bytes": (step + 1) % 3 * 30 * MIB})  # fmt: skip
        for step in range(4):
            points.append({**kept, "micro": accum - 1, "phase": "step", "gradients_bytes": WEIGHTS if step < 3 else 0,
                "optimizer_state_bytes": STATE if update or step else 0, "activations_bytes": 0,
                "temporaries_bytes": WEIGHTS if step == 1 else 0})  # fmt: skip
    return tuple(TimelinePoint.model_validate(point) for point in points)


def plan(**changes: Any) -> MemoryPlan:
    """Return the plan of distilbert-base-cased with AdamW, batch 8 x 512, held against 16 GiB."""
    peak = phase(WEIGHTS // 12, 1200 * MIB, 60 * MIB)
    values: dict[str, Any] = {
        "phases": {"forward": phase(0, 1200 * MIB, 20 * MIB), "backward": peak, "step": phase(WEIGHTS, 0, WEIGHTS)},
        "first_phases": {
            "forward": phase(0, 1200 * MIB, 20 * MIB, 0),
            "backward": phase(WEIGHTS // 12, 1200 * MIB, 60 * MIB, 0),
            "step": phase(WEIGHTS, 0, WEIGHTS),
        },
        "basis": {
            "weights": "exact", "gradients": "exact", "optimizer_state": "exact", "activations": "traced",
            "temporaries": "traced", "context": "assumed",
        },
        "device": "cuda",
        "peak_phase": "backward",
        "peak_update": "later",
        "peak_allocated_bytes": peak.total_bytes,
        "peak_reserved_bytes": 2200 * MIB,
        "context_bytes": CONTEXT,
        "device_total_bytes": 2200 * MIB + CONTEXT,
        "budget_bytes": 16 * GIB,
        "fits": "fits",
        "largest_batch_size": 80,
        "parts": [
            {"name": name, "category": category, "num_bytes": num_bytes, "basis": basis}
            for name, category, num_bytes, basis in (
                ("attention", "activations", 420 * MIB, "traced"),
                ("optimizer state", "optimizer_state", STATE, "exact"),
                ("feed-forward layers", "activations", 384 * MIB, "traced"),
                ("weights", "weights", WEIGHTS, "exact"),
                ("autocast copies of weights", "activations", 126 * MIB, "traced"),
                ("dropout masks", "activations", 120 * MIB, "traced"),
                ("layer activations", "activations", 100 * MIB, "traced"),
                ("logits and loss", "activations", 50 * MIB, "traced"),
                ("gradients", "gradients", WEIGHTS // 12, "exact"),
                ("cuBLAS workspaces", "temporaries", 2 * 8_519_680, "assumed"),
                ("temporaries of operators", "temporaries", 60 * MIB - 2 * 8_519_680, "traced"),
            )
        ],
        "modules": [
            {"name": f"distilbert.transformer.layer.{index}.{part}", "category": "activations",
             "num_bytes": (90 - index) * MIB // (1 + (part == "ffn")), "basis": "traced"}
            for part in ("attention", "ffn") for index in range(6)
        ],
        "changes": [
            {"name": name, "flags": flags, "peak_allocated_bytes": peak.total_bytes - saved, "saved_bytes": saved,
             "peak_phase": then}
            for name, flags, saved, then in (
                ("8-bit state", "--optim adam8bit", STATE - 134_004_336, "backward"),
                ("checkpointing", "--gradient-checkpointing", 900 * MIB, "step"),
                ("half the micro-batch", "--batch-size 4", 600 * MIB, "backward"),
                ("fused instead of foreach", "--optim-arg implementation=fused", 0, "backward"),
                ("one more accumulation step", "--accum 2", -(WEIGHTS - WEIGHTS // 12), "backward"),
            )
        ],
        "timeline": timeline(),
        "notes": ("Attention is that of sdpa: the mask is all ones, so the flash kernel runs.",),
    }  # fmt: skip
    return MemoryPlan.model_validate({**values, **changes})


def scaled(factor: int) -> dict[str, Any]:
    """Return changes that make every amount of the plan larger."""

    def grown(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: grown(inner) for key, inner in value.items()}
        if isinstance(value, list | tuple):
            return [grown(inner) for inner in value]
        return value * factor if isinstance(value, int) and value > 1000 else value

    dumped: dict[str, Any] = grown(plan().model_dump())
    return dumped


def exchanging(made: MemoryPlan) -> MemoryPlan:
    """Return the plan of one of several processes, with as much for exchange as for weights."""

    def with_exchange(moment: PhaseBytes) -> PhaseBytes:
        more = {"communication_bytes": moment.weights_bytes, "total_bytes": moment.total_bytes + moment.weights_bytes}
        return moment.model_copy(update=more)

    return made.model_copy(
        update={
            "basis": {**made.basis, "communication": "assumed"},
            "phases": {name: with_exchange(moment) for name, moment in made.phases.items()},
            "first_phases": {name: with_exchange(moment) for name, moment in made.first_phases.items()},
        }
    )


def estimate(*plans: MemoryPlan, **changes: Any) -> EstimateRecord:
    """Return an estimate of distilbert-base-cased, one optimizer for each plan."""
    names = ("adamw", "adam8bit", "adafactor")
    return EstimateRecord.model_validate(
        {
            "precision": "bf16",
            "model": records.model("distilbert-base-cased"),
            "buffers_bytes": 4096,
            "tied": (),
            "optimizers": tuple(
                records.optimizer(name, F2_ADAMW, state_bytes=STATE, state_elements=131_566_188, plan=plan)
                for name, plan in zip(names, plans, strict=False)
            ),
            "peak": {
                "batch": {"micro": 8, "accum": 1, "world_size": 1, "effective": 8},
                "max_length": 512,
                "device": "cuda",
                "gradient_checkpointing": False,
                "attn": None,
                "max_grad_norm": 1.0,
                "gpu": None,
                "budget_bytes": None,
                "versions": {"torch": "2.13.0", "transformers": "5.24.0"},
            },
            **changes,
        }
    )
