"""`effcli optimizers`: what it shows is what the real optimizers keep, and it fits a terminal."""

from __future__ import annotations

import ast
import sys

import pytest
import torch

from effcli.cli.flags import given_fields
from effcli.measure.optimizer_size import inspect_optimizer
from effcli.optim.entry import OptimizerEntry
from effcli.optim.hyper import resolve_hyper
from effcli.optim.registry import entries, find
from effcli.optim.summary import Setting, overview, page
from effcli.spec import OptimSpec, build_spec
from tests.commands import effcli
from tests.tiny_models import stepped

every_entry = pytest.mark.parametrize("entry", entries(), ids=lambda entry: entry.name)
PLAIN = ["adamw", "adafactor", "adafactor-torch", "adam8bit", "paged-adamw8bit", "sgd", "sgd-momentum"]
MEASURED = [*PLAIN, "adamw4bit", "stable-adamw", "came"]


def step_on_a_matrix(name: str, dtype: torch.dtype) -> torch.optim.Optimizer:
    layer = torch.nn.Linear(512, 512, bias=False, dtype=dtype)
    return stepped(find(name), layer, OptimSpec(name=name))


def assert_fits(text: str, columns: int = 80) -> None:
    assert max(map(len, text.splitlines())) <= columns
    assert "…" not in text
    assert all(character == "\n" or character.isprintable() for character in text)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", [*MEASURED, "galore-adamw"])
def test_bytes_per_parameter_are_those_of_a_real_step(name: str, dtype: torch.dtype) -> None:
    shown = overview(find(name), (512, 512))
    measured = inspect_optimizer(step_on_a_matrix(name, dtype)).state_bytes
    key = str(dtype).removeprefix("torch.")
    assert shown.state_bytes[key] == measured
    assert shown.bytes_per_parameter[key] == measured / 512**2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", MEASURED)
def test_the_examples_are_what_a_real_layer_takes(name: str, dtype: torch.dtype) -> None:
    layer = torch.nn.Linear(768, 768, dtype=dtype)
    measured = inspect_optimizer(stepped(find(name), layer, OptimSpec(name=name)))
    key = str(dtype).removeprefix("torch.")
    shown = page(find(name))
    assert shown.shared_bytes == measured.shared_bytes
    assert [example.own_bytes[key] for example in shown.examples] == [
        measured.by_parameter.get(parameter, 0) for parameter in ("weight", "bias")
    ]
    elements = sum(tensor.elements[key] for example in shown.examples for tensor in example.tensors)
    assert elements == measured.state_elements


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", PLAIN)
def test_the_statistics_shown_are_the_tensors_of_the_real_state(name: str, dtype: torch.dtype) -> None:
    state = next(iter(step_on_a_matrix(name, dtype).state.values()), {})
    held = {key: value for key, value in state.items() if isinstance(value, torch.Tensor)}
    real = sorted(
        (0 if value.numel() == 1 else 1 if value.numel() == 512 else 512, 8 * value.itemsize)
        for key, value in held.items()
        if key != "step" and not key.startswith(("qmap", "absmax"))
    )
    shown = overview(find(name), (512, 512)).statistics[str(dtype).removeprefix("torch.")]
    per_side = [(512 if s.per_side is None else s.per_side, s.bits) for s in shown for _ in range(s.count)]
    assert sorted(per_side) == real


def test_the_table_fits_a_narrow_terminal_and_lists_every_optimizer_under_its_package() -> None:
    result = effcli("optimizers")
    assert result.code == 0
    assert_fits(result.stdout)
    lines = result.stdout.splitlines()
    for entry in entries():
        (place,) = (number for number, line in enumerate(lines) if line.split()[:1] == [entry.name] and line[0] == " ")
        headings = [line for line in lines[:place] if line[:1].strip()]
        assert headings[-1].split()[0] == (entry.package or "torch") or headings[-1].startswith("─")
    assert "package.module:Class" in result.stdout


def test_known_optimizers_show_statistics_precision_and_bytes_per_parameter() -> None:
    rows = {
        line.split()[0]: " ".join(line.split()) for line in effcli("optimizers").stdout.splitlines() if line.strip()
    }
    assert rows["adamw"] == "adamw 2 x weight's dtype 8.000 4.000 cpu, cuda"
    assert rows["adam8bit"] == "adam8bit 2 x 8 bit 2.031 2.031 cpu, cuda"
    assert rows["sgd"] == "sgd none 0 0 cpu, cuda"
    assert rows["adamw4bit"] == "adamw4bit 2 x 4 bit 1.063 1.063 cpu, cuda"


