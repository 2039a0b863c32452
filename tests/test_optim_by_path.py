"""Any optimizer class by its path: how it is found, its hyperparameters, its errors, and a run with it."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path

import pytest
import torch

from effcli.errors import EffcliError, MissingExtraError, UsageError
from effcli.optim.groups import decay_groups
from effcli.optim.hyper import default_hyper, resolve_hyper
from effcli.optim.registry import check_works, find
from effcli.spec import OptimSpec
from tests.commands import TINY_DISTILBERT, csv_file, effcli, model_folder, untimed
from tests.tiny_models import tiny_distilbert

HERE = "tests.test_optim_by_path"


def message(error: pytest.ExceptionInfo[Exception]) -> str:
    text = str(error.value)
    assert "\n" not in text
    return text


def test_hyperparameters_are_those_of_the_signature_with_betas_and_eps_apart() -> None:
    entry = find(" torch.optim:AdamW ")
    assert entry.name == "torch.optim:AdamW"
    assert {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "amsgrad": False}.items() <= entry.defaults.items()
    assert not {"betas", "weight_decay", "params"} & set(entry.defaults)
    assert entry.takes_weight_decay
    assert "torch/optim/adamw.py" in entry.source
    assert (find("torch.optim:Adafactor").defaults["eps"], find("torch.optim:Adafactor").defaults["eps2"]) == (
        None,
        1e-3,
    )
    assert find("bitsandbytes.optim:AdEMAMix").defaults["beta3"] == 0.9999
    assert not find("torch.optim:Rprop").takes_weight_decay

    spec = OptimSpec(lr=1, beta1=0.5, eps=1e-3, args={"amsgrad": "true", "foreach": False})
    group = build("torch.optim:AdamW", spec)
    assert (group["lr"], group["betas"], group["eps"]) == (1.0, (0.5, 0.999), 1e-3)
    assert (group["amsgrad"], group["foreach"]) == (True, False)
    rprop = build("torch.optim:Rprop", OptimSpec(args={"etas": "0.25, 1.5"}))
    assert (rprop["etas"], rprop["step_sizes"]) == ((0.25, 1.5), (1e-6, 50))
    assert build("torch.optim:SGD", OptimSpec(args={"momentum": 0.5}))["momentum"] == 0.5  # upstream's default is 0
    eight = resolve_hyper(find("bitsandbytes.optim:RMSprop"), OptimSpec(optim_bits=8, min_8bit_size=64))
    assert (eight["optim_bits"], eight["min_8bit_size"]) == (8, 64)


def build(path: str, spec: OptimSpec) -> dict[str, object]:
    """Return the options of the group of one parameter."""
    entry = find(path)
    optimizer = entry.build(
        [{"params": [torch.nn.Parameter(torch.ones(4))], "weight_decay": 0.3}], resolve_hyper(entry, spec)
    )
    return optimizer.param_groups[0]


class Inherits(torch.optim.AdamW):
    """Passes its keywords on; its own default of the decay must reach no group that has none."""

    def __init__(self, params: object, *, lr: float = 0.5, weight_decay: float = 0.9, **keywords: object) -> None:
        super().__init__(params, lr=lr, weight_decay=weight_decay, **keywords)


def test_what_a_class_passes_on_is_accepted_and_its_decay_spares_biases_and_norms() -> None:
    path = f"{HERE}:Inherits"
    assert find(path).defaults["lr"] == 0.5
    assert find(path).defaults["amsgrad"] is False
    model = tiny_distilbert()
    optimizer = find(path).build(decay_groups(model, 0.1), default_hyper(find(path)))
    assert [(group["weight_decay"], len(group["params"])) for group in optimizer.param_groups] == [(0.1, 16), (0.0, 24)]
    assert optimizer.defaults["weight_decay"] == 0.0


@pytest.mark.parametrize(
    ("path", "spec", "words"),
    [
        ("torch.optim:AdamW", OptimSpec(args={"amsgrd": True}), ["takes no 'amsgrd'", "Did you mean 'amsgrad'?"]),
        ("torch.optim:AdamW", OptimSpec(args={"weight_decay": 1}), ["--weight-decay"]),
        ("torch.optim:AdamW", OptimSpec(args={"amsgrad": "maybe"}), ["'amsgrad'", "true or false", "'maybe'"]),
        ("torch.optim:Rprop", OptimSpec(args={"etas": "0.5"}), ["'etas'", "numbers with commas, 2 of them"]),
        ("torch.optim:Rprop", OptimSpec(args={"etas": "a,b"}), ["'etas'", "numbers with commas"]),
        ("torch.optim:Rprop", OptimSpec(weight_decay=0.1), ["--weight-decay 0.1", "no weight decay"]),
        ("torch.optim:AdamW", OptimSpec(lr=1e-3, args={"lr": 1}), ["'lr' is given twice"]),
        ("bitsandbytes.optim:Adam", OptimSpec(keep_32bit=("embed",)), ["--keep-32bit embed", "listed optimizers"]),
        (
            "bitsandbytes.optim:Adam",
            OptimSpec(min_8bit_size=64, args={"min_8bit_size": 1}),
            ["'min_8bit_size' is given twice", "--min-8bit-size 64"],
        ),
        ("bitsandbytes.optim:SGD", OptimSpec(args={"momentum": 0.9}), ["needs 'lr', which has no default", "--lr"]),
        ("transformers.optimization:Adafactor", OptimSpec(lr=1e-3), ["refuses what it is given", "relative_step"]),
        ("torch.optim:AdamW", OptimSpec(args={"fused": "often", "foreach": True}), ["refuses", "fused"]),
        ("torch.optim:Adadelta", OptimSpec(args={"rho": 2}), ["refuses what it is given", "rho"]),
    ],
)
def test_a_wrong_hyperparameter_is_refused_in_one_line(path: str, spec: OptimSpec, words: list[str]) -> None:
    with pytest.raises(UsageError) as error:
        check_works(find(path), hyper=resolve_hyper(find(path), spec))
    text = message(error)
    assert all(word in text for word in words), text


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("torch.optim:AdamX", ["'torch.optim' has no 'AdamX'", "Did you mean 'Adam"]),
        ("torch.optmi:AdamW", ["'torch' has no module 'optmi'", "Did you mean 'torch.optim'?"]),
        ("torch.optim:lr_scheduler", ["is no optimizer class"]),
        ("torch.optim:Optimizer", ["is no optimizer class"]),
        ("json:JSONDecoder", ["'json:JSONDecoder' is no optimizer class", "its optimizers are none"]),
        ("torch optim:AdamW", ["is no path of a class", "torch.optim:AdamW"]),
        ("torch.optim:", ["is no path of a class"]),
        (":AdamW", ["is no path of a class"]),
        ("torch.optim:LBFGS", ["needs 'closure' at each step"]),
    ],
)
def test_a_path_that_leads_to_no_optimizer_says_so_in_one_line(path: str, words: list[str]) -> None:
    with pytest.raises(UsageError) as error:
        find(path)
    text = message(error)
    assert all(word in text for word in words), text


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("torch.optim:SparseAdam", ["cannot make a step from gradients alone", "dense gradients"]),
        (f"{HERE}:WithoutRate", ["has no 'lr' in its parameter groups"]),
    ],
)
def test_a_class_that_cannot_train_is_found_out_by_one_step(path: str, words: list[str]) -> None:
    with pytest.raises(UsageError) as error:
        check_works(find(path))
    text = message(error)
    assert all(word in text for word in words), text


class WithoutRate(torch.optim.Optimizer):
    """Has no learning rate."""

    def __init__(self, params: object) -> None:
        super().__init__(params, {})


def test_a_package_that_is_not_there_is_named_with_the_pip_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(MissingExtraError) as error:
        find("no_such_package.optim:Adam")
    assert "pip install no_such_package" in message(error)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "needs_more.py").write_text("import no_such_package.deep")
    with pytest.raises(MissingExtraError) as error:
        find("needs_more:Adam")
    assert "'needs_more' needs the package 'no_such_package'" in message(error)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("1 +", "SyntaxError"),
        ("raise ValueError('no\\nway')", "ValueError: no"),
        ("raise SystemExit", "SystemExit"),
        ("raise OSError('libcudart.so.12')", "does not load: libcudart.so.12"),
    ],
)
def test_a_module_that_does_not_import_says_why(
    text: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "breaks_at_import.py").write_text(text)
    with pytest.raises(EffcliError) as error:
        find("breaks_at_import:Adam")
    assert words in message(error)


def test_a_class_of_ones_own_trains_from_the_current_folder_and_again_from_the_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    Path("OwnOptim.py").write_text(
        textwrap.dedent("""
        import torch

        class Heavy(torch.optim.SGD):
            def __init__(self, params, lr=0.25, momentum=0.5, **more):
                super().__init__(params, lr=lr, momentum=momentum, **more)
        """)
    )
    folder, data = model_folder(tmp_path / "tiny_distilbert", TINY_DISTILBERT), csv_file(tmp_path / "d.csv")
    first = effcli(
        "train", folder, "--data", data, "--max-steps", 2, "--out", "a", "--json",
        "--optim", "OwnOptim:Heavy", "--optim-arg", "nesterov=true",
    ).record  # fmt: skip
    assert (first["optimizer"]["name"], first["optimizer"]["basis"]) == ("OwnOptim:Heavy", "probed")
    assert first["optimizer"]["state_bytes"] == first["measured"]["optimizer_state_bytes"] == 557_832
    assert first["optimizer"]["tensors"] == first["measured"]["tensors"]
    assert first["optimizer"]["plan"]["basis"]["optimizer_state"] == "probed"
    assert first["history"][0]["lr"] == 0.25
    again = effcli("train", "--recipe", "a/recipe.yaml", "--out", "b", "--json").record
    assert again["spec"]["optim"] == first["spec"]["optim"]
    assert untimed(again["history"]) == untimed(first["history"])
    shown = effcli("train", folder, "--data", data, "--optim", "OwnOptim:Heavy", "--dry-run").stdout
    assert any("optimizer state" in line and line.split()[-1] == "probed" for line in shown.splitlines())
