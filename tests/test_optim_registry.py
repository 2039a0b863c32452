"""Finding an optimizer and settling its hyperparameters, before anything is loaded."""

from __future__ import annotations

import importlib.util
import inspect
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers.training_args import OptimizerNames

from effcli.errors import DeviceError, MissingExtraError, UsageError
from effcli.optim.entry import OptimizerEntry
from effcli.optim.overrides import Override
from effcli.optim.registry import check_works, default_hyper, entries, find, require, resolve_hyper
from effcli.spec import OptimSpec

NOT_OFFERED = {
    "adamw_torch_xla": "an update for XLA devices, which effcli does not run on",
    "adamw_torch_npu_fused": "an update for Ascend devices, which effcli does not run on",
    "adamw_anyprecision": "from torchdistx, which is no longer kept up",
    "galore_adamw_8bit": "its step calls torch.cuda, so that its state could not be checked here",
    "galore_adafactor": "a projector takes more than the factors that it makes smaller",
    "galore_adamw_layerwise": "steps in a hook of each parameter during backward: no update as a whole to measure",
    "galore_adamw_8bit_layerwise": "as galore_adamw_layerwise",
    "galore_adafactor_layerwise": "as galore_adamw_layerwise",
    "apollo_adamw": "from apollo-torch, which is no extra of effcli; give it by its class path",
    "apollo_adamw_layerwise": "as galore_adamw_layerwise",
    "lomo": "steps while backward runs and keeps no gradients: no update as a whole to measure",
    "adalomo": "as lomo",
    "grokadamw": "from grokadamw, which is no extra of effcli; give it by its class path",
    "schedule_free_radam": "left out beside schedule-free AdamW; give it by its class path",
}
"""Values of the `optim` argument of transformers' Trainer -> why no entry has the name."""

UPSTREAM_DEFAULTS = {
    "rprop": {"etaminus": ("etas", 0), "etaplus": ("etas", 1), "step_size_min": ("step_sizes", 0),
              "step_size_max": ("step_sizes", 1)},
    "came": {"eps": ("eps1", None)},
    "muon": {"ns_eps": ("eps", None)},
}  # fmt: skip
"""Hyperparameters that upstream's constructor takes under another name, or in a tuple: entry -> name -> where."""

OTHER_DEFAULTS = {
    ("adam-amsgrad", "amsgrad"): "what the name asks for",
    ("sgd-momentum", "momentum"): "what the name asks for",
    ("sgd8bit", "momentum"): "upstream refuses its own default of 0",
    ("sgd32bit", "momentum"): "upstream refuses its own default of 0",
    ("lars8bit", "momentum"): "upstream refuses its own default of 0",
    ("lars32bit", "momentum"): "upstream refuses its own default of 0",
    ("adafactor", "relative_step"): "a fixed rate, as in transformers' Trainer",
    ("adafactor", "scale_parameter"): "a fixed rate, as in transformers' Trainer",
    ("galore-adamw", "rank"): "an option of a parameter group without a default; the README's value",
    ("galore-adamw", "update_proj_gap"): "an option of a parameter group without a default; the README's value",
    ("galore-adamw", "scale"): "an option of a parameter group without a default; the README's value",
    ("galore-adamw", "proj_type"): "an option of a parameter group without a default; the README's value",
    ("muon", "adjust_lr_fn"): "one learning rate for Muon and AdamW",
} | {
    (entry.name, "implementation"): "upstream's foreach and fused in one"
    for entry in entries()
    if "implementation" in entry.defaults
}
"""Entry and hyperparameter -> why its default is not upstream's. A learning rate needs no reason here."""


def message(error: pytest.ExceptionInfo[Exception]) -> str:
    text = str(error.value)
    assert "\n" not in text
    return text


@pytest.mark.parametrize(
    ("word", "name"),
    [
        ("adamw", "adamw"),
        ("AdamW", "adamw"),
        ("adamw_torch_fused", "adamw"),
        ("adafactor", "adafactor"),
        ("adafactor_torch", "adafactor-torch"),
        ("adamw_bnb_8bit", "adamw8bit"),
        ("adamw_8bit", "adamw8bit"),
        ("paged_adamw_8bit", "paged-adamw8bit"),
        ("paged_adamw8bit", "paged-adamw8bit"),
        ("sgd", "sgd"),
        ("adagrad", "adagrad"),
        ("rmsprop", "rmsprop"),
        ("AMSGrad", "adam-amsgrad"),
        ("muon", "muon"),
    ],
)
def test_names_and_the_names_of_trainer_find_an_entry(word: str, name: str) -> None:
    assert find(word).name == name


def test_no_name_or_alias_means_two_optimizers() -> None:
    words = [word.lower().replace("_", "-") for entry in entries() for word in {entry.name, *entry.aliases}]
    by_entry = [{w.lower().replace("_", "-") for w in (entry.name, *entry.aliases)} for entry in entries()]
    assert len(set(words)) == sum(len(own) for own in by_entry)


