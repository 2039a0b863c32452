"""Made-up records of runs on a CUDA device: numbers that fit together, and every kind of missing part."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from effcli.measure.comparison_record import ComparisonRecord
from effcli.measure.device_record import AllocatorFacts, Amount, DeviceMoment, NvmlFacts, PhasePeak
from effcli.measure.record import EvalFacts, OptimizerFacts, RunRecord, StateAmount
from effcli.memory.plan import MemoryPlan, PhaseBytes
from tests import comparisons, records

MIB = 2**20
PARAMETERS = 786_432_000
CONTEXT = 504_658_657
CUBLAS = 2 * 8_519_680
NOT_LISTED = "the driver does not list this process (in a container it sees other process ids)"
NO_PERMISSION = "no permission to ask the NVIDIA driver about this device"
LESS_BEFORE = "the whole device less what was in use before the run"
EVALUATIONS = (EvalFacts(epoch=3.0, update=1377, eval_loss=2.3, eval_perplexity=9.9742),)
ADAMW = {
    "exp_avg": StateAmount(elements=PARAMETERS, bytes=4 * PARAMETERS),
    "exp_avg_sq": StateAmount(elements=PARAMETERS, bytes=4 * PARAMETERS),
    "step": StateAmount(elements=104, bytes=416),
}


def amount(mib: float, **changes: Any) -> Amount:
    """Return an amount whose highest and last readings are the same, in MiB."""
    return Amount(peak_bytes=int(mib * MIB), last_bytes=int(mib * MIB), **changes)


def unknown(reason: str) -> Amount:
    """Return an amount that could not be read."""
    return Amount(reason=reason)


def phase(gradients: float, state: float, activations: float, temporaries: float) -> PhaseBytes:
    """Return the highest moment of a phase, amounts in MiB; the weights take 3,000."""
    parts = {
        "weights_bytes": 3000 * MIB,
        "gradients_bytes": int(gradients * MIB),
        "optimizer_state_bytes": int(state * MIB),
        "activations_bytes": int(activations * MIB),
        "temporaries_bytes": int(temporaries * MIB),
    }
    return PhaseBytes(**parts, total_bytes=sum(parts.values()))


def plan(**changes: Any) -> MemoryPlan:
    """Return a plan that peaks in the step at 14,944 MiB allocated and 16,600 MiB reserved."""
    values: dict[str, Any] = {
        "phases": {
            "forward": phase(0, 6000, 2600, 100),
            "backward": phase(2900, 6000, 2500, 300),
            "step": phase(3000, 6000, 0, 2944),
        },
        "first_phases": {
            "forward": phase(0, 0, 2600, 100),
            "backward": phase(2900, 0, 2500, 300),
            "step": phase(3000, 6000, 0, 2944),
        },
        "basis": {
            "weights": "exact", "gradients": "exact", "optimizer_state": "exact", "activations": "traced",
            "temporaries": "traced", "context": "assumed",
        },
        "device": "cuda",
        "peak_phase": "step",
        "peak_update": "later",
        "peak_allocated_bytes": 14_944 * MIB,
        "peak_reserved_bytes": 16_600 * MIB,
        "context_bytes": CONTEXT,
        "device_total_bytes": 16_600 * MIB + CONTEXT,
        "parts": [
            {"name": "optimizer state", "category": "optimizer_state", "num_bytes": 6000 * MIB, "basis": "exact"},
            {"name": "cuBLAS workspaces", "category": "temporaries", "num_bytes": CUBLAS, "basis": "assumed"},
        ],
    }  # fmt: skip
    return MemoryPlan.model_validate({**values, **changes})


def optimizer(**changes: Any) -> OptimizerFacts:
    """Return AdamW's facts: 6,000 MiB of state on the device and 416 bytes on the host."""
    facts: dict[str, Any] = {
        "state_bytes": 8 * PARAMETERS + 416,
        "state_elements": 2 * PARAMETERS + 104,
        "placements": {"device": 8 * PARAMETERS, "host": 416},
        "allocator_state_bytes": 8 * PARAMETERS + 28 * 512,
        "total_before_activations_bytes": 16 * PARAMETERS + 416,
        "plan": plan(),
    }
    merged = {"tensors": ADAMW, **facts, **changes}
    return records.optimizer("adamw", merged.pop("tensors"), **merged)


def allocator(**changes: Any) -> AllocatorFacts:
    """Return what torch's allocator counted: 15,006 MiB allocated and 16,726 MiB reserved at most."""
    phases = {
        "loading": (3000, 3020),
        "forward": (11_720, 14_500),
        "backward": (14_730, 16_500),
        "step": (15_006, 16_726),
        "evaluation": (12_300, 16_726),
    }
    facts: dict[str, Any] = {
        "peak_allocated_bytes": 15_006 * MIB,
        "peak_reserved_bytes": 16_726 * MIB,
        "phases": {
            name: PhasePeak(peak_allocated_bytes=allocated * MIB, peak_reserved_bytes=reserved * MIB)
            for name, (allocated, reserved) in phases.items()
        },
        "first_step_change_bytes": 8 * PARAMETERS + 28 * 512,
        "cublas_workspace_bytes": CUBLAS,
    }
    return AllocatorFacts.model_validate({**facts, **changes})


