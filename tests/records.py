"""Made-up records with real numbers, for tests of reports."""

from __future__ import annotations

from typing import Any

from effcli.measure.device_record import NvmlFacts
from effcli.measure.record import (
    Baselines,
    BatchFacts,
    DataFacts,
    EvalFacts,
    GroupFacts,
    Measured,
    ModelFacts,
    OptimizerFacts,
    RunRecord,
    StateAmount,
    Throughput,
    UpdateFacts,
)

F2_ADAMW = {
    "exp_avg": StateAmount(elements=65_783_042, bytes=263_132_168),
    "exp_avg_sq": StateAmount(elements=65_783_042, bytes=263_132_168),
    "step": StateAmount(elements=104, bytes=416),
}


def planned(**changes: Any) -> RunRecord:
    """Return the plan of distilbert-base-cased with AdamW on a CPU."""
    return RunRecord.model_validate(
        {
            "command": "train",
            "spec": {"loop": {"engine": "accelerate", "precision": "bf16"}},
            "environment": {"device": "cpu", "device_name": "x86_64", "out": "runs/one"},
            "model": model("distilbert-base-cased"),
            "optimizer": optimizer("adamw", F2_ADAMW, state_bytes=526_264_752, state_elements=131_566_188),
            "batch": BatchFacts(micro=4, accum=2, world_size=1, effective=8),
            "groups": (
                GroupFacts(weight_decay=0.01, num_tensors=40, num_elements=65_700_000),
                GroupFacts(weight_decay=0.0, num_tensors=64, num_elements=83_042),
            ),
            "data": DataFacts(train_rows=3668, eval_rows=408, skipped_rows=2, truncated_rows=3),
            "total_updates": 1377,
            **changes,
        }
    )


def model(name: str, **changes: Any) -> ModelFacts:
    """Return the facts of distilbert-base-cased under another name."""
    facts = {
        "architecture": "DistilBertForSequenceClassification",
        "task": "classification",
        "num_parameters": 65_783_042,
        "num_trainable_parameters": 65_783_042,
        "num_parameter_tensors": 104,
        "weights_bytes": 263_132_168,
        "gradients_bytes": 263_132_168,
    }
    return ModelFacts.model_validate({"name": name, **facts, **changes})


def optimizer(name: str, tensors: dict[str, StateAmount], **changes: Any) -> OptimizerFacts:
    """Return an optimizer's facts; the total is that of distilbert-base-cased with AdamW unless given."""
    facts = {"rule_of_thumb_bytes": None, "basis": "exact", "total_before_activations_bytes": 1_052_529_088}
    return OptimizerFacts.model_validate({"name": name, "tensors": tensors, **facts, **changes})


def measured(record: RunRecord, **changes: Any) -> Measured:
    """Return measurements that agree with the plan."""
    facts = {
        "weights_bytes": record.model.weights_bytes,
        "gradients_bytes": record.model.gradients_bytes,
        "optimizer_state_bytes": record.optimizer.state_bytes,
        "optimizer_state_elements": record.optimizer.state_elements,
        "tensors": record.optimizer.tensors,
        "peak_allocated_bytes": None,
        "peak_rss_bytes": 1_612_345_344,
        "nvml": NvmlFacts(reason="the run was on cpu, not on an NVIDIA GPU"),
    }
    return Measured.model_validate({**facts, **changes})


def completed(record: RunRecord | None = None, **changes: Any) -> RunRecord:
    """Return a finished run of the plan `record`."""
    record = record or planned()
    lines = (
        UpdateFacts(update=1, epoch=0.002, loss=0.7012, lr=5e-5, grad_norm=1.0),
        UpdateFacts(update=1377, epoch=3.0, loss=0.1234, lr=3.6e-8, grad_norm=1.0),
    )
    results = {
        "measured": measured(record),
        "history": lines,
        "eval": (
            EvalFacts(epoch=1.0, update=459, eval_loss=0.6, eval_accuracy=0.71, eval_f1=0.72),
            EvalFacts(epoch=3.0, update=1377, eval_loss=0.25, eval_accuracy=0.8775, eval_f1=0.8912),
        ),
        "throughput": Throughput(updates_per_second=1.25, samples_per_second=9.96, tokens_per_second=1234.4),
        "baselines": Baselines(
            majority_accuracy=0.6838, majority_f1=0.8122, bag_of_words_accuracy=0.7034, bag_of_words_f1=0.8032
        ),
        "status": "completed",
    }
    return record.model_copy(update={**results, **changes})
