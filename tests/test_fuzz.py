"""Whatever is written into specifications, recipes and arguments: an error of ours, in one line, or none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import strategies as st

from effcli import recipes
from effcli.estimate_spec import build_estimate_spec
from effcli.flags import ESTIMATE_FLAG_OF, FLAG_OF, SEARCH_FLAG_OF, nest
from effcli.pipeline.resolve import resolve_spec
from effcli.search_spec import build_search_spec
from effcli.spec import build_spec
from effcli.yaml_text import dump, parse
from tests.commands import TINY_DISTILBERT, csv_file, effcli, model_folder
from tests.fuzzing import changed_bytes, check_line, fuzz, mutated, thorough

# Specifications

FIELDS = sorted({**FLAG_OF, **ESTIMATE_FLAG_OF, **SEARCH_FLAG_OF})
ODD_TEXTS = ["", " ", "nan", "-inf", "1e400", "1e-4", "0", "-1", "9" * 30, "9" * 5000, "null", "true", "no", "[", "{}",
    "a,b", "*", "[x", "\ud800", "\x00", "\x1b[31m", "é" * 99, "../..", "./x", "hf_x", "cuda:99", "auto", "sgd",
    "adam8bit", "torch.optim:Adam", "os:system", "a:b", ":", "x=y", "embed:lr=1", "16GiB", "0B", "1e9XB"]  # fmt: skip
SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=12), st.sampled_from(ODD_TEXTS),
    st.binary(max_size=4), st.dates(), st.integers(min_value=10**18, max_value=10**40),
)  # fmt: skip
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.one_of(st.text(max_size=6), st.integers()), inner, max_size=3)
    ),
    max_leaves=8,
)
SECTIONS = st.one_of(
    st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=4).map(nest),
    st.dictionaries(st.sampled_from(["model", "data", "optim", "loop", "output", "x"]), VALUES, max_size=3),
)


@thorough
@pytest.mark.parametrize("build", [build_spec, build_estimate_spec, build_search_spec, resolve_spec])
def test_any_values_make_a_specification_or_an_error(build: Callable[[Any], object], factor: int) -> None:
    fuzz(SECTIONS, build, examples=30 * factor)


@thorough
def test_any_text_after_set_makes_a_specification_or_an_error(factor: int) -> None:
    written = st.tuples(st.sampled_from(FIELDS), st.one_of(st.sampled_from(ODD_TEXTS), st.text(max_size=20)))
    text = st.one_of(st.text(max_size=20), written.map("=".join), written.map(lambda pair: ".x=".join(pair)))
    fuzz(text, lambda value: resolve_spec({}, sets=[value]), examples=80 * factor)


# Recipes

GOOD_RECIPES = [recipes.recipe_text(info.name) for info in recipes.list_recipes()[:3]] + [
    dump(build_spec({"optim": {"args": {"a": 1}, "overrides": {"x": {"lr": 0.1}}}}).model_dump(mode="json"))
]
YAML_PIECES = [
    "\n", "  ", ": ", "- ", "#", "'", '"', "|", ">", "&a ", "*a", "!!str ", "!", "%", "@", "`", "{", "}", "[", "]", ",",
    "?", "---\n", "...\n", "\t", "\x00", "\x85", "\ufeff", "loop:", "accum: 2", "optim", "~", "<<: ",
]  # fmt: skip


@thorough
def test_any_recipe_makes_a_specification_or_an_error(factor: int) -> None:
    written = st.one_of(
        st.text(max_size=40),
        st.lists(st.sampled_from(YAML_PIECES), max_size=12).map("".join),
        SECTIONS.map(lambda values: yaml.dump(values, allow_unicode=True)),
        mutated(GOOD_RECIPES, YAML_PIECES),
    )
    fuzz(written, lambda text: build_spec(parse(text, "mine.yaml")), examples=60 * factor)


@thorough
def test_any_bytes_of_a_recipe_file_make_a_specification_or_an_error(factor: int, tmp_path: Path) -> None:
    def read(content: bytes) -> None:
        (tmp_path / "r.yaml").write_bytes(content)
        recipes.check(str(tmp_path / "r.yaml"))

    good = [text.encode() for text in GOOD_RECIPES]
    fuzz(st.one_of(st.binary(max_size=40), changed_bytes(good)), read, examples=30 * factor)


# Arguments

FLAGS = sorted({*FLAG_OF.values(), *ESTIMATE_FLAG_OF.values(), *SEARCH_FLAG_OF.values()})
ARGUMENTS = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(FLAGS), st.one_of(st.sampled_from(ODD_TEXTS), st.text(max_size=8))).map(list),
        st.sampled_from(FLAGS).map(lambda flag: [flag]),
        st.sampled_from(
            [["--json"], ["--quiet"], ["--set", "x"], ["--recipe", "x"], ["--resume"], ["--", "-x"], ["-"]]
        ),
    ),
    max_size=3,
).map(lambda parts: [part.replace("\x00", "0") for pair in parts for part in pair])


@thorough
@pytest.mark.parametrize("command", ["train", "estimate", "plan"])
def test_any_arguments_end_in_a_result_or_one_line(
    command: str, factor: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # where files that some arguments ask for are written
    model = model_folder(tmp_path / "encoder", TINY_DISTILBERT)
    first = {
        "train": ("train", "--dry-run", "--data", csv_file(tmp_path / "d.csv"), "--model", model),
        "estimate": ("estimate", "distilbert-base-cased"),
        "plan": ("plan", "--gpu", "none"),
    }[command]

    def call(arguments: list[str]) -> None:
        done = effcli(*first, *arguments)
        assert done.code in (0, 2, 3, 4, 6, 8), done.stderr
        if done.code:
            check_line(done.stderr)
        assert "\x1b" not in done.stdout + done.stderr

    fuzz(ARGUMENTS, call, examples={"train": 4, "estimate": 12, "plan": 12}[command] * factor)