def test_an_unknown_name_lists_the_choices_and_the_nearest() -> None:
    with pytest.raises(UsageError) as error:
        find("adamw8bits")
    text = message(error)
    assert "'adamw8bits'" in text
    assert "Did you mean 'adamw8bit'?" in text
    assert all(entry.name in text for entry in entries())


@pytest.mark.parametrize("entry", entries(), ids=lambda entry: entry.name)
def test_every_entry_says_what_it_is_and_where_its_law_comes_from(entry) -> None:
    assert entry.summary.endswith(".")
    assert entry.source
    assert set(entry.hyper_help) <= set(entry.defaults)
    assert resolve_hyper(entry, OptimSpec(name=entry.name)).items() >= dict(entry.defaults).items()
    assert entry.package is None or entry.pip


def constructor_default(owner: type, entry: OptimizerEntry, name: str) -> Any:
    """Return the default of a hyperparameter in upstream's constructor; the string `absent` where it has none."""
    stem = name.rstrip("123456789")
    index = int(name[len(stem) :] or 1) - 1
    places = [(name, None), (name, index), (stem, index), (f"{stem}s", index)]
    if name in UPSTREAM_DEFAULTS.get(entry.name, {}):
        places = [UPSTREAM_DEFAULTS[entry.name][name]]
    parameters = inspect.signature(owner).parameters
    for argument, position in places:
        default = parameters[argument].default if argument in parameters else ()
        if not isinstance(default, tuple | list):
            return default
        if position is not None and position < len(default):
            return default[position]
    return "absent"


@pytest.mark.parametrize("entry", entries(), ids=lambda entry: entry.name)
def test_defaults_are_those_of_the_upstream_class_unless_a_reason_says_why_not(entry: OptimizerEntry) -> None:
    if entry.package is not None and importlib.util.find_spec(entry.package) is None:
        pytest.skip(f"{entry.package} is not installed: pip install {entry.pip}")
    group = {"params": [torch.nn.Parameter(torch.ones(64, 64))], "weight_decay": 0.0}
    owner: type = type(entry.build([group], default_hyper(entry)))
    owners = dict.fromkeys(entry.defaults, owner)
    if entry.name == "muon":
        owners |= dict.fromkeys(entry.defaults, torch.optim.Muon)
        owners |= dict.fromkeys(("beta1", "beta2", "eps"), torch.optim.AdamW)
    for name, default in entry.defaults.items():
        if name != "lr":
            same = constructor_default(owners[name], entry, name) == default
            assert same is ((entry.name, name) not in OTHER_DEFAULTS), name


@pytest.mark.parametrize("word", [name.value for name in OptimizerNames])
def test_a_name_that_trainer_knows_finds_an_entry_or_has_a_reason_why_not(word: str) -> None:
    if word in NOT_OFFERED:
        with pytest.raises(UsageError, match="unknown optimizer"):
            find(word)
    else:
        find(word)


def test_given_values_replace_defaults_and_take_their_type() -> None:
    spec = OptimSpec(lr=1e-3, beta1=0.8, args={"amsgrad": "true", "eps": "1e-6"})
    hyper = resolve_hyper(find("adamw"), spec)
    given = {"lr": 1e-3, "beta1": 0.8, "beta2": 0.999, "eps": 1e-6, "amsgrad": True}
    assert hyper == {**given, "implementation": "auto", "overrides": ()}
    assert resolve_hyper(find("sgd"), OptimSpec(args={"momentum": 0}))["momentum"] == 0.0
    assert resolve_hyper(find("adafactor"), OptimSpec(args={"beta1": "none"}))["beta1"] is None


@pytest.mark.parametrize("name", ["adam", "adamw", "adam-amsgrad"])
def test_the_rule_of_thumb_of_adam_counts_the_third_moment_where_there_is_one(name: str) -> None:
    for amsgrad, num_bytes in ((False, 8_000), (True, 12_000)):
        hyper = resolve_hyper(find(name), OptimSpec(name=name, args={"amsgrad": amsgrad}))
        assert find(name).rule_of_thumb_bytes(1_000, hyper) == num_bytes


def test_8bit_entries_carry_their_two_settings() -> None:
    hyper = resolve_hyper(find("adam8bit"), OptimSpec(min_8bit_size=16384, keep_32bit=("embed",)))
    assert (hyper["optim_bits"], hyper["min_8bit_size"]) == (8, 16384)
    assert hyper["overrides"] == (Override(pattern="embed", values={"optim_bits": 32}, flag="--keep-32bit"),)
    assert "min_8bit_size" not in resolve_hyper(find("adamw"), OptimSpec())


