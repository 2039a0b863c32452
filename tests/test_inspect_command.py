"""`effcli inspect` on the command line: the table, the values, and one line for whatever is no optimizer state."""

from __future__ import annotations

import os
import re
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoints import Trap
from tests.commands import Result, effcli

UNITS = {"B": 1, "KiB": 1024, "MiB": 1024**2}
NUM_PARAMETERS = 30


@pytest.fixture
def optimizer() -> torch.optim.Optimizer:
    """Return AdamW after one update of thirty parameters of growing size."""
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(number + 1, 64)) for number in range(NUM_PARAMETERS)]
    optimizer = torch.optim.AdamW([(f"block.{number}.weight", param) for number, param in enumerate(params)])
    for param in params:
        param.grad = torch.randn_like(param)
    optimizer.step()
    return optimizer


@pytest.fixture
def path(optimizer: torch.optim.Optimizer, tmp_path: Path) -> Path:
    """Return the file of its state."""
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    return tmp_path / "optimizer.pt"


def shown(*arguments: object) -> str:
    result = effcli("inspect", *arguments)
    assert result.code == 0, result.stderr
    return result.stdout


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    return sum(value.untyped_storage().nbytes() for state in optimizer.state.values() for value in state.values())


def test_the_tables_fit_80_columns_and_say_the_exact_bytes(path: Path, optimizer: torch.optim.Optimizer) -> None:
    text = shown(path)
    assert max(map(len, text.splitlines())) <= 80
    assert "\x1b" not in text
    assert f"({state_bytes(optimizer):,} B)" in text
    rows = re.findall(r"^(?:step|exp_avg|exp_avg_sq) +([\d,]+) +([\d.]+) (B|KiB|MiB)  float32$", text, re.MULTILINE)
    elements = NUM_PARAMETERS * (NUM_PARAMETERS + 1) // 2 * 64
    assert [int(count.replace(",", "")) for count, _, _ in rows] == [NUM_PARAMETERS, elements, elements]
    assert sum(float(number) * UNITS[unit] for _, number, unit in rows) == pytest.approx(
        state_bytes(optimizer), rel=1e-3
    )
    assert re.search(r"^adamw \(as saved\) .* 1\.00 x", text, re.MULTILINE)
    assert re.search(r"^sgd +0 B +0 x", text, re.MULTILINE)


@pytest.mark.parametrize(
    ("flags", "rows"), [((), 20), (("--top", 3), 3), (("--top", 0), 0), (("--per-layer",), NUM_PARAMETERS)]
)
def test_the_largest_parameters_are_shown_and_how_many_are_left(
    flags: tuple[object, ...], rows: int, path: Path
) -> None:
    text = shown(path, *flags)
    listed = [int(number) for number in re.findall(r"^block\.(\d+)\.weight", text, re.MULTILINE)]
    assert listed == list(range(NUM_PARAMETERS))[::-1][:rows]
    left = re.search(r"^more +(\d+) parameter", text, re.MULTILINE)
    assert (int(left[1]) if left else 0) == NUM_PARAMETERS - rows


@pytest.mark.parametrize("form", ["separate", "joined", "before", "reversed"])
def test_values_are_those_of_the_live_state(form: str, path: Path, optimizer: torch.optim.Optimizer) -> None:
    pattern = "block.2.weight.exp_avg"
    arguments: dict[str, tuple[object, ...]] = {
        "separate": (path, "--values", pattern, "--json"),
        "joined": (path, f"--values={pattern}", "--json"),
        "before": ("--values", pattern, path, "--json"),
        "reversed": ("--json", "--values", pattern, path),
    }
    values = effcli("inspect", *arguments[form]).record["values"]
    live = optimizer.state[optimizer.param_groups[0]["params"][2]]
    assert [tensor["key"] for tensor in values] == ["exp_avg", "exp_avg_sq"]
    for tensor in values:
        expected = live[tensor["key"]]
        assert tensor["parameter"] == "block.2.weight"
        assert tensor["shape"] == [3, 64]
        assert tensor["dtype"] == "float32"
        assert tensor["first"] == pytest.approx(expected.flatten()[: len(tensor["first"])].tolist(), rel=1e-6)
        assert len(tensor["first"]) >= 4
        assert (tensor["minimum"], tensor["maximum"]) == (expected.min().item(), expected.max().item())


