"""Plans of whole updates: what they leave out, what they name, and answers that a second prediction can check."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.utils import clip_grad_norm_
from transformers import AutoModelForSequenceClassification, DistilBertConfig

from effcli.devices import weights_dtype
from effcli.memory.plan import MemoryPlan
from effcli.optim import registry
from effcli.optim.groups import decay_groups
from effcli.pipeline.planning import Limits, combined_changes, plan_memory, with_changes, with_largest_batch
from effcli.pipeline.predicting import Choice, Predictor, Settings, Subject
from effcli.pipeline.subjects import target
from effcli.spec import OptimSpec
from effcli.units import MIB
from tests.profiled import live_bytes, profiled_peak

TINY = DistilBertConfig(vocab_size=1000, dim=128, n_layers=2, n_heads=2, hidden_dim=256, max_position_embeddings=128)
SETTINGS = Settings(batch_size=4, max_length=64)
NO_LIMIT = Limits(budget_bytes=None, context_bytes=0)


def tiny(dtype: str, recompute: bool) -> torch.nn.Module:
    with torch.device("meta"):
        model = AutoModelForSequenceClassification.from_config(TINY, dtype=getattr(torch, dtype))
    if recompute:
        model.activation_checkpointing_enable()
    return model


def predictor(device: str = "cuda") -> Predictor:
    subject = Subject(build=tiny, config=TINY, task="classification", can_recompute=True)
    return Predictor(subject, target(device))


def choice(name: str = "adamw") -> Choice:
    entry = registry.find(name)
    return Choice.of(entry, registry.resolve_hyper(entry, OptimSpec(name=name)), OptimSpec(name=name))


def planned(settings: Settings, name: str = "adamw", limits: Limits = NO_LIMIT) -> MemoryPlan:
    return plan_memory(predictor(), settings, choice(name), limits)


class Partly(torch.nn.Module):
    """A classifier with a layer that never runs."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(500, 64)
        self.unused = torch.nn.Linear(400, 400)
        self.head = torch.nn.Linear(64, 2)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> Any:
        return SimpleNamespace(logits=self.head(self.embed(input_ids).mean(1)))


def test_a_layer_that_never_runs_takes_its_weights_alone() -> None:
    def build(dtype: str, recompute: bool) -> torch.nn.Module:
        with torch.device("meta"):
            return Partly()

    subject = Subject(
        build=build, config=SimpleNamespace(model_type="partly"), task="classification", can_recompute=False
    )
    plan = plan_memory(Predictor(subject, target("cpu")), SETTINGS, choice(), NO_LIMIT)

    model = Partly()
    optimizer = choice().entry.build(decay_groups(model, 0.01), choice().hyper)

    def update() -> None:
        ids, labels = torch.zeros(4, 64, dtype=torch.int64), torch.zeros(4, dtype=torch.int64)
        torch.nn.functional.cross_entropy(model(ids).logits, labels).backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    measured = [live_bytes(model, optimizer) + profiled_peak(update) for _ in range(2)]
    assert plan.peak_allocated_bytes == pytest.approx(max(measured), rel=0.005)
    assert plan.phases["step"].optimizer_state_bytes == 8 * (500 * 64 + 64 * 2 + 2) + 3 * 4
    assert plan.notes == (
        "The task gives unused.weight, unused.bias no gradient (626.56 KiB): the peak has neither gradients nor state "
        "of theirs.",
    )


def test_the_largest_batch_fits_and_one_more_does_not() -> None:
    limits = Limits(budget_bytes=300 * MIB, context_bytes=20 * MIB)
    found = predictor()
    plan = with_largest_batch(plan_memory(found, SETTINGS, choice(), limits), found, SETTINGS, choice(), limits)
    largest = plan.largest_batch_size or 0
    assert largest > 100
    # Each from a prediction of its own, which traces that very batch.
    at, above = (planned(Settings(batch_size=size, max_length=64), limits=limits) for size in (largest, largest + 1))
    assert at.fits != "no"
    assert above.fits == "no"