def test_a_package_that_is_not_installed_is_named_with_its_pip_command(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "not installed" not in effcli("optimizers", "adam8bit").stdout
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    for arguments in ((), ("adam8bit",)):
        text = " ".join(effcli("optimizers", *arguments).stdout.split())
        assert "bitsandbytes not installed; pip install bitsandbytes" in text
    shown = {row["name"]: row["installed"] for row in effcli("optimizers", "--json").record["optimizers"]}
    assert (shown["adam8bit"], shown["adamw"]) == (False, True)


def test_the_table_as_json_holds_the_same_numbers() -> None:
    record = effcli("optimizers", "--json").record
    assert record["reference_shape"] == [4096, 4096]
    rows = {row["name"]: row for row in record["optimizers"]}
    assert list(rows) == [entry.name for entry in entries()]
    assert rows["adam8bit"]["statistics"]["bfloat16"] == [
        {"count": 2, "bits": 8, "per_side": None, "placement": "device"}
    ]
    assert rows["adamw"]["state_bytes"] == {"float32": 8 * 4096**2 + 4, "bfloat16": 4 * 4096**2 + 4}


@every_entry
def test_every_page_fits_a_narrow_terminal_and_leaves_nothing_out(entry: OptimizerEntry) -> None:
    result = effcli("optimizers", entry.name)
    assert result.code == 0
    assert_fits(result.stdout)
    joined = "".join(result.stdout.split())
    for text in (entry.summary, entry.law, entry.formula, entry.source, ", ".join(entry.aliases)):
        assert "".join(text.split()) in joined
    shown = effcli("optimizers", entry.name, "--json").record["optimizer"]
    assert (shown["name"], shown["law"], shown["formula"]) == (entry.name, entry.law, entry.formula)


def test_a_page_works_two_parameters_out_in_bytes() -> None:
    matrix, vector = effcli("optimizers", "adam8bit", "--json").record["optimizer"]["examples"]
    assert matrix["own_bytes"] == {"float32": 1_198_080, "bfloat16": 1_198_080}
    assert vector["own_bytes"] == {"float32": 6_144, "bfloat16": 6_144}
    text = " ".join(effcli("optimizers", "adamw").stdout.split())
    assert "768 x 768 1,179,649 4,718,596 2,359,300" in text


@pytest.mark.parametrize("word", ["adamw_bnb_8bit", "AdamW8bit"])
def test_an_alias_shows_the_page_of_its_optimizer(word: str) -> None:
    assert effcli("optimizers", word).stdout == effcli("optimizers", "adamw8bit").stdout


def test_an_unknown_name_is_an_error_with_the_nearest() -> None:
    result = effcli("optimizers", "adamw8bits")
    assert result.code == 2
    assert "'adamw8bits'" in result.error
    assert "Did you mean 'adamw8bit'?" in result.error


@every_entry
def test_every_name_in_a_formula_is_explained(entry: OptimizerEntry) -> None:
    shown = page(entry)
    used = {node.id for node in ast.walk(ast.parse(entry.formula)) if isinstance(node, ast.Name)}
    assert used - {"ceil", "min", "max"} <= set(shown.legend) | {setting.name for setting in shown.settings}


def given(settings: list[Setting]) -> dict[str, object]:
    """Return what the command line makes of the flags of settings at their defaults."""
    own = {s.flag.removeprefix("--").replace("-", "_"): s.default for s in settings if not s.flag.endswith("=")}
    texts = [f"{s.flag.removeprefix('--optim-arg ')}{s.default}" for s in settings if s.flag.endswith("=")]
    return given_fields({**own, "optim_arg": texts})


@every_entry
def test_every_hyperparameter_is_set_by_the_flag_beside_it(entry: OptimizerEntry) -> None:
    settings = [setting for setting in page(entry).settings if setting.default is not None]
    spec = build_spec(given(settings)).optim
    hyper = resolve_hyper(entry, spec)
    for setting in settings:
        set_to = spec.weight_decay if setting.name == "weight_decay" else hyper[setting.name]
        assert set_to == setting.default, setting.name


def test_a_class_by_path_has_a_page_of_what_a_step_of_it_allocates() -> None:
    shown = effcli("optimizers", "torch.optim:AdamW", "--json").record["optimizer"]
    assert (shown["basis"], shown["formula"]) == ("probed", "")
    assert [example["own_bytes"]["float32"] for example in shown["examples"]] == [4_718_596, 6_148]
    text = effcli("optimizers", "torch.optim:AdamW").stdout
    assert_fits(text)
    assert "probed: a trial step of the class" in text
    assert "formula" not in text


def test_the_page_of_a_class_that_needs_an_argument_says_which_commands_take_it() -> None:
    result = effcli("optimizers", "bitsandbytes.optim:SGD")
    assert result.code == 2
    assert "needs 'lr', which has no default; give --lr to effcli train or effcli estimate" in result.error