@pytest.mark.parametrize(
    "arguments", [("{path}", "--values"), ("--values", "{path}"), ("--values", "--quiet", "{path}")]
)
def test_values_without_a_pattern_are_those_of_the_first_tensors(arguments: tuple[str, ...], path: Path) -> None:
    text = shown(*(argument.format(path=path) for argument in arguments))
    assert len(re.findall(r"^block\.\d+\.weight\.\w+(?: = 1 \(float32\))?$", text, re.MULTILINE)) == 20
    assert ("the first 20 tensors" in text) == ("--quiet" not in arguments)
    record = effcli("inspect", path, "--values", "--json").record
    assert len(record["values"]) == 3 * NUM_PARAMETERS


def test_values_that_are_not_finite_are_counted(tmp_path: Path) -> None:
    odd = torch.tensor([1.0, float("nan"), float("inf"), -2.0])
    torch.save({"state": {0: {"exp_avg": odd}}, "param_groups": [{"params": [0]}]}, tmp_path / "o.pt")
    (tensor,) = effcli("inspect", tmp_path / "o.pt", "--values", "--json").record["values"]
    assert (tensor["num_nan"], tensor["num_infinite"], tensor["minimum"]) == (1, 1, -2.0)
    assert "not finite: 1 NaN, 1 infinit" in shown(tmp_path / "o.pt", "--values")


def test_a_pattern_that_fits_nothing_is_refused_with_an_example(path: Path) -> None:
    result = effcli("inspect", path, "--values", "blok")
    assert result.code == 2
    assert result.error == "--values 'blok' fits no state; a state is called 'block.0.weight.step'"


def test_names_are_data(tmp_path: Path) -> None:
    names = ["[red]evil[/red]", "a\x1b[2Jb\nc", "[/some/x]", "ordinary"]
    params = [torch.nn.Parameter(torch.ones(3)) for _ in names]
    optimizer = torch.optim.Adagrad(list(zip(names, params, strict=True)))
    torch.save(optimizer.state_dict(), tmp_path / "[v2].pt")
    text = shown(tmp_path / "[v2].pt", "--values")
    assert "\x1b" not in text
    assert "[red]evil[/red]" in text
    assert "a\\x1b[2Jb c" in text
    assert "[/some/x]" in text
    assert "[v2].pt" in text


def hostile(folder: Path, marker: Path) -> Path:
    torch.save({"state": {0: {"exp_avg": torch.ones(3)}}, "param_groups": [Trap(marker)]}, folder / "hostile.pt")
    return folder / "hostile.pt"


def test_a_hostile_pickle_is_refused_in_one_line_and_nothing_runs(tmp_path: Path) -> None:
    result = effcli("inspect", hostile(tmp_path, tmp_path / "marker"))
    assert result.code == 2
    assert "hostile.pt" in result.error
    assert not (tmp_path / "marker").exists()


def _weights(folder: Path) -> Path:
    torch.save({"layer.weight": torch.ones(3), "layer.bias": torch.ones(3)}, folder / "model.bin")
    return folder / "model.bin"


def _text(folder: Path) -> Path:
    (folder / "notes.txt").write_text("some words\n")
    return folder / "notes.txt"


def _empty(folder: Path) -> Path:
    (folder / "empty").mkdir()
    return folder / "empty"


@pytest.mark.parametrize("make", [_weights, _text, _empty])
def test_what_holds_no_optimizer_state_is_one_line(make: Any, tmp_path: Path) -> None:
    path = make(tmp_path)
    result = effcli("inspect", path)
    assert result.code == 2
    assert result.stdout == ""
    assert str(path) in result.error
    assert "; give a Trainer checkpoint, " in result.error


