"""`--compile`: the same training and the same files as without it, for every length of a batch, or one line at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from effcli.engines import compiling
from tests.commands import TINY_DISTILBERT, TINY_GPT2, csv_file, data_flags, effcli, model_folder, saved_weights
from tests.jobs import ENGINES

pytestmark = pytest.mark.usefixtures("without_plan")
SMALL = {"dim": 32, "hidden_dim": 64}
COMMON = ("--batch-size", 2, "--epochs", 2, "--lr", 1e-3, "--json")


@pytest.fixture(autouse=True)
def nothing_compiled() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return a list of the graphs that are compiled, by a backend that leaves them as they are."""
    made: list[Any] = []

    def keep(graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        made.append(graph)
        return graph.forward

    monkeypatch.setattr(compiling, "SETTINGS", {"backend": keep, "dynamic": True})
    return made


def check_same(one: dict[str, Any], other: dict[str, Any], *, rel: float = 1e-5) -> None:
    """Check histories and evaluations of two records."""
    for key in ("loss", "grad_norm", "lr"):
        assert [line[key] for line in one["history"]] == pytest.approx([x[key] for x in other["history"]], rel=rel)
    losses = [[line["eval_loss"] for line in record["eval"]] for record in (one, other)]
    assert losses[0] == pytest.approx(losses[1], rel=rel)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_compiled_layers_train_the_same_for_every_length_and_leave_no_trace_in_the_files(
    engine: str, graphs: list[Any], tmp_path: Path
) -> None:
    model, data = model_folder(tmp_path / "m", TINY_DISTILBERT, **SMALL, dropout=0.1), csv_file(tmp_path / "d.csv", 23)
    run = ("train", model, "--data", data, "--eval-data", data, "--engine", engine, *COMMON)
    plain = effcli(*run, "--out", tmp_path / "a").record
    assert not graphs
    done = effcli(*run, "--compile", "--out", tmp_path / "b")
    check_same(done.record, plain)
    assert done.record["spec"]["loop"]["compile"] is True
    assert "The plan is of the model uncompiled" in done.stderr
    # Layers and lengths share graphs: of the check, of training and evaluation, and of the one row of a last batch.
    assert 3 <= len(graphs) <= 6
    one, other = saved_weights(tmp_path / "a"), saved_weights(tmp_path / "b")
    assert one.keys() == other.keys()
    assert all(torch.allclose(one[name], other[name], rtol=0, atol=0.01 * 1e-3 * 24) for name in one)
    AutoModelForSequenceClassification.from_pretrained(tmp_path / "b" / "model")


@pytest.mark.parametrize("compiled_first", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_run_goes_on_compiled_or_not_whatever_it_was(compiled_first: bool, graphs: list[Any], tmp_path: Path) -> None:
    model, data = model_folder(tmp_path / "m", TINY_DISTILBERT, **SMALL, n_layers=1), csv_file(tmp_path / "d.csv", 8)
    run = ("train", model, "--data", data, "--scheduler", "constant", *COMMON)
    whole = effcli(*run, "--out", tmp_path / "whole").record
    flag = {True: ("--compile",), False: ("--set", "loop.compile=false")}
    out = ("--out", tmp_path / "o")
    begun = effcli(*run, "--epochs", 1, *flag[compiled_first], *out)
    assert len(begun.record["history"]) == 4
    assert ("The plan is of the model uncompiled" in begun.stderr) is bool(graphs) is compiled_first
    assert saved_weights(tmp_path / "o").keys() == saved_weights(tmp_path / "whole").keys()
    graphs.clear()
    rest = effcli("train", "--resume", *out, "--epochs", 2, *flag[not compiled_first], "--json").record
    assert bool(graphs) is not compiled_first
    assert rest["spec"]["loop"]["compile"] is not compiled_first
    assert len(rest["history"]) == 8
    check_same(rest, whole)


def test_what_the_compiler_lacks_is_said_before_model_and_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        raise RuntimeError("No working C++ compiler found\nand more about it")

    monkeypatch.setattr(compiling, "SETTINGS", {"backend": fail})
    nothing = ("train", tmp_path / "no" / "model", "--data", tmp_path / "no" / "data.csv", "--compile")
    done = effcli(*nothing)
    assert done.code == 4
    assert all(word in done.error for word in ("--compile", "No working C++ compiler found", "g++", "CXX", "cpu"))
    assert "and more" not in done.error


@pytest.mark.usefixtures("graphs")
def test_a_compiler_that_is_switched_off_is_no_compiler(tmp_path: Path) -> None:
    with torch.compiler.set_stance("force_eager"):
        done = effcli("train", tmp_path / "no" / "model", "--compile")
    assert done.code == 4
    assert all(word in done.error for word in ("--compile", "switched off", "TORCHDYNAMO_DISABLE"))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # those of torch's own imports
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_inductor_trains_the_same(precision: str, tmp_path: Path) -> None:
    model, data = model_folder(tmp_path / "m", TINY_DISTILBERT, dropout=0.1, n_layers=1), csv_file(tmp_path / "d.csv")
    run = ("train", model, "--data", data, "--eval-data", data, "--precision", precision, *COMMON)
    plain = effcli(*run, "--out", tmp_path / "a").record
    done = effcli(*run, "--compile", "--out", tmp_path / "b").record
    check_same(done, plain, rel=1e-5 if precision == "fp32" else 2e-2)
    assert saved_weights(tmp_path / "b").keys() == saved_weights(tmp_path / "a").keys()


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_recomputed_layers_with_adapters_compile_too(engine: str, graphs: list[Any], tmp_path: Path) -> None:
    model, data = model_folder(tmp_path / "m", TINY_GPT2), csv_file(tmp_path / "d.csv")
    run = ("train", model, *data_flags("causal-lm", data), "--lora-r", 4, "--engine", engine, *COMMON)
    plain = effcli(*run, "--out", tmp_path / "a").record
    done = effcli(*run, "--eval-data", data, "--gradient-checkpointing", "--compile", "--out", tmp_path / "b").record
    assert graphs
    assert all(line["grad_norm"] > 0 for line in done["history"])
    check_same({**done, "eval": []}, {**plain, "eval": []})
    assert saved_weights(tmp_path / "b").keys() == saved_weights(tmp_path / "a").keys()
