"""Classes by path that print, exit or ignore arguments, and overrides that an optimizer would not heed."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path

import bitsandbytes
import pytest
import torch

from effcli.errors import UsageError
from effcli.optim.hyper import default_hyper, resolve_hyper
from effcli.optim.registry import check_works, find
from effcli.optim.trial import trial_group
from effcli.spec import OptimSpec
from tests.commands import TINY_DISTILBERT, csv_file, effcli, model_folder

HERE = "tests.test_optim_by_path_habits"


class ExitsWhenMade(torch.optim.SGD):
    """Ends the program in its constructor."""

    def __init__(self, params: object, lr: float = 0.1) -> None:
        sys.exit("no licence\nfound")


class ExitsInAStep(torch.optim.SGD):
    """Ends the program in its step."""

    def step(self, closure: object = None) -> None:
        sys.exit("no licence\nfound")


class OwnRate(torch.optim.Optimizer):
    """Knows its rate by itself and takes no argument."""

    def __init__(self, params: object) -> None:
        super().__init__(params, {"lr": 1e-3})


@pytest.mark.parametrize("name", ["ExitsWhenMade", "ExitsInAStep"])
def test_a_class_that_exits_is_a_fault_of_usage_in_one_line(name: str, tmp_path: Path) -> None:
    path = f"{HERE}:{name}"
    with pytest.raises(UsageError, match=r"^.*no licence$"):
        check_works(find(path))
    folder, data = model_folder(tmp_path / "tiny_distilbert", TINY_DISTILBERT), csv_file(tmp_path / "d.csv")
    for command in (("estimate", folder), ("train", folder, "--data", data, "--out", tmp_path / "out")):
        result = effcli(*command, "--optim", path)
        assert (result.code, result.stdout) == (2, "")
        assert path in result.error
        assert "no licence" in result.error


def test_what_a_class_prints_leaves_the_json_document_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    Path("TalksALot.py").write_text(
        textwrap.dedent("""
        import torch

        print("imported")

        class Loud(torch.optim.SGD):
            def __init__(self, params, lr=0.25):
                print("made")
                super().__init__(params, lr=lr, momentum=0.5)

            def step(self, closure=None):
                print("stepped")
                return super().step(closure)
        """)
    )
    folder, data = model_folder(tmp_path / "tiny_distilbert", TINY_DISTILBERT), csv_file(tmp_path / "d.csv")
    made = effcli(
        "train", folder, "--data", data, "--max-steps", 2, "--out", "a", "--optim", "TalksALot:Loud", "--json"
    )
    assert made.record["status"] == "completed"
    said = made.stderr.splitlines()
    assert said.count("imported") == 1
    assert said.count("made") == 2  # on trial and for the run
    assert said.count("stepped") == 3


@pytest.mark.parametrize("values", [{"lr": 1}, {}])
def test_a_class_without_arguments_takes_no_overrides(values: dict[str, float]) -> None:
    with pytest.raises(UsageError, match=r"it takes no overrides\.?$"):
        resolve_hyper(find(f"{HERE}:OwnRate"), OptimSpec(overrides={"embed": values}))


@pytest.mark.parametrize(
    ("name", "key", "allowed"),
    [
        *(("prodigy", key, "it can eps, weight_decay.") for key in ("lr", "beta1", "beta2")),
        ("came", "eps", "it can lr, beta1, beta2, beta3, weight_decay."),
    ],
)
def test_an_override_that_upstream_would_not_heed_is_refused(name: str, key: str, allowed: str) -> None:
    with pytest.raises(UsageError) as error:
        resolve_hyper(find(name), OptimSpec(name=name, overrides={"embed": {key: 0.5}}))
    assert f"'{name}' cannot override '{key}'; {allowed}" in str(error.value)


def test_an_override_of_nothing_gives_an_example_that_the_optimizer_takes() -> None:
    with pytest.raises(UsageError, match="it can eps, weight_decay, as in eps=1e-5"):
        resolve_hyper(find("prodigy"), OptimSpec(name="prodigy", overrides={"embed": {}}))


OPTIONS = [
    (name, key)
    for name in ("lion", "stable-adamw", "came", "adan", "adabelief", "prodigy")
    for key in ("lr", "beta1", "beta2", "beta3", "eps")
    if key in find(name).defaults
]


@pytest.mark.parametrize(("name", "key"), OPTIONS)
def test_what_may_be_overridden_is_what_changes_the_updates_of_one_group(name: str, key: str) -> None:
    same = torch.equal(weight_after_steps(name), weight_after_steps(name, key))
    assert same == (key in find(name).not_overridable)


def weight_after_steps(name: str, changed: str | None = None) -> torch.Tensor:
    """Return the weight of the second of two groups after three steps, with one option of that group set to 0.5."""
    params = [torch.nn.Parameter(torch.linspace(0.5, 1, 64).reshape(8, 8)) for _ in range(2)]
    entry = find(name)
    optimizer = entry.build([trial_group([param]) for param in params], default_hyper(entry))
    group = optimizer.param_groups[1]
    if changed in ("beta1", "beta2", "beta3"):
        group["betas"] = tuple(0.5 if changed == f"beta{at}" else beta for at, beta in enumerate(group["betas"], 1))
    elif changed is not None:
        group["eps1" if (name, changed) == ("came", "eps") else changed] = 0.5
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        for param in params:
            param.grad = torch.randn(8, 8, generator=generator)
        optimizer.step()
    return params[1].detach()


def test_bits_that_a_class_of_bitsandbytes_pins_are_no_argument_of_it() -> None:
    param = torch.nn.Parameter(torch.ones(64, 64))
    pinned = bitsandbytes.optim.Adam8bit([param], optim_bits=32)
    param.grad = torch.ones(64, 64)
    pinned.step()
    assert pinned.state[param]["state1"].dtype == torch.uint8
    for name in ("Adam8bit", "Adagrad8bit", "Adam32bit"):
        entry = find(f"bitsandbytes.optim:{name}")
        check_works(entry)
        with pytest.raises(UsageError, match="--optim-bits 32 is for the listed optimizers"):
            resolve_hyper(entry, OptimSpec(optim_bits=32))
    assert resolve_hyper(find("bitsandbytes.optim:Adam"), OptimSpec(optim_bits=8))["optim_bits"] == 8