def test_a_path_that_does_not_exist_gets_the_nearest_name(path: Path, tmp_path: Path) -> None:
    near = effcli("inspect", tmp_path / "optimiser.pt")
    assert near.code == 2
    assert near.error == f"'{tmp_path / 'optimiser.pt'}' does not exist. Did you mean 'optimizer.pt'?"
    far = effcli("inspect", "/no-such-folder-at-all")
    assert "does not exist; give a Trainer checkpoint, " in far.error
    inside = effcli("inspect", path / "x")
    assert inside.error == f"'{path}' is a file, no folder"
    nobody = effcli("inspect", "~no-such-user-at-all/x")
    assert (nobody.code, "does not exist" in nobody.error) == (2, True)
    deeper = effcli("inspect", tmp_path / "optimizer.p" / "a" / "b")
    assert deeper.error == f"'{tmp_path / 'optimizer.p'}' does not exist. Did you mean 'optimizer.pt'?"


@pytest.mark.parametrize("arguments", [(), ("--values",)])
def test_without_a_path_it_is_asked_for(arguments: tuple[str, ...]) -> Any:
    result = effcli("inspect", *arguments)
    assert result.code == 2
    assert "PATH" in result.error


def test_a_model_that_is_not_known_is_refused(tmp_path: Path) -> None:
    torch.save({"state": {0: {"sum": torch.ones(3)}}, "param_groups": [{"params": [0]}]}, tmp_path / "o.pt")
    result = effcli("inspect", tmp_path / "o.pt", "--model", "distilbert-base-case")
    assert result.code == 2
    assert "Did you mean 'distilbert-base-cased'?" in result.error


def test_it_reads_a_relative_path_and_a_link(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "link").symlink_to(path)
    monkeypatch.chdir(tmp_path)
    results: list[Result] = [effcli("inspect", name, "--json") for name in ("optimizer.pt", "link", os.path.curdir)]
    assert len({result.record["state_bytes"] for result in results}) == 1


GALORE = {"step": 1, "projector": torch.zeros(4, 16), "exp_avg": torch.zeros(16, 4), "exp_avg_sq": torch.zeros(16, 4)}


@pytest.mark.parametrize(
    ("state", "group"),
    [
        (GALORE, {"rank": 0, "proj_type": "none", "correct_bias": True}),
        ({**GALORE, "projector": [torch.zeros(4, 16), "text"]}, {"rank": float("nan")}),
        ({"exp_avg": torch.zeros(3)}, {"betas": "no", "eps": None, "momentum": "no", "amsgrad": 5}),
        ({"exp_avg": torch.zeros(3, dtype=torch.complex64)}, {}),
        ({"exp_avg": torch.zeros(3, 3).to_sparse()}, {}),
        ({1: torch.zeros(3), "text": "text", "none": None, "flag": True}, {}),
        ({"exp_avg": torch.zeros(0, 4), "exp_avg_sq": torch.zeros(0, 4), "step": torch.tensor(1.0)}, {}),
    ],
)
def test_odd_states_and_settings_are_counted_and_never_a_fault(
    state: dict[Any, Any], group: dict[str, Any], tmp_path: Path
) -> None:
    torch.save({"state": {0: state}, "param_groups": [{**group, "params": [0]}]}, tmp_path / "o.pt")
    record = effcli("inspect", tmp_path / "o.pt", "--values", "--json").record
    tensors = [value for value in state.values() if isinstance(value, torch.Tensor) and not value.is_sparse]
    if len(tensors) == sum(isinstance(value, torch.Tensor | list) for value in state.values()):
        assert record["state_bytes"] == sum(tensor.untyped_storage().nbytes() for tensor in tensors)
    assert record["optimizer"] in (None, "lion", "adamw")
    assert effcli("inspect", tmp_path / "o.pt", "--values").code == 0


