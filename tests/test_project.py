"""The project around the code: start-up, versions, house rules."""

from __future__ import annotations

import ast
import importlib.metadata
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

TOP = Path(__file__).parent.parent
SOURCES = sorted((TOP / "effcli").rglob("*.py"))
PROJECT = tomllib.loads((TOP / "pyproject.toml").read_text())["project"]
HEAVY = {"accelerate", "bitsandbytes", "datasets", "numpy", "pydantic", "sklearn", "torch", "transformers"}


def loaded_by(*arguments: str) -> set[str]:
    """Return the packages that a Python command has loaded when it ends."""
    report = (
        "import atexit, runpy, sys;"
        "atexit.register(lambda: print('\\nLOADED', *{name.partition('.')[0] for name in sys.modules}));"
        "sys.argv = ['effcli', *sys.argv[1:]];"
        "runpy.run_module('effcli', run_name='__main__')"
    )
    done = subprocess.run(
        [sys.executable, "-c", report, *arguments], capture_output=True, text=True, timeout=60, cwd=TOP
    )
    assert done.returncode == 0, done.stderr
    return set(done.stdout.rsplit("LOADED", 1)[1].split())


def imports_of(path: Path) -> set[str]:
    """Return the top packages that a file imports anywhere, those for type checking included."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
    return {name.partition(".")[0] for name in names}


@pytest.mark.parametrize("argument", ["--help", "--version"])
def test_help_and_version_wait_for_no_heavy_package(argument: str) -> None:
    loaded = loaded_by(argument)
    assert "typer" in loaded
    assert sorted(loaded & HEAVY) == []


@pytest.mark.parametrize(
    "arguments",
    [
        ("train", "--help"),
        ("compare", "--help"),
        ("recipes", "list"),
        ("recipes", "check"),
        ("optimizers",),
        ("optimizers", "adam8bit"),
    ],
)
def test_a_command_that_trains_nothing_loads_no_torch(arguments: tuple[str, ...]) -> None:
    assert sorted(loaded_by(*arguments) & HEAVY) == ["pydantic"]  # typer 0.29 parses the flags of a command with it


def test_importing_the_package_loads_no_torch() -> None:
    code = "import sys, effcli, effcli.optim.registry, effcli.memory.state, effcli.measure.record; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=TOP, check=True)
    assert sorted(set(done.stdout.split()) & HEAVY) == ["pydantic"]


def test_exact_versions_lie_in_the_ranges() -> None:
    pins = {}
    for line in (TOP / "constraints.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            name, version = line.split("==")
            assert "+" not in version, f"{line}: a local build is found nowhere else"
            pins[canonicalize_name(name)] = version
    assert pins["torch"] == "2.13.0"
    extras = PROJECT["optional-dependencies"]
    installed = {name for text in extras["dev"] for name in Requirement(text).extras} | {"dev"}
    wants = [text for name in installed & set(extras) for text in extras[name]]
    for wanted in map(Requirement, [*PROJECT["dependencies"], *wants]):
        if wanted.name == PROJECT["name"]:
            assert wanted.extras < set(extras)
            continue
        assert wanted.specifier.contains(pins[canonicalize_name(wanted.name)]), wanted


def test_every_imported_package_is_a_declared_dependency() -> None:
    declared = [Requirement(text).name for text in PROJECT["dependencies"]]
    declared += [Requirement(text).name for name, extra in PROJECT["optional-dependencies"].items() for text in extra]
    allowed = {canonicalize_name(name) for name in declared}
    provided = importlib.metadata.packages_distributions()
    for path in SOURCES:
        for name in imports_of(path) - set(sys.stdlib_module_names) - {"effcli"}:
            origins = {canonicalize_name(origin) for origin in provided.get(name, [name])}
            assert origins & allowed, f"{path.relative_to(TOP)} imports {name}, which pyproject.toml does not name"


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(TOP)))
def test_a_source_file_keeps_the_house_rules(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= 300
    assert path.name != "utils.py"
    assert "click" not in imports_of(path), "typer carries a private click: use typer"


def test_the_help_says_where_the_optimizers_are_listed_and_names_the_true_defaults() -> None:
    from effcli.cli import options
    from effcli.optim.hyper import DEFAULT_MIN_8BIT_SIZE
    from effcli.spec import RunSpec

    help_of = {
        name: value.__metadata__[0].help for name, value in vars(options).items() if hasattr(value, "__metadata__")
    }
    assert "effcli optimizers" in help_of["Optim"]
    spec = RunSpec()
    for option, default in {
        "Optim": spec.optim.name, "WeightDecay": spec.optim.weight_decay, "Min8bitSize": DEFAULT_MIN_8BIT_SIZE,
        "Engine": spec.loop.engine, "Device": spec.loop.device, "Precision": spec.loop.precision,
        "BatchSize": spec.loop.batch_size, "Accum": spec.loop.accum, "Epochs": spec.loop.epochs,
        "Scheduler": spec.loop.scheduler, "WarmupRatio": f"{spec.loop.warmup_ratio:g}", "Seed": spec.loop.seed,
        "MaxGradNorm": f"{spec.loop.max_grad_norm:g}", "NumWorkers": spec.loop.num_workers, "Keep": spec.output.keep,
        "LoggingSteps": spec.output.logging_steps, "Encoding": spec.data.encoding,
    }.items():  # fmt: skip
        assert f"Default: {default}." in help_of[option], option


def make(*arguments: str) -> list[str]:
    """Return the lines that make prints, run as if not from another make, which hands its settings down."""
    environment = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL", "ARGS")}
    done = subprocess.run(["make", *arguments], capture_output=True, text=True, cwd=TOP, check=True, env=environment)
    return done.stdout.splitlines()


def test_every_target_of_the_makefile_has_a_help_line() -> None:
    phony = re.search(r"^\.PHONY: (.*)$", (TOP / "Makefile").read_text(), re.MULTILINE)
    assert phony
    shown = [line.split() for line in make("help")]
    assert {words[1] for words in shown} == set(phony[1].split())
    assert {"help", "run", "test", "test-slow", "check", "bench", "clean"} <= {words[1] for words in shown}
    assert all(len(words) > 3 for words in shown)


def test_the_set_up_of_the_run_needs_no_tools_of_development() -> None:
    planned = make("-n", "-B", "run")
    assert planned[-1].strip() == ".venv/bin/effcli train --optim adam8bit --accum 2"
    assert not any("[dev]" in line for line in planned)