def moment(**changes: Any) -> DeviceMoment:
    """Return the sample in which this process held the most: 17,300 MiB, 16,726 of them reserved."""
    facts: dict[str, Any] = {
        "allocated_bytes": 14_800 * MIB,
        "reserved_bytes": 16_726 * MIB,
        "context_bytes": 574 * MIB,
        "process_bytes": 17_300 * MIB,
        "others_bytes": 1000 * MIB,
        "device_bytes": 18_300 * MIB,
    }
    return DeviceMoment.model_validate({**facts, **changes})


def nvml(**changes: Any) -> NvmlFacts:
    """Return 412 samples of the driver: 17,300 MiB of this process, 18,300 of the whole card in use."""
    facts: dict[str, Any] = {
        "name": "NVIDIA GeForce RTX 4090",
        "uuid": "GPU-5c3a2f6e-8f7a-4a1b-9f0e-0c7d6a1b2c3d",
        "driver_version": "570.86.15",
        "total_bytes": 24_564 * MIB,
        "driver_reserved_bytes": 450 * MIB,
        "interval_s": 0.1,
        "num_samples": 412,
        "device": amount(18_300),
        "process": amount(17_300),
        "context": amount(574),
        "others": amount(1000),
        "highest": moment(),
    }
    return NvmlFacts.model_validate({**facts, **changes})


def blind(reason: str, **changes: Any) -> NvmlFacts:
    """Return what is left where the process cannot be read: the whole device."""
    unread = dict.fromkeys(("process", "context", "others"), unknown(reason))
    seen = moment(process_bytes=None, context_bytes=None, others_bytes=None)
    return nvml(**{**unread, "highest": seen, **changes})


def planned(**changes: Any) -> RunRecord:
    """Return the plan of the run."""
    facts: dict[str, Any] = {
        "model": records.model(
            "made-up-750m", architecture="LlamaForCausalLM", task="causal-lm", num_parameters=PARAMETERS,
            num_trainable_parameters=PARAMETERS, weights_bytes=4 * PARAMETERS, gradients_bytes=4 * PARAMETERS,
        ),
        "optimizer": optimizer(),
        "environment": {"device": "cuda:0", "device_name": "NVIDIA GeForce RTX 4090", "out": "runs/one"},
        "spec": {"loop": {"engine": "pytorch", "precision": "fp32", "seed": 42}},
    }  # fmt: skip
    return records.planned(**{**facts, **changes})


def completed(record: RunRecord | None = None, *, changes: Mapping[str, Any] | None = None, **facts: Any) -> RunRecord:
    """Return the finished run; `facts` change what was measured, `changes` the record."""
    record = record or planned()
    given = {"peak_allocated_bytes": 15_006 * MIB, "allocator": allocator(), "nvml": nvml(), **facts}
    return records.completed(
        record,
        **{"baselines": None, "eval": EVALUATIONS, "measured": records.measured(record, **given), **(changes or {})},
    )


def _without_plan() -> RunRecord:
    return completed(planned(optimizer=optimizer(plan=None, placements={}, allocator_state_bytes=None)))


def _paged() -> RunRecord:
    """Return a run whose moments are paged: 6,000 MiB fewer in the allocator, as planned and as measured."""
    placed = {"paged": 8 * PARAMETERS, "host": 416}
    phases = {"phases": {"step": phase(3000, 0, 0, 2944)}, "first_phases": {"step": phase(3000, 0, 0, 2944)}}
    peaks = {"peak_allocated_bytes": 8944 * MIB, "peak_reserved_bytes": 10_600 * MIB}
    record = planned(
        optimizer=optimizer(
            placements=placed,
            allocator_state_bytes=14_336,
            plan=plan(**phases, **peaks, device_total_bytes=10_600 * MIB + CONTEXT),
        )
    )
    counted = allocator(
        peak_allocated_bytes=9006 * MIB, peak_reserved_bytes=10_726 * MIB, first_step_change_bytes=14_336, phases={}
    )
    seen = moment(reserved_bytes=10_726 * MIB, process_bytes=11_300 * MIB, device_bytes=12_300 * MIB)
    driver = nvml(process=amount(11_300), device=amount(12_300), highest=seen)
    return completed(record, peak_allocated_bytes=9006 * MIB, allocator=counted, nvml=driver)


def _backward_peak() -> RunRecord:
    peak = {"peak_phase": "backward", "peak_allocated_bytes": 14_700 * MIB}
    return completed(planned(optimizer=optimizer(plan=plan(**peak))))


def _evaluation_peak() -> RunRecord:
    peaks = dict(allocator().phases)
    peaks["evaluation"] = PhasePeak(peak_allocated_bytes=15_900 * MIB, peak_reserved_bytes=16_726 * MIB)
    return completed(
        peak_allocated_bytes=15_900 * MIB, allocator=allocator(peak_allocated_bytes=15_900 * MIB, phases=peaks)
    )