@pytest.mark.parametrize(
    ("file", "content", "why"),
    [
        ("config.json", "[1]", "it holds no JSON object"),
        ("config.json", '{"model_type": "own", "auto_map": {"AutoConfig": "own.Own"}}', "needs Python code"),
        (
            "config.json",
            '{"model_type": "distilbert", "vocab_size": "many", "dim": null}',
            "config.json cannot be used",
        ),
        ("adapter_config.json", '{"peft_type": "LORA", "base_model_name_or_path": "../../x"}', "not on this machine"),
        ("adapter_config.json", '{"peft_type": "IA3", "base_model_name_or_path": "x"}', "another kind than LoRA"),
        ("model.safetensors", "no weights", "model.safetensors' is no safetensors file that can be read"),
        ("model.safetensors.index.json", "{}", "model.safetensors.index.json' is no index of a model's files"),
        ("model.safetensors.index.json", '{"weight_map": {"w": "w-2.safetensors"}}', "No such file or directory"),
        ("pytorch_model.bin", "no weights", "pytorch_model.bin' is no file that torch.save wrote"),
        ("training_args.bin", "no archive", None),
        ("progress.json", '{"spec": {"optim": {"name": "os:system"}}}', None),
    ],
)
def test_damaged_files_beside_a_state_leave_it_without_names(
    file: str, content: str, why: str | None, tmp_path: Path
) -> None:
    torch.save({"state": {0: {"exp_avg": torch.ones(3)}}, "param_groups": [{"params": [0]}]}, tmp_path / "o.pt")
    (tmp_path / file).write_text(content)
    record = effcli("inspect", tmp_path / "o.pt", "--json").record
    assert record["by_parameter"] == {"0": 12}
    assert record["optimizer"] == "lion"
    assert any((why or "Parameters have their positions for names") in note for note in record["notes"]), record[
        "notes"
    ]


def test_a_state_that_is_small_beside_others_has_a_ratio_of_its_own(tmp_path: Path) -> None:
    parameter = torch.nn.Parameter(torch.ones(4096, 512))
    optimizer = torch.optim.Adafactor([parameter])
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    torch.save(optimizer.state_dict(), tmp_path / "o.pt")
    text = shown(tmp_path / "o.pt")
    assert re.search(r"^adamw +16\.00 MiB +910 x", text, re.MULTILINE), text
    wide = torch.nn.Parameter(torch.ones(4096, 512))
    other = torch.optim.AdamW([wide])
    wide.grad = torch.ones_like(wide)
    other.step()
    torch.save(other.state_dict(), tmp_path / "o.pt")
    assert re.search(r"^adafactor +18\.00 KiB +0\.00110 x", shown(tmp_path / "o.pt"), re.MULTILINE)


@pytest.mark.parametrize("name", ["shape", "__tensor_flatten__", "scale", "ortho_matrix"])
@pytest.mark.parametrize("value", [5, [[1]], "abc"], ids=str)
@pytest.mark.parametrize("key", ["m", "projector", "exp_avg_sq_row", "state1"])
def test_an_object_in_a_state_is_no_tensor_whatever_it_is_called(
    key: str, value: Any, name: str, tmp_path: Path
) -> None:
    held = Namespace(**{name: value})
    state = {key: held, "exp_avg": torch.ones(3), "exp_avg_sq_col": held}
    torch.save({"state": {0: state}, "param_groups": [{"params": (0,)}]}, tmp_path / "o.pt")
    assert effcli("inspect", tmp_path / "o.pt", "--json").record["state_bytes"] == 12


@pytest.mark.parametrize("pattern", [("--values",), ("--values=*weight",)])
def test_without_a_state_there_are_no_values_and_that_is_no_error(pattern: tuple[str, ...], tmp_path: Path) -> None:
    torch.save({"state": {}, "param_groups": [{"params": [0], "lr": 0.1}]}, tmp_path / "o.pt")
    record = effcli("inspect", tmp_path / "o.pt", *pattern, "--json").record
    assert record["values"] == []
    assert "There are no values to show: there is no state." in record["notes"]


def test_a_number_is_a_name_where_names_were_saved_and_a_position_where_not(tmp_path: Path) -> None:
    state = {0: {"m": torch.tensor([3 + 4j])}}
    torch.save({"state": state, "param_groups": [{"params": [0]}]}, tmp_path / "o.pt")
    text = shown(tmp_path / "o.pt", "--values")
    assert re.search(r"^position 0 +1 ", text, re.MULTILINE)
    assert "position 0.m\n  1, complex64 (magnitudes), 5 to 5\n" in text
    torch.save({"state": state, "param_groups": [{"params": [0], "param_names": ["0"]}]}, tmp_path / "o.pt")
    text = shown(tmp_path / "o.pt", "--values")
    assert re.search(r"^0 +1 ", text, re.MULTILINE)
    assert "position" not in text