@pytest.mark.parametrize("name", ["adamw", "adafactor", "adam8bit", "sgd"])
def test_parts_add_up_to_the_peak_and_weights_are_exact(name: str) -> None:
    plan = planned(SETTINGS, name)
    assert sum(part.num_bytes for part in plan.parts) == plan.peak_allocated_bytes
    weights = sum(parameter.numel() * 4 for parameter in tiny("float32", False).parameters())
    for phase in (*plan.phases.values(), *plan.first_phases.values()):
        amounts = phase.model_dump()
        assert amounts.pop("total_bytes") == sum(amounts.values())
        assert phase.weights_bytes == weights
    assert plan.phases["step"].gradients_bytes == weights
    assert plan.basis["optimizer_state"] == "exact"


def test_the_second_accumulation_step_keeps_gradients_through_the_forward_and_the_fourth_costs_nothing() -> None:
    one, two, four = (planned(Settings(batch_size=4, max_length=64, accum=accum)) for accum in (1, 2, 4))
    assert one.phases["forward"].gradients_bytes == 0
    assert two.phases["forward"].gradients_bytes == one.phases["step"].gradients_bytes
    assert four.peak_allocated_bytes == two.peak_allocated_bytes


def test_changes_are_what_a_plan_with_the_setting_gives() -> None:
    found = predictor()
    plan = with_changes(plan_memory(found, SETTINGS, choice(), NO_LIMIT), found, SETTINGS, choice())
    expected = {
        "--gradient-checkpointing": planned(Settings(batch_size=4, max_length=64, gradient_checkpointing=True)),
        "--batch-size 2 --accum 2": planned(Settings(batch_size=2, max_length=64, accum=2)),
        "--accum 2": planned(Settings(batch_size=4, max_length=64, accum=2)),
        "--optim adamw8bit": planned(SETTINGS, "adamw8bit"),
    }
    peaks = {change.flags: change.peak_allocated_bytes for change in plan.changes}
    assert {flags: peaks[flags] for flags in expected} == {
        flags: other.peak_allocated_bytes for flags, other in expected.items()
    }


def test_changes_together_end_with_an_optimizer_of_little_state() -> None:
    found = predictor()
    plan = plan_memory(found, SETTINGS, choice(), NO_LIMIT)
    changes = list(combined_changes(plan, found, SETTINGS, choice()))
    flags = "--batch-size 1 --accum 4 --gradient-checkpointing"
    more = ["", " --optim-arg implementation=fused", " --optim adamw8bit", " --optim adafactor"]
    assert [change.flags for change in changes] == [f"{flags}{flag}" for flag in more]
    alone = Settings(batch_size=1, max_length=64, accum=4, gradient_checkpointing=True)
    assert changes[-1].peak_allocated_bytes == planned(alone, "adafactor").peak_allocated_bytes
    assert changes[-1].saved_bytes > 0


@pytest.mark.parametrize(("size", "accum", "smaller"), [(5, 1, (1, 5)), (3, 2, (2, 3)), (9, 1, (3, 3)), (6, 1, (3, 2))])
def test_a_smaller_micro_batch_leaves_the_update_as_it_is(size: int, accum: int, smaller: tuple[int, int]) -> None:
    settings, found = Settings(batch_size=size, max_length=64, accum=accum), predictor()
    plan = with_changes(plan_memory(found, settings, choice(), NO_LIMIT), found, settings, choice())
    changes = [change.flags for change in plan.changes if "--batch-size" in change.flags]
    assert changes == ["--batch-size {} --accum {}".format(*smaller)]


def test_a_plan_of_pure_bf16_holds_weights_of_half_the_size() -> None:
    assert weights_dtype("bf16-pure") == "bfloat16"
    halves, full = (
        planned(Settings(batch_size=4, max_length=64, precision=precision)).phases["step"].weights_bytes
        for precision in ("bf16-pure", "bf16")
    )
    assert 2 * halves == full


def test_tracing_leaves_nothing_behind() -> None:
    """Random state, gradients' engine and functions are as they were."""
    dropout, state = torch.nn.functional.dropout, torch.get_rng_state()
    planned(SETTINGS)
    assert torch.nn.functional.dropout is dropout
    assert torch.equal(torch.get_rng_state(), state)
    ones = partial(torch.nn.functional.dropout, torch.ones(1000), p=0.5)
    assert 300 < int((ones() == 0).sum()) < 700
