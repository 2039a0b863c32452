"""Recipes: what YAML would change stays as written, faults are told with their place, and every recipe is right."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from effcli import recipes
from effcli.cli.recipes import app
from effcli.errors import UsageError, WriteError
from effcli.spec import DataSpec, LoopSpec, ModelSpec, OptimSpec, OutputSpec, RunSpec, build_spec

NAMES = [info.name for info in recipes.list_recipes()]


def recipe(folder: Path, text: str) -> str:
    path = folder / "mine.yaml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def fault(folder: Path, text: str) -> str:
    with pytest.raises(UsageError) as caught:
        recipes.read_recipe(recipe(folder, text))
    message = str(caught.value)
    assert "\n" not in message
    assert "mine.yaml" in message
    return message


def refused(text: str) -> str:
    with pytest.raises(UsageError) as caught:
        recipes.parse_set(text)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# What YAML would change


def test_an_exponent_without_a_dot_is_a_number(tmp_path: Path) -> None:
    assert build_spec(recipes.read_recipe(recipe(tmp_path, "optim: {lr: 1e-4}"))).optim.lr == 0.0001


def test_no_is_false_for_a_switch_and_a_word_for_a_text(tmp_path: Path) -> None:
    values = recipes.read_recipe(recipe(tmp_path, "loop: {gradient_checkpointing: no}\ndata: {label_column: no}"))
    spec = build_spec(values)
    assert spec.loop.gradient_checkpointing is False
    assert spec.data.label_column == "no"


@pytest.mark.parametrize("text", ["null", "~", "", "Null", "NULL"])
def test_null_tilde_and_nothing_mean_not_given(tmp_path: Path, text: str) -> None:
    spec = build_spec(recipes.read_recipe(recipe(tmp_path, f"data:\n  limit_rows: {text}\n  label_column: {text}\n")))
    assert spec == RunSpec()


def test_a_quoted_null_is_a_text(tmp_path: Path) -> None:
    assert build_spec(recipes.read_recipe(recipe(tmp_path, "data: {label_column: 'null'}"))).data.label_column == "null"


@pytest.mark.parametrize("text", ["1:30", "2024-01-01", "0o17", "1_000", "on", "=", "true", "1.0"])
def test_texts_that_yaml_takes_for_something_else_stay_texts(tmp_path: Path, text: str) -> None:
    assert build_spec(recipes.read_recipe(recipe(tmp_path, f"model: {{name: {text}}}"))).model.name == text


def test_optimizer_arguments_take_the_type_of_their_writing(tmp_path: Path) -> None:
    text = "optim:\n  args: {momentum: 9e-1, nesterov: true, every: 3, mode: off, beta1: null}\n"
    args = build_spec(recipes.read_recipe(recipe(tmp_path, text))).optim.args
    assert args == {"momentum": 0.9, "nesterov": True, "every": 3, "mode": "off", "beta1": "none"}
    assert type(args["every"]) is int


def test_a_byte_order_mark_is_no_part_of_the_first_key(tmp_path: Path) -> None:
    assert recipes.read_recipe(recipe(tmp_path, "\ufeffloop: {accum: 2}")) == {"loop": {"accum": "2"}}


# Faults


def test_a_key_given_twice_is_told_with_both_lines(tmp_path: Path) -> None:
    message = fault(tmp_path, "loop:\n  accum: 2\n  epochs: 1\n  accum: 4\n")
    assert message.endswith("mine.yaml, line 4: not readable as YAML: 'accum' is given twice, first in line 2")


def test_a_key_given_twice_in_one_line_is_found_too(tmp_path: Path) -> None:
    assert "'accum' is given twice" in fault(tmp_path, "loop: {accum: 2, accum: 4}")


def test_broken_yaml_is_told_with_its_line(tmp_path: Path) -> None:
    assert "mine.yaml, line 3: not readable as YAML" in fault(tmp_path, "loop:\n  accum: 2\n epochs: 1\n")


def test_a_control_character_is_told_with_its_line(tmp_path: Path) -> None:
    assert "mine.yaml, line 2: not readable as YAML" in fault(tmp_path, "loop:\n  accum: \x01\n")


@pytest.mark.parametrize("text", ["", "# nothing but a comment\n", "- a\n- b\n", "accum"])
def test_a_file_without_sections_is_refused(tmp_path: Path, text: str) -> None:
    assert "holds no sections; a recipe has some of model, data, optim, loop, output" in fault(tmp_path, text)


def test_a_list_as_key_and_a_value_inside_itself_are_refused(tmp_path: Path) -> None:
    assert "a key must be a text" in fault(tmp_path, "? [a, b]\n: 1\n")
    assert "not readable as YAML" in fault(tmp_path, "loop: &x {accum: *x}")
    assert "not readable as YAML" in fault(tmp_path, "loop: {accum: 1}\n---\nloop: {accum: 2}\n")


def test_deep_nesting_is_refused_in_one_line(tmp_path: Path) -> None:
    assert "nested too deeply" in fault(tmp_path, "loop: " + "[" * 3000 + "]" * 3000)


def test_a_file_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_bytes(b"model: {name: caf\xe9}")
    with pytest.raises(UsageError, match="not UTF-8"):
        recipes.read_recipe(str(path))


def test_an_unknown_key_names_file_and_nearest_key(tmp_path: Path) -> None:
    assert fault(tmp_path, "loop: {acum: 2}").endswith("mine.yaml: loop.acum: unknown key. Did you mean 'accum'?")


def test_all_faults_of_a_recipe_are_told_at_once(tmp_path: Path) -> None:
    message = fault(tmp_path, "loop: {accum: 0, epochs: x}\noptim: {lr: fast}\n")
    assert "3 faults" in message


def test_an_unknown_recipe_names_the_nearest() -> None:
    with pytest.raises(UsageError, match="Did you mean 'distilbert/adam8bit'"):
        recipes.read_recipe("distilbert/adam8bits")
    with pytest.raises(UsageError, match="Did you mean 'distilbert/adafactor'"):
        recipes.read_recipe("adafactor")
    with pytest.raises(UsageError, match=r"no recipe file 'no/such.yaml'"):
        recipes.read_recipe("no/such.yaml")


# Layers and --set


def test_a_later_layer_wins_key_by_key() -> None:
    demo = {"loop": {"batch_size": 32, "epochs": 5}, "optim": {"lr": 1.0, "args": {"a": 1, "b": 1}}}
    from_recipe = {"loop": {"epochs": "2", "accum": "4"}, "optim": {"args": {"b": "2"}}, "model": None}
    merged = recipes.overlay(demo, from_recipe, {"loop": {"accum": "8"}}, {"loop": {"accum": 16}, "optim": None})
    assert merged == {
        "loop": {"batch_size": 32, "epochs": "2", "accum": 16},
        "optim": {"lr": 1.0, "args": {"a": 1, "b": "2"}},
        "model": None,
    }
    assert demo["loop"] == {"batch_size": 32, "epochs": 5}


def test_null_in_a_later_layer_takes_a_value_back() -> None:
    merged = recipes.overlay({"data": {"limit_rows": "5"}}, recipes.parse_set("data.limit_rows=null"))
    assert build_spec(merged).data.limit_rows is None


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("loop.accum=2", {"loop": {"accum": "2"}}),
        (" loop.accum =2", {"loop": {"accum": "2"}}),
        ("model.name=a=b", {"model": {"name": "a=b"}}),
        ("data.delimiter=,", {"data": {"delimiter": ","}}),
        ("data.delimiter=#", {"data": {"delimiter": "#"}}),
        ("data.delimiter=", {"data": {"delimiter": None}}),
        ("data.text_columns=a", {"data": {"text_columns": "a"}}),
        ("data.text_columns=[a, b]", {"data": {"text_columns": ["a", "b"]}}),
        ("model.name=[x]", {"model": {"name": "[x]"}}),
        ("optim.args.momentum=0.9", {"optim": {"args": {"momentum": "0.9"}}}),
        ("optim.args={a: 1}", {"optim": {"args": {"a": "1"}}}),
    ],
)
def test_set_takes_the_value_as_written(text: str, values: dict[str, object]) -> None:
    assert recipes.parse_set(text) == values


def test_set_refuses_what_is_no_field() -> None:
    assert refused("loop.acum=2") == "--set loop.acum: unknown key. Did you mean 'accum'?"
    assert "Did you mean" in refused("loop.accum.more=2")
    for text in ("loop.accum", "accum=2", "=2", ""):
        assert "as in --set loop.accum=2" in refused(text)
    assert "not readable as YAML" in refused("data.text_columns=[a")


# Writing

TEXT = st.text(min_size=1, max_size=8)
TEXTS = st.lists(TEXT, max_size=2, unique=True).map(tuple)
WHOLE = st.integers(min_value=2, max_value=2**31 - 1)
REAL = st.floats(min_value=0, max_value=0.99, allow_nan=False)
SPECS = st.builds(
    RunSpec,
    model=st.builds(ModelSpec, name=st.none() | TEXT, task=st.sampled_from([None, "causal-lm"]), freeze=TEXTS),
    data=st.builds(
        DataSpec,
        train=st.none() | TEXT,
        text_columns=TEXTS,
        delimiter=st.none() | st.characters(exclude_categories=["Cs"]),
        encoding=st.sampled_from(["utf-8", "latin-1"]),
        limit_rows=st.none() | WHOLE,
    ),
    optim=st.builds(
        OptimSpec,
        lr=st.none() | REAL,
        beta1=st.none() | REAL,
        args=st.dictionaries(TEXT, st.booleans() | st.integers() | REAL | TEXT, max_size=3),
        keep_32bit=TEXTS,
    ),
    loop=st.builds(LoopSpec, precision=st.sampled_from(["fp32", "bf16-pure"]), accum=WHOLE, epochs=WHOLE),
    output=st.builds(OutputSpec, out=st.none() | TEXT),
)


@settings(max_examples=150, deadline=None)
@given(spec=SPECS, header=st.text(max_size=20))
def test_a_written_recipe_reads_back_as_the_same_spec(
    tmp_path_factory: pytest.TempPathFactory, spec: RunSpec, header: str
) -> None:
    path = tmp_path_factory.getbasetemp() / "written.yaml"
    recipes.write_recipe(spec, path, header)
    assert recipes.check(str(path)) == spec


@pytest.mark.parametrize("name", ["null", "no", "1e-4", "~", "true", "a: b", "# x", "'", "[x]", " x ", "tab\there"])
def test_words_that_yaml_reads_otherwise_survive_writing(tmp_path: Path, name: str) -> None:
    spec = RunSpec(model=ModelSpec(name=name), optim=OptimSpec(args={name: name}))
    recipes.write_recipe(spec, tmp_path / "x.yaml", "Purpose: words")
    assert recipes.check(str(tmp_path / "x.yaml")) == spec


def test_a_written_recipe_keeps_its_header_and_leaves_no_part_file(tmp_path: Path) -> None:
    path = tmp_path / "new" / "x.yaml"
    recipes.write_recipe(RunSpec(), path, "Purpose: a run\nCommand: effcli train --recipe x.yaml")
    assert recipes.read_header(path).purpose == "a run"
    assert recipes.read_header(path).command == "effcli train --recipe x.yaml"
    assert [file.name for file in path.parent.iterdir()] == ["x.yaml"]


def test_a_place_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(WriteError, match="could not write"):
        recipes.write_recipe(RunSpec(), tmp_path / "file" / "x.yaml", "")


def test_a_copy_names_itself_and_is_never_overwritten_silently(tmp_path: Path) -> None:
    copied = recipes.copy_recipe("distilbert/adam8bit", tmp_path)
    assert copied == tmp_path / "adam8bit.yaml"
    assert recipes.read_header(copied).command == f"effcli train --recipe {copied}"
    assert recipes.check(str(copied)) == recipes.check("distilbert/adam8bit")
    with pytest.raises(UsageError, match="is there already"):
        recipes.copy_recipe("distilbert/adamw", copied)
    recipes.copy_recipe("distilbert/adamw", copied, overwrite=True)
    assert recipes.check(str(copied)).optim.name == "adamw"


@pytest.mark.parametrize(
    ("command", "launched"),
    [
        ("torchrun --nproc-per-node 2 -m effcli train --recipe 'a b.yaml'",
         "torchrun --nproc-per-node 2 -m effcli train"),
        ("effcli train --optim adamw", "effcli train"),
    ],
)  # fmt: skip
def test_a_copy_is_launched_as_its_original_was(tmp_path: Path, command: str, launched: str) -> None:
    original, copy = tmp_path / "a b.yaml", tmp_path / "c d.yaml"
    recipes.write_recipe(RunSpec(), original, f"Purpose: a run\nCommand: {command}")
    assert recipes.read_header(recipes.copy_recipe(str(original), copy)).command == f"{launched} --recipe '{copy}'"


# Every recipe of the program


def test_there_are_recipes_for_every_purpose() -> None:
    optimizers = {recipes.check(name).optim.name for name in NAMES}
    assert {"adamw", "adafactor", "adam8bit"} <= optimizers
    assert any(recipes.check(name).model.task == "causal-lm" for name in NAMES)
    assert len(NAMES) >= 6


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_is_right_and_its_header_says_what_it_is(name: str) -> None:
    spec = recipes.check(name)
    info = recipes.read_header(recipes.find_recipe(name))
    assert info.purpose
    assert info.command == f"effcli train --recipe {name}"
    assert spec.optim.name in info.path.read_text()
    keys = [line.split("#")[0] for line in info.path.read_text().splitlines() if line.startswith("  ")]
    sections = [line[:-1] for line in info.path.read_text().splitlines() if line.endswith(":") and line[0] != "#"]
    assert keys
    assert sections == [section for section in RunSpec.model_fields if section in sections]


@pytest.mark.parametrize("name", [name for name in NAMES if not name.startswith("builtin/")])
def test_the_bytes_in_a_header_are_those_of_the_model_and_its_optimizer(name: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, DistilBertConfig, GPT2Config

    from effcli.memory.state import predict_state
    from effcli.models.build import freeze, parameter_infos
    from effcli.optim import registry

    configs = {
        "distilbert-base-cased": DistilBertConfig(vocab_size=28996),
        "distilgpt2": GPT2Config(n_layer=6),
        "gpt2": GPT2Config(),
    }
    spec = recipes.check(name)
    auto = AutoModelForCausalLM if spec.model.task == "causal-lm" else AutoModelForSequenceClassification
    with torch.device("meta"):
        model = auto.from_config(configs[spec.model.name])
    freeze(model, spec.model.freeze)
    entry = registry.find(spec.optim.name)
    infos = parameter_infos(model)
    state = predict_state(entry, infos, registry.resolve_hyper(entry, spec.optim))
    weights = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    gradients = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
    assert recipes.read_header(recipes.find_recipe(name)).memory_bytes == {
        "weights": weights,
        "gradients": gradients,
        "optimizer_state": state.state_bytes,
        "total": weights + gradients + state.state_bytes,
    }


def test_the_demonstration_recipe_is_the_demonstration_and_states_its_bytes() -> None:
    from effcli import pipeline
    from effcli.report.progress import QuietProgress

    spec = pipeline.resolve_spec({}, recipe="builtin/demo")
    assert spec == pipeline.resolve_spec({"optim": {"name": "adam8bit"}, "loop": {"accum": 2}})
    assert spec.uses_builtin_demo
    record = pipeline.plan(spec, progress=QuietProgress())
    assert recipes.read_header(recipes.find_recipe("builtin/demo")).memory_bytes == {
        "weights": record.model.weights_bytes,
        "gradients": record.model.gradients_bytes,
        "optimizer_state": record.optimizer.state_bytes,
        "total": record.optimizer.total_before_activations_bytes,
    }


def test_the_known_sizes_of_distilbert_stand_in_the_headers() -> None:
    state = {info.name: info.memory_bytes.get("optimizer_state") for info in recipes.list_recipes()}
    assert state["distilbert/adamw"] == 526_264_752
    assert state["distilbert/adafactor"] == 714_432
    assert state["distilbert/adam8bit"] == state["distilbert/adam8bit_accum"] == 134_004_336
    assert state["distilbert/adam8bit_embed32"] == 269_269_008


# The commands


def test_list_shows_every_name_and_one_json_document() -> None:
    result = CliRunner().invoke(app, ["list"])
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert [line.split()[0] for line in lines if not line.startswith(" ")] == NAMES
    assert max(map(len, lines)) <= 80
    document = json.loads(CliRunner().invoke(app, ["list", "--json"]).stdout)
    assert [row["name"] for row in document["recipes"]] == NAMES


def test_show_prints_the_file_as_it_is() -> None:
    result = CliRunner().invoke(app, ["show", "gpt2/memory_tight"])
    assert result.stdout == recipes.find_recipe("gpt2/memory_tight").read_text()


def test_copy_and_check_work_on_a_folder_with_brackets(tmp_path: Path) -> None:
    folder = tmp_path / "[v2]"
    folder.mkdir()
    result = CliRunner().invoke(app, ["copy", "distilbert/adamw", str(folder)])
    assert result.stdout == f"{folder / 'adamw.yaml'}\n"
    checked = CliRunner().invoke(app, ["check", str(folder / "adamw.yaml"), "gpt2/memory_tight"])
    assert checked.stdout == f"{folder / 'adamw.yaml'}: ok\ngpt2/memory_tight: ok\n"


def test_check_tells_the_faults_of_all_recipes_at_once(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / f"{name}.yaml").write_text("loop: {accum: 0}")
    result = CliRunner().invoke(app, ["check", str(tmp_path / "one.yaml"), str(tmp_path / "two.yaml")])
    assert isinstance(result.exception, UsageError)
    assert "one.yaml" in str(result.exception)
    assert "two.yaml" in str(result.exception)
