"""Tokens and passwords are in no line, traceback or record; recipes and folders can do no harm."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from effcli import recipes
from effcli.cli.app import app
from effcli.cli.boundary import run_guarded
from effcli.errors import UnreachableError, UsageError
from effcli.masking import masked
from tests.commands import effcli

LEAKS = """
import os
import torch

class Leaks(torch.optim.SGD):
    def __init__(self, params, lr=0.1):
        super().__init__(params, lr=lr)
        self.steps = 0

    def step(self, closure=None):
        self.steps += 1
        if self.steps > 3:  # the first steps are on stand-ins, before the run
            raise RuntimeError("no answer with " + os.environ["HF_TOKEN"])
        return super().step(closure)
"""
TOKEN = "hf_abcdefghijklmnopqrstuvwxyzABCDEFGH"


@pytest.mark.parametrize("flags", [(), ("--verbose",)])
def test_a_folder_that_is_not_there_is_one_line_without_the_token(flags: tuple[str, ...]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "effcli", "estimate", "./no/such/dir", *flags],
        capture_output=True, text=True, timeout=200, env={**os.environ, "HF_TOKEN": "hf_fake"}, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("effcli: error: ")
    assert "./no/such/dir" in done.stderr
    assert "hf_fake" not in done.stdout + done.stderr


@pytest.mark.parametrize("verbose", [False, True])
def test_a_secret_in_an_exception_is_masked_in_line_and_traceback(
    verbose: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_fake")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wJalrXUtnFEMI/K7MDENG")

    def fails() -> None:
        held = os.environ["AWS_SECRET_ACCESS_KEY"]
        try:
            raise OSError(f"GET https://user:pass-word@host/x with {held}")
        except OSError as error:
            raise UnreachableError(f"Bearer hf_fake was refused by https://{TOKEN}@hub") from error

    assert run_guarded(fails, verbose=verbose) == 8
    said = capsys.readouterr().err
    assert ("Traceback" in said) is verbose
    for secret in ("hf_fake", "wJalrXUtnFEMI", "pass-word", TOKEN):
        assert secret not in said
    assert "Bearer *** was refused by https://***@hub" in said


@pytest.mark.parametrize("verbose", [False, True])
def test_a_secret_in_a_bug_of_ours_is_masked(
    verbose: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MY_API_KEY", "0123456789")
    assert run_guarded(lambda: {}[os.environ["MY_API_KEY"]], verbose=verbose) == 1
    said = capsys.readouterr().err
    assert "KeyError: '***'" in said
    assert "0123456789" not in said


@pytest.mark.parametrize("flag", ["--model", "--data", "--eval-data", "--recipe", "--set", "--optim", "--out"])
def test_a_password_in_an_argument_is_masked(flag: str, distilbert: Path, data: Path, tmp_path: Path) -> None:
    given = {"--model": distilbert, "--data": data, "--out": tmp_path / "o", flag: "https://user:pass-word@host/x.csv"}
    arguments = [part for pair in given.items() for part in pair]
    if flag == "--out":  # a folder may be called so: another argument is wrong
        arguments += ["--engine", "https://user:pass-word@host"]
    failed = effcli("train", *arguments)
    assert failed.code in (2, 8)
    assert "pass-word" not in failed.stdout + failed.stderr
    assert "https://***@host" in failed.error


@pytest.mark.parametrize(
    ("address", "shown"),
    [
        ("https://user:p@ss@host.invalid/f.csv", "https://***@host.invalid/f.csv"),
        ("https:/user:p@s@s@host.invalid/f.csv", "https:/***@host.invalid/f.csv"),
        ("https://host.invalid/a@b/f.csv?sig=SECRET&key=a/b@c#d", "https://host.invalid/a@b/f.csv?***#d"),
        ("https://us:pa@host.invalid/f.csv?sig=SECRET", "https://***@host.invalid/f.csv?***"),
        ("https://host.invalid?sig=SEC@RET", "https://***"),
        ("https://user:p?s@s@host.invalid/f.csv", "https://***"),
        ("is it https://host.invalid/f.csv? yes", "is it https://host.invalid/f.csv? yes"),
    ],
)
def test_user_password_and_query_of_an_address_are_masked_whole(address: str, shown: str) -> None:
    assert masked(f"'{address}' is an address") == f"'{shown}' is an address"


def test_an_unknown_flag_shows_no_token() -> None:
    assert TOKEN not in effcli("train", f"--token={TOKEN}").error


@pytest.mark.usefixtures("without_plan")
def test_a_failed_run_keeps_no_secret(
    distilbert: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "leaking_optimizers.py").write_text(LEAKS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("HF_TOKEN", "secret-of-mine")
    out = tmp_path / "o"
    flags = ("--batch-size", 2, "--max-steps", 6, "--out", out)
    failed = effcli("train", distilbert, "--data", data, "--optim", "leaking_optimizers:Leaks", *flags)
    assert failed.code == 7
    assert "no answer with ***" in failed.error
    assert "no answer with ***" in json.loads((out / "record.json").read_text())["failure"]
    written = [path for path in out.rglob("*") if path.is_file()]
    assert all(b"secret-of-mine" not in path.read_bytes() for path in written)


@pytest.mark.usefixtures("without_plan")
def test_nothing_that_a_run_writes_holds_the_environment(
    distilbert: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret-of-mine")
    out = tmp_path / "o"
    done = effcli("train", distilbert, "--data", data, "--max-steps", 1, "--out", out, "--json")
    assert done.code == 0
    assert "secret-of-mine" not in done.stdout + done.stderr
    written = [path for path in out.rglob("*") if path.is_file()]
    assert len(written) > 5
    assert all(b"secret-of-mine" not in path.read_bytes() for path in written)


@pytest.mark.parametrize(
    "text",
    ["hf_transfer", "https://host/x@y", "TOKENIZERS_PARALLELISM=false", "person@example.com", "hf_hub_download", "1"],
)
def test_what_is_no_secret_stays(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "parallel")
    monkeypatch.setenv("SOME_KEY", "1")
    assert masked(text + " parallel") == text + " parallel"


def test_locals_are_in_no_traceback_of_the_command_line() -> None:
    assert app.pretty_exceptions_enable is False
    assert app.pretty_exceptions_show_locals is False


# Recipes and folders

BOMB = "optim:\n  args:\n    a: &a [x, x]\n" + "".join(
    f"    {name}: &{name} [*{below}, *{below}]\n" for below, name in pairwise("abcdefghijklmnopqrst")
)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("model: {name: !!python/object/apply:os.system x}", ["line 1", "tag"]),
        ("loop: !!python/object:effcli.spec.LoopSpec {accum: 2}", ["line 1", "tag"]),
        ("loop: !mine {accum: 2}", ["line 1", "'!mine' is a tag"]),
        (BOMB, ["line 3", "'&a' is an anchor"]),
        ("loop: &a\n  accum: *a\n", ["line 1", "anchor"]),
        ("loop: {accum: *a}", ["line 1", "'*a' is an anchor"]),
        ("loop: " + "[" * 1500, ["nested too deeply"]),
        ("loop: " + "[" * 60 + "]" * 60, ["loop"]),
        ("? [a, b]\n: c", ["line 1", "key"]),
        ("--- {}\n--- {}\n", ["mine.yaml"]),
        ("loop: {accum: " + "9" * 5000 + "}", ["--accum"]),
    ],
)
def test_a_recipe_of_someone_else_is_refused_in_one_line(text: str, words: list[str], tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(UsageError) as caught:
        recipes.read_recipe(str(path))
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 500
    assert all(word in message for word in words), message


@pytest.mark.parametrize("name", ["../pyproject.toml", "../../etc/passwd", "/etc/passwd", "..", "", "."])
def test_a_recipe_name_reaches_no_other_file(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(recipes.recipe_folder())
    failed = effcli("train", "--recipe", name)
    assert failed.code == 2
    assert "root:" not in failed.error


@pytest.mark.parametrize("inside", ["", "run", "../encoder"])
def test_a_run_into_the_folder_of_its_model_leaves_the_model_alone(inside: str, distilbert: Path, data: Path) -> None:
    before = (distilbert / "config.json").read_bytes()
    done = effcli("train", distilbert, "--data", data, "--max-steps", 1, "--out", distilbert / inside, "--overwrite")
    assert done.code == (0 if inside == "run" else 2)
    assert (distilbert / "config.json").read_bytes() == before


def test_a_link_as_output_folder_reaches_no_model(distilbert: Path, data: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(distilbert)
    failed = effcli("train", distilbert, "--data", data, "--out", tmp_path / "link", "--overwrite")
    assert failed.code == 2
    assert sorted(path.name for path in distilbert.iterdir()) == ["config.json"]


# Brackets, which rich reads as markup


def test_brackets_in_paths_and_labels_survive_and_a_log_has_no_control_characters(
    distilbert: Path, tmp_path: Path
) -> None:
    data, out = tmp_path / "[d].csv", tmp_path / "runs" / "[v2]" / "[" / "some]"
    data.write_text("sentence,label\n" + "one two,[unused1]\nthree four,[/some/x]\n" * 6)
    done = effcli("train", distilbert, "--data", data, "--eval-data", data, "--max-steps", 2, "--out", out)
    assert done.code == 0, done.stderr
    both = done.stdout + done.stderr
    assert "\x1b" not in both
    assert "\r" not in both
    assert "[unused1]" in both
    assert "[/some/x]" in both
    assert "[v2]" in "".join(done.stdout.split())  # a long path is wrapped
    assert json.loads((out / "record.json").read_text())["environment"]["out"] == str(out)


def test_an_error_keeps_brackets(distilbert: Path) -> None:
    assert "runs/[v2]/[/some]" in effcli("train", distilbert, "--data", "runs/[v2]/[/some]").error
