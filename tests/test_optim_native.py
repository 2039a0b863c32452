"""torch's own optimizers: what their hyperparameters do, and Muon and AdamW as one optimizer."""

from __future__ import annotations

import copy
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import F1, csv_file, effcli, model_folder
from jobs import ENGINES, run_job

from effcli.errors import UsageError
from effcli.optim.groups import decay_groups
from effcli.optim.registry import find, resolve_hyper
from effcli.pipeline.resolve import resolve_spec
from effcli.spec import OptimSpec
from tests.tiny_models import set_gradients, tiny_distilbert, tiny_mixtral

LR = 1e-3


def one_weight(name: str, spec: OptimSpec, *, decay: float = 0.0) -> tuple[torch.nn.Parameter, torch.optim.Optimizer]:
    """Return a weight of four ones and its optimizer."""
    param = torch.nn.Parameter(torch.ones(4))
    groups = [{"params": [param], "names": ["w"], "hidden": [True], "weight_decay": decay}]
    return param, find(name).build(groups, resolve_hyper(find(name), spec))


def moves(name: str, spec: OptimSpec, gradients: list[float], *, decay: float = 0.0) -> list[float]:
    """Return how far each gradient in turn moves a weight of one."""
    param, optimizer = one_weight(name, spec, decay=decay)
    moved = []
    for gradient in gradients:
        before = param[0].item()
        param.grad = torch.full_like(param, gradient)
        optimizer.step()
        moved.append(before - param[0].item())
    return moved


@pytest.mark.parametrize(
    ("name", "args", "options"),
    [
        ("adam", {"amsgrad": True}, {"amsgrad": True}),
        ("nadam", {"momentum_decay": 0.1}, {"momentum_decay": 0.1, "decoupled_weight_decay": False}),
        ("radam", {"decoupled_weight_decay": True}, {"decoupled_weight_decay": True}),
        ("adamax", {"eps": 1e-6}, {"eps": 1e-6, "betas": (0.9, 0.999)}),
        ("adagrad", {"lr_decay": 0.1, "initial_accumulator_value": 1}, {"lr_decay": 0.1}),
        ("rmsprop", {"alpha": 0.5, "momentum": 0.3, "centered": True}, {"alpha": 0.5, "momentum": 0.3}),
        ("adadelta", {"rho": 0.5, "eps": 1e-3}, {"rho": 0.5, "eps": 1e-3}),
        ("asgd", {"lambd": 0.1, "alpha": 0.5, "t0": 10}, {"lambd": 0.1, "alpha": 0.5, "t0": 10.0}),
        ("rprop", {"etaminus": 0.4, "etaplus": 1.5}, {"etas": (0.4, 1.5), "step_sizes": (1e-6, 50.0)}),
        ("rprop", {"step_size_min": 0, "step_size_max": 1}, {"etas": (0.5, 1.2), "step_sizes": (0.0, 1.0)}),
        ("sgd", {"momentum": 0.5, "nesterov": True}, {"momentum": 0.5, "dampening": 0.0, "nesterov": True}),
    ],
)
def test_a_given_hyperparameter_reaches_the_real_class(
    name: str, args: dict[str, Any], options: Mapping[str, Any]
) -> None:
    _, optimizer = one_weight(name, OptimSpec(name=name, lr=LR, args=args))
    assert {key: optimizer.param_groups[0][key] for key in ("lr", *options)} == {"lr": LR, **options}


