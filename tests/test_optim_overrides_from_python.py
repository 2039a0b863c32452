"""Overrides made from parameters and modules, with the arguments of bitsandbytes' manager."""

from __future__ import annotations

import bitsandbytes
import pytest
import torch

from effcli.errors import UsageError
from effcli.optim.groups import decay_groups
from effcli.optim.hyper import resolve_hyper
from effcli.optim.overrides import (
    override_config,
    register_module_override,
)
from effcli.optim.registry import find
from effcli.spec import OptimSpec
from tests.overridden import state_bytes, two_matrices, updated
from tests.tiny_models import tiny_distilbert, tiny_gpt2


@pytest.mark.parametrize(
    "choose",
    [
        lambda model: (
            override_config(model, model.distilbert.embeddings.word_embeddings.weight, "optim_bits", 32)
            + override_config(model, model.distilbert.embeddings.position_embeddings.weight, "optim_bits", 32)
        ),
        lambda model: override_config(
            model, [p for n, p in model.named_parameters() if "_embeddings" in n], key_value_dict={"optim_bits": 32}
        ),
        lambda model: override_config(model, model.distilbert.embeddings.parameters(), "optim_bits", 32),
        lambda model: (
            register_module_override(model, model.distilbert.embeddings.word_embeddings, "weight", {"optim_bits": 32})
            + register_module_override(
                model, model.distilbert.embeddings.position_embeddings, "weight", {"optim_bits": 32}
            )
        ),
    ],
    ids=["parameter", "list", "all of a module", "module"],
)
def test_overrides_from_python_keep_the_embeddings_in_32_bit(choose) -> None:
    model = tiny_distilbert()
    hyper = resolve_hyper(find("adam8bit"), OptimSpec(name="adam8bit"), choose(model))
    assert state_bytes("adam8bit", model, hyper) == (702_096, 702_096)


def test_overrides_from_python_mean_what_upstreams_manager_means() -> None:
    manager = bitsandbytes.optim.GlobalOptimManager.get_instance()
    config = {"betas": (0.5, 0.6), "lr": 1e-2, "optim_bits": 32}
    ours, theirs = two_matrices(), two_matrices()
    try:
        manager.register_parameters(theirs.parameters())
        upstream = bitsandbytes.optim.Adam(theirs.parameters(), lr=1e-3, optim_bits=8)
        manager.override_config(theirs["special"].weight, key_value_dict=dict(config))
        expected = updated(theirs, upstream)
    finally:
        manager.initialize()
    made = override_config(ours, ours["special"].weight, key_value_dict=config)
    hyper = resolve_hyper(find("adam8bit"), OptimSpec(name="adam8bit", lr=1e-3, weight_decay=0.0), made)
    got = updated(ours, find("adam8bit").build(decay_groups(ours, 0.0), hyper))
    assert all(torch.equal(got[name], expected[name]) for name in expected)


def test_a_tied_parameter_is_overridden_under_either_of_its_names() -> None:
    model = tiny_gpt2()
    (override,) = register_module_override(model, model.lm_head, "weight", {"optim_bits": 32})
    assert override.pattern == "=transformer.wte.weight"
    hyper = resolve_hyper(find("adam8bit"), OptimSpec(name="adam8bit"), (override,))
    predicted, measured = state_bytes("adam8bit", model, hyper)
    assert predicted == measured


@pytest.mark.parametrize(
    ("attempt", "words"),
    [
        (
            lambda m: override_config(m, torch.ones(3), "lr", 1.0),
            ["override_config: 1 of 1 tensors are no parameters of the model"],
        ),
        (
            lambda m: override_config(m, [m["plain"].weight, m["plain"].weight.detach()], "lr", 1.0),
            ["1 of 2 tensors"],
        ),
        (lambda m: override_config(m, m["plain"], "lr", 1.0), ["a module is no parameter", "module.parameters()"]),
        (lambda m: override_config(m, m["plain"].weight), ["either key and value, or key_value_dict"]),
        (lambda m: override_config(m, m["plain"].weight, "lr", 1.0, {"lr": 1.0}), ["either key and value"]),
        (
            lambda m: register_module_override(m, m["plain"], "bias", {"lr": 1.0}),
            ["register_module_override: Linear has no parameter 'bias'"],
        ),
        (
            lambda m: register_module_override(m, torch.nn.Linear(2, 2), "weight", {"lr": 1.0}),
            ["register_module_override: 1 of 1 tensors are no parameters of the model"],
        ),
        (
            lambda m: override_config(m, m["plain"].weight, "lrr", 1.0),
            ["override_config 'plain.weight': 'adam8bit' cannot override 'lrr'", "Did you mean 'lr'?"],
        ),
        (lambda m: override_config(m, m["plain"].weight, "optim_bits", 16), ["'optim_bits'", "must be 8 or 32"]),
        (lambda m: override_config(m, m["plain"].weight, "betas", (0.9, 1.0)), ["'beta2'", "below 1"]),
        (lambda m: override_config(m, m["plain"].weight, "betas", ()), ["override_config 'plain.weight' overrides"]),
        (lambda m: override_config(m, m["plain"].weight, "min_8bit_size", 0), ["'min_8bit_size'", "at least 1"]),
        (lambda m: override_config(m, m["plain"].weight, "is_sparse", "maybe"), ["'is_sparse'", "true or false"]),
    ],
)
def test_a_wrong_override_from_python_is_refused(attempt, words: list[str]) -> None:
    model = two_matrices()
    with pytest.raises(UsageError) as error:
        resolve_hyper(find("adam8bit"), OptimSpec(name="adam8bit"), attempt(model))
    assert all(word in str(error.value) for word in words), str(error.value)
    assert "\n" not in str(error.value)
