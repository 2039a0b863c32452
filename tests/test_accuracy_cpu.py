"""Predicted CPU peaks hold against the allocator's own record of real updates; `make accuracy` compares many more."""

from __future__ import annotations

import statistics
from functools import cache

import pytest
import torch
from transformers import AutoModelForSequenceClassification, DistilBertConfig, PreTrainedModel

from effcli.memory.allocator import PlainAllocator
from effcli.optim import registry
from effcli.optim.implementation import with_implementation
from effcli.pipeline.predicting import Choice, Predictor, Settings, Subject, Target
from effcli.spec import OptimSpec
from effcli.trace.cpu import CpuKernels
from effcli.units import MIB
from tests.accuracy import cpu
from tests.accuracy.cpu_case import Case, Outcome, outcome
from tests.profiled import live_bytes, profiled_peak

FAST = list(cpu.cases())[::17]
BASE = {"vocab_size": 28996, "num_labels": 2}
"""distilbert-base-cased, two labels."""
WITHOUT_DROPOUT = {"dropout": 0.0, "attention_dropout": 0.0, "seq_classif_dropout": 0.0}


@cache
def found(case: Case) -> Outcome:
    return outcome(case)


@pytest.mark.parametrize("case", FAST, ids=str)
def test_no_peak_is_off_by_more_than_one_percent(case: Case) -> None:
    assert found(case).measured == pytest.approx(found(case).predicted, rel=0.01)


def test_half_of_the_peaks_are_within_a_thousandth() -> None:
    assert statistics.median(abs(found(case).error) for case in FAST) <= 0.001


def test_many_combinations_meet_every_optimizer_and_setting() -> None:
    cases = list(cpu.cases())

    assert len(set(cases)) == len(cases) >= 60
    for model in {case.model for case in cases}:
        own = [case for case in cases if case.model == model]
        assert {case.optim for case in own} == {"adamw", "adafactor", "adam8bit", "sgd"}
        settings = {(case.precision, case.checkpointing, case.accum, case.dropout) for case in own}
        assert len({setting for setting in settings if setting[0] in ("fp32", "bf16")}) == 16


@pytest.mark.parametrize(
    ("implementation", "changes", "measured_mib"),
    [("foreach", {}, 1254.732), ("for-loop", {}, 1196.209), ("for-loop", WITHOUT_DROPOUT, 1173.688)],
    ids=["foreach", "for-loop", "without dropout"],
)
def test_distilbert_base_takes_what_the_profiler_once_measured(
    implementation: str, changes: dict[str, float], measured_mib: float
) -> None:
    assert _predicted_base(implementation, changes) / MIB == pytest.approx(measured_mib, rel=3e-4)


@pytest.mark.slow
def test_distilbert_base_takes_what_the_profiler_measures() -> None:
    model = AutoModelForSequenceClassification.from_config(DistilBertConfig(**BASE)).train()
    optimizer = torch.optim.AdamW(model.parameters())
    ids = torch.ones(8, 128, dtype=torch.int64)
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids[:, 0]}

    def update() -> None:
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    update()
    measured = live_bytes(model, optimizer, [batch]) + profiled_peak(update)

    assert _predicted_base("for-loop", {}) == pytest.approx(measured, rel=2e-4)


def _predicted_base(implementation: str, changes: dict[str, float]) -> int:
    config = DistilBertConfig(**BASE, **changes)

    def build(dtype: str, recompute: bool) -> PreTrainedModel:
        with torch.device("meta"):
            return AutoModelForSequenceClassification.from_config(config)

    subject = Subject(build=build, config=config, task="classification", can_recompute=True)
    target = Target(device="cpu", kernels=CpuKernels(), allocator=PlainAllocator)
    entry = registry.find("adamw")
    hyper = with_implementation(entry, registry.default_hyper(entry), implementation)
    choice = Choice.of(entry, hyper, OptimSpec())
    return Predictor(subject, target).replay(Settings(batch_size=8, max_length=128), choice).peak.total_bytes