@pytest.mark.parametrize(
    ("name", "spec", "words"),
    [
        ("sgd", OptimSpec(beta1=0.9), ["'sgd' takes no --beta1", "dampening, implementation, lr, momentum, nesterov"]),
        ("adafactor", OptimSpec(beta2=0.9), ["takes no --beta2", "Did you mean 'beta1'?"]),
        ("sgd", OptimSpec(args={"momentun": 0.5}), ["takes no 'momentun'", "Did you mean 'momentum'?"]),
        ("adam8bit", OptimSpec(args={"amsgrad": True}), ["takes no 'amsgrad'"]),
        ("adam8bit", OptimSpec(args={"percentile_clipping": 5}), ["takes no 'percentile_clipping'"]),
        ("adam8bit", OptimSpec(args={"optim_bits": 32}), ["--optim-bits"]),
        ("adamw", OptimSpec(args={"weight_decay": 0.1}), ["--weight-decay"]),
        ("adam8bit", OptimSpec(args={"min_8bit_size": 1}), ["--min-8bit-size"]),
        ("adamw", OptimSpec(lr=1e-3, args={"lr": 1e-4}), ["'lr' is given twice", "0.001", "0.0001"]),
        ("adamw", OptimSpec(args={"amsgrad": "maybe"}), ["'amsgrad'", "true or false", "'maybe'"]),
        ("adamw", OptimSpec(args={"amsgrad": 0.5}), ["'amsgrad'", "true or false"]),
        ("sgd", OptimSpec(args={"momentum": "fast"}), ["'momentum'", "a finite number", "'fast'"]),
        ("sgd", OptimSpec(args={"momentum": "nan"}), ["'momentum'", "a finite number"]),
        ("sgd", OptimSpec(args={"momentum": True}), ["'momentum'", "a finite number"]),
        ("sgd", OptimSpec(args={"momentum": -1}), ["'momentum'", "at least 0 and below 1", "-1"]),
        ("sgd", OptimSpec(args={"nesterov": True, "momentum": 0.0}), ["nesterov", "momentum above 0"]),
        ("adafactor-torch", OptimSpec(args={"d": 0.5}), ["'d'", "at least 1"]),
        ("adamw", OptimSpec(min_8bit_size=8192), ["--min-8bit-size 8192", "'adamw'", "adam8bit"]),
        ("adamw", OptimSpec(min_8bit_size=4096), ["--min-8bit-size 4096", "'adamw'", "adam8bit"]),
        ("adafactor", OptimSpec(keep_32bit=("embed",)), ["--keep-32bit embed", "'adafactor'"]),
    ],
)
def test_a_wrong_hyperparameter_is_refused_with_the_way_out(name: str, spec: OptimSpec, words: list[str]) -> None:
    with pytest.raises(UsageError) as error:
        resolve_hyper(find(name), spec)
    text = message(error)
    assert all(word in text for word in words), text


@pytest.mark.parametrize(
    "entry", {entry.package: entry for entry in entries() if entry.package}.values(), ids=lambda entry: entry.name
)
def test_a_missing_package_is_one_line_with_the_pip_command(
    entry: OptimizerEntry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, entry.package, None)
    for call in (require, check_works):
        with pytest.raises(MissingExtraError) as error:
            call(entry)
        assert f"optimizer '{entry.name}' needs the package '{entry.package}'" in message(error)
        assert message(error).endswith(f"type: pip install {entry.package.replace('_', '-')}")
    require(find("adamw"))
    check_works(find("adamw"))


def test_a_package_that_does_not_load_is_a_device_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path, request: pytest.FixtureRequest
) -> None:
    (tmp_path / "broken_backend.py").write_text("raise OSError('libcudart.so.12: cannot open\\nlong tail')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(DeviceError) as error:
        require(replace(find("adam8bit"), package="broken_backend"))
    assert "libcudart.so.12" in message(error)


@pytest.mark.parametrize("entry", entries(), ids=lambda entry: entry.name)
def test_every_entry_works_on_a_cpu(entry) -> None:
    check_works(entry)


def test_an_optimizer_without_a_backend_is_found_out_by_one_tiny_step(monkeypatch: pytest.MonkeyPatch) -> None:
    import bitsandbytes

    def no_kernel(*args: object, **kwargs: object) -> None:
        raise NotImplementedError("no kernel for 'mps'\nand a long trace")

    monkeypatch.setattr(bitsandbytes.functional, "optimizer_update_8bit_blockwise", no_kernel)
    with pytest.raises(DeviceError) as error:
        check_works(find("adamw8bit"))
    assert "no kernel for 'mps'" in message(error)
    assert "--optim adamw" in message(error)


def test_the_registry_and_the_laws_load_neither_torch_nor_upstream_packages() -> None:
    code = (
        "import sys, effcli, effcli.optim.registry as r, effcli.memory.state as s, effcli.optim.groups\n"
        "from effcli.units import ParamInfo\n"
        "for e in r.entries(): s.predict_state(e, [ParamInfo(name='w', shape=(70, 70))],"
        " r.default_hyper(e))\n"
        "print([m for m in ('torch', 'numpy', 'transformers', 'bitsandbytes', 'pydantic') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