def _other_moments() -> RunRecord:
    seen = moment(
        reserved_bytes=16_000 * MIB, process_bytes=16_574 * MIB, others_bytes=500 * MIB, device_bytes=17_074 * MIB
    )
    return completed(
        nvml=nvml(process=amount(16_574), context=amount(598), device=amount(20_100), others=amount(6000), highest=seen)
    )


def _mig() -> RunRecord:
    return completed(
        nvml=nvml(
            name="NVIDIA A100-SXM4-40GB MIG 4g.20gb",
            uuid="MIG-0a1b",
            total_bytes=19_968 * MIB,
            driver_reserved_bytes=None,
        )
    )


ALL = {
    "whole": completed,
    "planned": planned,
    "peak in the backward phase": _backward_peak,
    "highest in the evaluation": _evaluation_peak,
    "other moments": _other_moments,
    "paged": _paged,
    "MIG": _mig,
    "process not listed": lambda: completed(nvml=blind(NOT_LISTED)),
    "less what was before": lambda: completed(
        nvml=nvml(
            process=amount(17_300, how=LESS_BEFORE), context=amount(574, how=LESS_BEFORE), others=unknown(NOT_LISTED),
            highest=moment(others_bytes=None),
        )
    ),
    "no permission": lambda: completed(nvml=NvmlFacts(reason=NO_PERMISSION)),
    "no permission, told by amount": lambda: completed(
        nvml=blind(NO_PERMISSION, device=unknown(NO_PERMISSION), highest=None, total_bytes=None)
    ),
    "several reasons": lambda: completed(
        nvml=blind("the driver does not report it", device=unknown("unknown error (999)"), highest=None)
    ),
    "driver lost": lambda: completed(
        nvml=nvml(num_samples=37, reason="the driver was lost after 3.7 s: GPU is lost")
    ),
    "no samples": lambda: completed(
        nvml=NvmlFacts(interval_s=0.1, name="NVIDIA H200", reason="the run ended before the first sample")
    ),
    "peaks without a moment": lambda: completed(nvml=nvml(highest=None)),
    "no allocator": lambda: completed(allocator=None),
    "nothing at all": lambda: completed(peak_allocated_bytes=None, allocator=None, nvml=NvmlFacts()),
    "no plan": _without_plan,
    "no phases": lambda: completed(allocator=allocator(phases={})),
    "resumed": lambda: completed(
        allocator=allocator(
            first_step_change_bytes=None, first_step_reason="the state was loaded from a checkpoint",
            cublas_workspace_bytes=None, cublas_reason="torch does not tell",
        )
    ),
}  # fmt: skip
"""A way to make each kind of record."""


def named(record: RunRecord, name: str, *, seed: int = 42) -> RunRecord:
    """Return a record under the name of another optimizer, with another seed."""
    spec = {"loop": {**record.spec["loop"], "seed": seed}}
    return record.model_copy(update={"optimizer": record.optimizer.model_copy(update={"name": name}), "spec": spec})


def lighter(saved: int) -> RunRecord:
    """Return the finished run with so many MiB less of state, in everything that holds it."""
    record = completed()
    assert record.measured is not None
    state = 8 * PARAMETERS - saved * MIB
    less_planned = plan(
        peak_allocated_bytes=(14_944 - saved) * MIB, peak_reserved_bytes=(16_600 - saved) * MIB,
        device_total_bytes=(16_600 - saved) * MIB + CONTEXT, phases={"step": phase(3000, 6000 - saved, 0, 2944)},
        first_phases={"step": phase(3000, 6000 - saved, 0, 2944)},
    )  # fmt: skip
    facts = optimizer(
        state_bytes=state, placements={"device": state}, allocator_state_bytes=state, plan=less_planned,
        tensors={"state": StateAmount(elements=2 * PARAMETERS, bytes=state)}, state_elements=2 * PARAMETERS,
        total_before_activations_bytes=8 * PARAMETERS + state,
    )  # fmt: skip
    counted = allocator(
        peak_allocated_bytes=(15_006 - saved) * MIB, peak_reserved_bytes=(16_726 - saved) * MIB,
        first_step_change_bytes=state, phases={},
    )  # fmt: skip
    process, device = 17_300 - saved, 18_300 - saved
    seen = moment(
        reserved_bytes=(16_726 - saved) * MIB, process_bytes=process * MIB, device_bytes=device * MIB,
        allocated_bytes=(14_800 - saved) * MIB,
    )  # fmt: skip
    driver = nvml(process=amount(process), device=amount(device), highest=seen)
    return completed(
        planned(optimizer=facts), peak_allocated_bytes=(15_006 - saved) * MIB, allocator=counted, nvml=driver
    )


def three() -> ComparisonRecord:
    """Return AdamW, Adafactor and 8-bit Adam on one card."""
    runs = [completed(), named(lighter(5990), "adafactor"), named(lighter(4470), "adam8bit")]
    return comparisons.comparison(runs)


def every_kind() -> ComparisonRecord:
    """Return a comparison of every kind of record of a finished run."""
    finished = {name: record for name, make in ALL.items() if (record := make()).measured is not None}
    return comparisons.comparison([named(record, name) for name, record in finished.items()])