@pytest.mark.parametrize(
    ("name", "args", "words"),
    [
        ("rmsprop", {"alpha": -1}, "'alpha' of 'rmsprop' must be at least 0"),
        ("adadelta", {"rho": 1.5}, "'rho' of 'adadelta' must be between 0 and 1"),
        ("adagrad", {"lr_decay": -1}, "'lr_decay'"),
        ("adagrad", {"initial_accumulator_value": -1}, "'initial_accumulator_value'"),
        ("nadam", {"momentum_decay": -1}, "'momentum_decay'"),
        ("rprop", {"etaminus": 1}, "'etaminus' of 'rprop' must be above 0 and below 1"),
        ("rprop", {"etaplus": 1}, "'etaplus' of 'rprop' must be above 1"),
        ("rprop", {"step_size_min": 2, "step_size_max": 1}, "step_size_min at most step_size_max"),
        ("muon", {"ns_steps": 100}, "'ns_steps' of 'muon' must be between 1 and 99"),
        ("muon", {"adjust_lr_fn": "adamw"}, "match_rms_adamw or original"),
    ],
)
def test_what_upstream_refuses_is_refused_before_anything_is_built(name: str, args: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        resolve_hyper(find(name), OptimSpec(name=name, args=args))


def test_first_updates_have_the_size_that_the_help_on_the_learning_rate_says() -> None:
    assert moves("adagrad", OptimSpec(lr=LR), [5.0] * 4) == pytest.approx([LR, LR / 2**0.5, LR / 3**0.5, LR / 2], 1e-3)
    assert moves("rmsprop", OptimSpec(lr=LR), [5.0])[0] == pytest.approx(10 * LR, 1e-3)
    assert moves("rprop", OptimSpec(lr=LR), [5.0, 3.0, -1.0, -1.0]) == pytest.approx([LR, 1.2 * LR, 0, -0.6 * LR], 1e-3)
    assert moves("adadelta", OptimSpec(lr=2.0), [5.0])[0] == pytest.approx(2 * (1e-6 / 0.1) ** 0.5, 1e-3)


def test_averaged_sgd_follows_a_schedule_one_update_late_and_leaves_its_average_beside_the_weights() -> None:
    param, optimizer = one_weight("asgd", OptimSpec(lr=LR, args={"lambd": 0, "t0": 0}))
    values = []
    for lr in (LR, 0.0, LR, LR):
        optimizer.param_groups[0]["lr"] = lr
        param.grad = torch.ones_like(param)
        optimizer.step()
        values.append(param[0].item())
    assert values == pytest.approx([1 - LR, 1 - 2 * LR, 1 - 2 * LR, 1 - 3 * LR], abs=1e-6)
    assert values[2] > optimizer.state[param]["ax"][0].item() > values[3]


def test_adagrad_has_its_state_before_the_first_step_and_without_a_gradient() -> None:
    param, optimizer = one_weight("adagrad", OptimSpec())
    assert set(optimizer.state[param]) == {"step", "sum"}


def test_decay_is_added_to_the_gradient_by_adam_and_shrinks_the_weight_in_adamw() -> None:
    # With gradients far above the decay, Adam's normalisation swallows a decay that is part of the gradient.
    assert moves("adam", OptimSpec(lr=LR), [100.0], decay=0.5)[0] == pytest.approx(LR, 1e-3)
    assert moves("adamw", OptimSpec(lr=LR), [100.0], decay=0.5)[0] == pytest.approx(1.5 * LR, 1e-3)
    plain, decoupled = (
        moves("nadam", OptimSpec(lr=LR, args={"decoupled_weight_decay": value}), [100.0], decay=0.5)
        for value in (False, True)
    )
    assert decoupled[0] - plain[0] == pytest.approx(0.5 * LR, 1e-2)


def test_rprop_has_no_decay_whatever_the_groups_say() -> None:
    assert moves("rprop", OptimSpec(lr=LR), [1.0, 1.0], decay=0.9) == moves("rprop", OptimSpec(lr=LR), [1.0, 1.0])
    with pytest.raises(UsageError, match="'rprop' has no weight decay"):
        resolve_hyper(find("rprop"), OptimSpec(name="rprop", weight_decay=0.1))


def test_a_run_with_rprop_claims_no_decay_and_bears_no_schedule(tmp_path: Path) -> None:
    arguments = (
        "train", "--model", model_folder(tmp_path / "f1", F1), "--data", csv_file(tmp_path / "rows.csv"), "--optim",
        "rprop", "--max-steps", 2, "--json",
    )  # fmt: skip
    record = effcli(*arguments, "--out", tmp_path / "run").record
    assert [group["weight_decay"] for group in record["groups"]] == [0, 0]
    assert [line["lr"] for line in record["history"]] == [5e-5, 5e-5]
    assert record["measured"]["optimizer_state_bytes"] == record["optimizer"]["state_bytes"] == 1_115_824
    refused = effcli(*arguments, "--scheduler", "cosine", "--out", tmp_path / "other")
    assert "'rprop' sets its own learning rate" in refused.error


def test_the_demonstration_gives_rprop_neither_a_warm_up_nor_the_rate_of_adamw() -> None:
    spec = resolve_spec({"optim": {"name": "rprop"}})
    assert (spec.loop.warmup_ratio, spec.optim.lr) == (0.0, None)
    assert resolve_spec({"optim": {"name": "muon"}}).loop.warmup_ratio > 0


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
