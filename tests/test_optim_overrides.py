"""Hyperparameters by parameter: what an override changes in the update and in the state, and what is refused."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import get_scheduler

from effcli.errors import UsageError
from effcli.measure.optimizer_size import inspect_optimizer
from effcli.memory.state import predict_state
from effcli.models.build import parameter_infos
from effcli.optim.groups import decay_groups
from effcli.optim.hyper import resolve_hyper
from effcli.optim.learning_rate import current_lr
from effcli.optim.overrides import (
    Override,
    override_notes,
    values_for,
)
from effcli.optim.registry import find
from effcli.spec import OptimSpec
from tests.overridden import state_bytes, two_matrices, updated
from tests.tiny_models import set_gradients, tiny_distilbert

WORD = "distilbert.embeddings.word_embeddings.weight"
POSITION = "distilbert.embeddings.position_embeddings.weight"
EIGHT_BIT_BARE, EMBEDDINGS_KEPT, ALL_32_BIT = 295_648, 702_096, 1_115_664


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("adamw", {"lr": 1e-2}),
        ("adamw", {"beta1": 0.5}),
        ("adamw", {"beta2": 0.5}),
        ("adamw", {"eps": 1e-2}),
        ("adamw", {"weight_decay": 5.0}),
        ("adafactor", {"beta1": 0.5}),
        ("adafactor-torch", {"lr": 1e-2}),
        ("adam8bit", {"lr": 1e-2}),
        ("adam8bit", {"beta1": 0.5}),
        ("adam8bit", {"beta2": 0.5, "eps": 1e-2}),
        ("adam8bit", {"weight_decay": 5.0}),
        ("adam8bit", {"optim_bits": 32}),
        ("adam8bit", {"min_8bit_size": 5000}),
        ("adam32bit", {"optim_bits": 8}),
        ("lion8bit", {"beta1": 0.99}),
        ("ademamix8bit", {"beta3": 0.5}),
        ("sgd8bit", {"lr": 1e-1}),
        ("rmsprop8bit", {"eps": 1.0}),
        ("lamb32bit", {"beta1": 0.5}),
    ],
    ids=str,
)
def test_an_overridden_parameter_is_updated_as_by_an_optimizer_of_its_own(name: str, values: dict) -> None:
    entry, model = find(name), two_matrices()
    own = {key: values[key] for key in values if key in entry.defaults}
    rest = {key: values[key] for key in ("optim_bits", "min_8bit_size", "weight_decay") if key in values}
    expected = {}
    for part, spec in (
        ("plain", OptimSpec(name=name)),
        ("special", OptimSpec(name=name, args=own, **rest)),
    ):
        alone = copy.deepcopy(model)
        optimizer = entry.build(decay_groups(alone, spec.weight_decay), resolve_hyper(entry, spec))
        expected[part] = updated(alone, optimizer)[f"{part}.weight"]
        if part == "special":
            unchanged = copy.deepcopy(model)
            plain = updated(
                unchanged, entry.build(decay_groups(unchanged, 0.01), resolve_hyper(entry, OptimSpec(name=name)))
            )
            assert not torch.equal(plain["special.weight"], expected["special"])
    spec = OptimSpec(name=name, overrides={"special": values})
    got = updated(model, entry.build(decay_groups(model, 0.01), resolve_hyper(entry, spec)))
    assert torch.equal(got["plain.weight"], expected["plain"])
    assert torch.equal(got["special.weight"], expected["special"])


@pytest.mark.parametrize(
    ("name", "spec", "num_bytes"),
    [
        ("adam8bit", {}, EIGHT_BIT_BARE),
        ("adam8bit", {"overrides": {"embed": {"lr": 1e-5, "beta2": 0.9}}}, EIGHT_BIT_BARE),
        ("adam8bit", {"overrides": {"embed": {"optim_bits": 32}}}, EMBEDDINGS_KEPT),
        ("adam8bit", {"overrides": {"embed": {"is_sparse": True}}}, EIGHT_BIT_BARE),
        ("adam8bit", {"overrides": {"position": {"min_8bit_size": 5000}}}, EIGHT_BIT_BARE + 8 * 4096 - 2 * 4096 - 128),
        ("adam8bit", {"overrides": {"*": {"optim_bits": 32}, "embed": {"optim_bits": 8}}}, 711_264),
        ("adam8bit", {"optim_bits": 32, "overrides": {"embed": {"optim_bits": 8}}}, 711_264),
        ("adam8bit", {"keep_32bit": ("*",)}, ALL_32_BIT),
        ("paged-adamw8bit", {"keep_32bit": ("embed",)}, EMBEDDINGS_KEPT),
        ("adamw32bit", {}, ALL_32_BIT),
        ("adafactor", {}, 19_280),
        ("adafactor", {"overrides": {f"={WORD}": {"beta1": 0.9}}}, 19_280 + 4 * 64_000),
        ("adafactor", {"beta1": 0.9, "overrides": {f"={WORD}": {"beta1": "none"}}}, 19_280 + 4 * (139_458 - 64_000)),
        ("sgd", {"overrides": {"embed": {"lr": 1e-5}}}, 0),
    ],
    ids=str,
)
def test_the_state_is_what_the_law_says_under_every_kind_of_override(name: str, spec: dict, num_bytes: int) -> None:
    model = tiny_distilbert()
    predicted, measured = state_bytes(name, model, resolve_hyper(find(name), OptimSpec(name=name, **spec)))
    assert predicted == measured
    assert measured == num_bytes


@pytest.mark.parametrize("name", ["adamw", "adam8bit"])
def test_an_overridden_rate_is_scheduled_and_the_reported_one_is_that_of_the_rest(name: str) -> None:
    model, entry = two_matrices(), find(name)
    spec = OptimSpec(name=name, lr=1e-3, overrides={"plain": {"lr": 1e-5}})
    optimizer = entry.build(decay_groups(model, 0.0), resolve_hyper(entry, spec))
    schedule = get_scheduler("linear", optimizer, num_warmup_steps=0, num_training_steps=4)
    seen = []
    for _ in range(4):
        set_gradients(model)
        optimizer.step()
        rates = {name: group["lr"] for group in optimizer.param_groups for name in group["names"]}
        seen.append((current_lr(optimizer), rates["special.weight"], rates["plain.weight"]))
        schedule.step()
    assert seen == [pytest.approx((1e-3 * left, 1e-3 * left, 1e-5 * left)) for left in (1.0, 0.75, 0.5, 0.25)]


def test_a_scheduled_override_reaches_the_kernel_of_bitsandbytes() -> None:
    model, entry = two_matrices(), find("adam8bit")
    spec = OptimSpec(name="adam8bit", lr=1e-3, overrides={"special": {"lr": 1e-2, "optim_bits": 32}})
    optimizer = entry.build(decay_groups(model, 0.0), resolve_hyper(entry, spec))
    for group in optimizer.param_groups:
        group["lr"] = 0.0  # where a schedule ends
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    assert all(torch.equal(after, before[name]) for name, after in updated(model, optimizer, 1).items())


def test_is_sparse_is_passed_on_changes_nothing_and_that_is_said() -> None:
    entry, outcomes = find("adam8bit"), {}
    for sparse in (True, False):
        model = two_matrices()
        spec = OptimSpec(name="adam8bit", overrides={"special": {"is_sparse": True}} if sparse else {})
        hyper = resolve_hyper(entry, spec)
        optimizer = entry.build(decay_groups(model, 0.0), hyper)
        outcomes[sparse] = updated(model, optimizer)["special.weight"]
        configs = {
            name: optimizer.get_config(g, p, group)
            for g, group in enumerate(optimizer.param_groups)
            for p, name in enumerate(group["names"])
        }
        assert configs["special.weight"].get("is_sparse") is (True if sparse else None)
        assert "is_sparse" not in configs["plain.weight"]
        assert len(override_notes(entry, hyper)) == sparse
        assert all("no effect" in note for note in override_notes(entry, hyper))
    assert torch.equal(outcomes[True], outcomes[False])


def test_overrides_hold_whether_the_model_moves_before_or_after_the_build() -> None:
    entry = find("adam8bit")
    hyper = resolve_hyper(entry, OptimSpec(name="adam8bit", keep_32bit=("embed",)))
    sizes = set()
    for moves_first in (True, False):
        model = tiny_distilbert()
        if moves_first:
            model.to(torch.bfloat16)
        optimizer = entry.build(decay_groups(model, 0.01), hyper)
        model.to(torch.bfloat16)
        set_gradients(model)
        optimizer.step()
        sizes.add(inspect_optimizer(optimizer).state_bytes)
    assert sizes == {EMBEDDINGS_KEPT}


def test_an_exact_name_fits_that_name_alone() -> None:
    hyper = {"overrides": (Override(pattern="=a.weight", values={"lr": 1.0}),)}
    assert values_for("a.weight", hyper) == {"lr": 1.0}
    assert values_for("a.weight.b", hyper) == values_for("b.a.weight", hyper) == {}


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({"overrides": {"plain": {"optim_bits": 32, "lrr": 1}}}, ["--override 'plain'", "'lrr'"]),
        ({"overrides": {"plain": {}}}, ["--override 'plain' overrides nothing"]),
        ({"name": "adamw", "overrides": {"plain": {"optim_bits": 32}}}, ["'adamw' cannot override 'optim_bits'"]),
        ({"name": "sgd8bit", "overrides": {"plain": {"beta1": 0.5}}}, ["'sgd8bit' cannot override 'beta1'"]),
        ({"overrides": {"plain": {"lr": -1}}}, ["'lr'", "at least 0"]),
    ],
)
def test_a_wrong_override_of_the_specification_is_refused(spec: dict, words: list[str]) -> None:
    spec = OptimSpec(**{"name": "adam8bit", **spec})
    with pytest.raises(UsageError) as error:
        resolve_hyper(find(spec.name), spec)
    assert all(word in str(error.value) for word in words), str(error.value)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({"keep_32bit": ("lm_head",)}, "--keep-32bit 'lm_head' fits no trainable parameter; a name looks like"),
        ({"overrides": {"lm_head": {"lr": 1.0}}}, "--override 'lm_head' fits no trainable parameter"),
        ({"overrides": {"=plain": {"lr": 1.0}}}, "--override '=plain' fits no trainable parameter"),
        ({"keep_32bit": ("frozen",)}, "--keep-32bit 'frozen' fits no trainable parameter"),
        (
            {"keep_32bit": ("weight",), "overrides": {"special": {"optim_bits": 8}}},
            "--override 'special' and --keep-32bit 'weight' contradict each other over 'special.weight'",
        ),
    ],
)
def test_a_pattern_that_fits_nothing_or_contradicts_is_refused_by_estimate_and_build(spec: dict, words: str) -> None:
    model, entry = two_matrices(), find("adam8bit")
    model.frozen = torch.nn.Parameter(torch.ones(2), requires_grad=False)
    hyper = resolve_hyper(entry, OptimSpec(name="adam8bit", **spec))
    for call in (
        lambda: predict_state(entry, parameter_infos(model), hyper),
        lambda: entry.build(decay_groups(model, 0), hyper),
    ):
        with pytest.raises(UsageError) as error:
            call()
        assert str(error.value).startswith(words)


def test_saying_the_same_twice_or_narrowing_a_pattern_is_no_contradiction() -> None:
    entry, model = find("adam8bit"), two_matrices()
    for spec, num_bytes in (
        ({"keep_32bit": ("special",), "overrides": {"special": {"optim_bits": 32, "lr": 1.0}}}, 1),
        ({"keep_32bit": ("special",), "overrides": {"plain": {"optim_bits": 8}}}, 1),
        ({"overrides": {"weight": {"optim_bits": 32}, "plain": {"optim_bits": 8}}}, 1),
        ({"overrides": {"plain": {"optim_bits": 8}, "weight": {"optim_bits": 32}}}, 0),
    ):
        predicted = predict_state(
            entry, parameter_infos(model), resolve_hyper(entry, OptimSpec(name="adam8bit", **spec))
        )
        assert predicted.num_quantised == num_bytes
