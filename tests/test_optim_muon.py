"""Muon and AdamW as one optimizer."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch

from effcli.optim.groups import decay_groups
from effcli.optim.overrides import override_notes
from effcli.optim.registry import find, resolve_hyper
from effcli.spec import OptimSpec
from tests.jobs import ENGINES, run_job
from tests.tiny_models import set_gradients, tiny_distilbert, tiny_mixtral

LR = 1e-3


def muon(model: torch.nn.Module, **settings: Any) -> torch.optim.Optimizer:
    return find("muon").build(decay_groups(model, 0.1), resolve_hyper(find("muon"), OptimSpec(lr=LR, **settings)))


def is_muons(name: str, param: torch.Tensor) -> bool:
    """Say for a tiny DistilBERT which parameters are matrices of its layers."""
    return name.startswith("distilbert.transformer") and param.dim() == 2


def test_muon_steps_hidden_matrices_as_muon_and_all_else_as_adamw_to_the_bit() -> None:
    torch.manual_seed(0)
    model = tiny_distilbert()
    twin = copy.deepcopy(model)
    ours, decayed = muon(model), {id(p) for p in decay_groups(twin, 0.1)[0]["params"]}
    named = list(twin.named_parameters())
    matrices = [p for n, p in named if is_muons(n, p)]
    rest = [p for n, p in named if not is_muons(n, p)]
    groups = [
        {"params": [p for p in rest if (id(p) in decayed) is yes], "weight_decay": 0.1 * yes} for yes in (True, False)
    ]
    theirs = [
        torch.optim.Muon(matrices, lr=LR, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(groups, lr=LR),
    ]
    for update in range(3):
        for each, optimizers in ((model, [ours]), (twin, theirs)):
            torch.manual_seed(update)
            set_gradients(each)
            for optimizer in optimizers:
                optimizer.step()
    assert len(matrices) == 12
    for (name, one), other in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert torch.equal(one, other), name
        keys = {"momentum_buffer"} if is_muons(name, one) else {"step", "exp_avg", "exp_avg_sq"}
        assert set(ours.state[one]) == keys, name


def test_without_a_hidden_matrix_muon_is_adamw() -> None:
    for groups in ([{"params": [torch.nn.Parameter(torch.ones(3))]}], []):
        table = torch.nn.Parameter(torch.ones(4, 4))
        groups = [*groups, {"params": [table], "names": ["table"], "hidden": [False], "weight_decay": 0.1}]
        optimizer = find("muon").build(groups, resolve_hyper(find("muon"), OptimSpec(lr=LR)))
        twin = torch.nn.Parameter(torch.ones(4, 4))
        for param, each in ((table, optimizer), (twin, torch.optim.AdamW([twin], lr=LR, weight_decay=0.1))):
            param.grad = torch.arange(16.0).view(4, 4)
            each.step()
        assert torch.equal(table, twin)


def test_fused_experts_of_three_dimensions_are_adamws() -> None:
    model = tiny_mixtral()
    optimizer = muon(model)
    set_gradients(model)
    optimizer.step()
    for name, param in model.named_parameters():
        adamws = ".experts." in name or "embed" in name or "lm_head" in name or param.dim() == 1
        assert ("exp_avg" in optimizer.state[param]) is adamws, name


def test_muons_update_has_the_size_of_adamws_whatever_the_shape_unless_told_otherwise() -> None:
    sizes = {}
    for rule in ("match_rms_adamw", "original"):
        for shape in ((64, 64), (32, 256), (256, 32)):
            torch.manual_seed(0)
            param = torch.nn.Parameter(torch.zeros(shape))
            spec = OptimSpec(lr=1.0, args={"adjust_lr_fn": rule})
            optimizer = find("muon").build([{"params": [param]}], resolve_hyper(find("muon"), spec))
            param.grad = torch.randn(shape)
            optimizer.step()
            sizes[rule, shape] = param.square().mean().sqrt().item()
    matched = [size for (rule, _), size in sizes.items() if rule == "match_rms_adamw"]
    assert all(0.15 < size < 0.25 for size in matched)
    assert all(size < 0.25 for size in sizes.values())
    assert sizes["original", (256, 32)] > 2 * sizes["original", (32, 256)]


def test_one_learning_rate_of_the_groups_reaches_both_halves_of_muon() -> None:
    model = tiny_distilbert()
    optimizer = muon(model)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda update: 0.0)
    before = copy.deepcopy(model.state_dict())
    set_gradients(model)
    optimizer.step()
    schedule.step()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert {group["lr"] for group in optimizer.param_groups} == {0.0}


def test_step_hooks_of_muon_run_once_per_step_and_a_closure_is_called_once() -> None:
    model, calls = tiny_distilbert(), []
    optimizer = muon(model)
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))

    def closure() -> float:
        calls.append("closure" if torch.is_grad_enabled() else "closure without gradients")
        set_gradients(model)
        return 0.5

    with torch.no_grad():
        assert optimizer.step(closure) == 0.5
    assert calls == ["before", "closure", "after"]
    optimizer.zero_grad()
    assert all(param.grad is None for param in model.parameters())


@pytest.mark.parametrize("how", ["state_dict", "pickle", "deepcopy"])
def test_a_copy_of_muon_goes_on_as_the_original(how: str) -> None:
    torch.manual_seed(0)
    model = tiny_distilbert()
    optimizer = muon(model)
    set_gradients(model)
    optimizer.step()
    if how == "state_dict":
        other = copy.deepcopy(model)
        copied = muon(other)
        copied.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    elif how == "deepcopy":
        other, copied = copy.deepcopy((model, optimizer))
    else:
        file = io.BytesIO()
        torch.save((model, optimizer), file)
        other, copied = torch.load(io.BytesIO(file.getvalue()), weights_only=False)
    for each, its in ((model, optimizer), (other, copied)):
        torch.manual_seed(1)
        its.param_groups[0]["lr"] = 2 * LR
        set_gradients(each)
        its.step()
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), other.parameters(), strict=True))
    assert set(copied.state) == set(other.parameters())


def test_a_group_added_to_muon_later_is_trained_by_adamw() -> None:
    optimizer, added = muon(tiny_distilbert()), torch.nn.Parameter(torch.ones(4, 4))
    optimizer.add_param_group({"params": [added], "weight_decay": 0.0})
    added.grad = torch.ones(4, 4)
    optimizer.step()
    assert added[0, 0].item() == pytest.approx(1 - LR)
    assert set(optimizer.state[added]) == {"step", "exp_avg", "exp_avg_sq"}


def test_an_override_of_one_hidden_matrix_leaves_the_others_alone() -> None:
    model = tiny_distilbert()
    optimizer = muon(model, overrides={"layer.0.ffn.lin1.weight": {"lr": 0.5}})
    rates = {name: group["lr"] for group in optimizer.param_groups for name in group["names"]}
    assert {name for name, rate in rates.items() if rate == 0.5} == {"distilbert.transformer.layer.0.ffn.lin1.weight"}
    assert optimizer.param_groups[0]["lr"] == LR


def test_betas_and_eps_overridden_for_a_hidden_matrix_change_nothing_and_that_is_said() -> None:
    moved = []
    for values in ({}, {"beta1": 0.5, "beta2": 0.6, "eps": 1.0}):
        torch.manual_seed(0)
        model = tiny_distilbert()
        overrides = {"layer.0.ffn.lin1": values} if values else {}
        optimizer = muon(model, overrides=overrides)
        set_gradients(model)
        optimizer.step()
        lin1 = model.distilbert.transformer.layer[0].ffn.lin1
        moved.append((lin1.weight.detach(), lin1.bias.detach()))
        notes = override_notes(find("muon"), resolve_hyper(find("muon"), OptimSpec(overrides=overrides)))
        assert [note.partition(",")[0] for note in notes] == ["muon: an override of beta1"] * bool(values)
        assert all("no effect on a hidden matrix" in note for note in notes)
    assert torch.equal(moved[0][0], moved[1][0])
    assert not torch.equal(moved[0][1], moved[1][1])


def test_muon_means_the_same_in_all_engines() -> None:
    entry = find("muon")
    hyper = resolve_hyper(entry, OptimSpec(lr=LR))
    outcomes = [
        run_job(
            engine, "classification", num_rows=6, batch_size=2, accum=2,
            make_optimizer=lambda groups: entry.build(groups, hyper),
        )
        for engine in ENGINES
    ]  # fmt: skip
    for outcome in outcomes[1:]:
        assert outcome.losses == pytest.approx(outcomes[0].losses, rel=1e-6)
        for name, weight in outcome.weights.items():
            assert torch.allclose(weight, outcomes[0].weights[name], rtol=0, atol=0.01 * LR * 2), name
