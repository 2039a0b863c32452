"""`--overwrite` replaces a run and nothing else: no foreign folder, and nothing that the new run reads."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from effcli.files import DRAFT
from tests.commands import TINY_DISTILBERT, csv_file, effcli, model_folder

pytestmark = pytest.mark.usefixtures("without_plan")


def contents(folder: Path) -> dict[Path, bytes | None]:
    """Return every path below a folder with its bytes, none for a folder."""
    return {path: path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


@pytest.fixture
def run(distilbert: Path, data: Path, tmp_path: Path) -> Path:
    """Return the folder of a complete run."""
    out = tmp_path / "runs" / "a"
    done = effcli("train", distilbert, "--data", data, "--max-steps", 1, "--out", out)
    assert done.code == 0, done.stderr
    return out


def test_a_run_is_replaced_only_when_asked_and_other_files_beside_it_stay(
    run: Path, distilbert: Path, data: Path
) -> None:
    (run / "mine.txt").write_text("keep")
    (run / "checkpoints" / "old").mkdir()
    before = contents(run)
    common = ("train", distilbert, "--data", data, "--max-steps", 1, "--seed", 7, "--out", run)
    done = effcli(*common)
    assert done.code == 2
    assert "--overwrite" in done.error
    assert "--resume" in done.error
    assert contents(run) == before
    assert effcli(*common, "--overwrite").code == 0
    assert json.loads((run / "record.json").read_text())["spec"]["loop"]["seed"] == 7
    assert not (run / "checkpoints" / "old").exists()
    assert (run / "mine.txt").read_text() == "keep"


def test_a_failed_run_with_overwrite_leaves_the_earlier_one(run: Path, distilbert: Path, tmp_path: Path) -> None:
    before = contents(run)
    assert effcli("train", distilbert, "--data", tmp_path / "none.csv", "--out", run, "--overwrite").code == 2
    assert contents(run) == before


@pytest.mark.parametrize("gone", [("record.json", "model"), ("recipe.yaml", "model")])
def test_a_run_that_was_cut_short_is_replaced(gone: tuple[str, ...], run: Path, distilbert: Path, data: Path) -> None:
    for name in gone:
        shutil.rmtree(run / name) if (run / name).is_dir() else (run / name).unlink()
    done = effcli("train", distilbert, "--data", data, "--max-steps", 1, "--out", run, "--overwrite")
    assert done.code == 0, done.stderr


@pytest.mark.parametrize("held", [None, [], [f"{DRAFT}recipe.yaml"]], ids=["absent", "empty", "draft"])
@pytest.mark.parametrize("flags", [(), ("--overwrite",)])
def test_a_folder_that_holds_nothing_yet_takes_a_run(
    flags: tuple[str, ...], held: list[str] | None, distilbert: Path, data: Path, tmp_path: Path
) -> None:
    out = tmp_path / "o"
    if held is not None:
        out.mkdir()
        for name in held:
            (out / name).write_text("half")
    done = effcli("train", distilbert, "--data", data, "--max-steps", 1, "--out", out, *flags)
    assert done.code == 0, done.stderr


@pytest.mark.parametrize("flags", [(), ("--overwrite",)], ids=["plain", "overwrite"])
@pytest.mark.parametrize(
    ("files", "named"),
    [
        (["model/weights.bin", "checkpoints/1/weights.bin"], "checkpoints, model"),
        (["config.json", "model.safetensors"], "config.json, model.safetensors"),
        (["config.json", "recipe.yaml"], "config.json, recipe.yaml"),
        (["record.json"], "record.json"),
        (["a", "b", "c", "d", "model/x"], "a, b, c and 2 more"),
    ],
)
def test_a_folder_that_never_held_a_run_is_left_alone(
    files: list[str], named: str, flags: tuple[str, ...], distilbert: Path, data: Path, tmp_path: Path
) -> None:
    out = tmp_path / "mine"
    for name in files:
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_text("{}")
    before = contents(out)
    done = effcli("train", distilbert, "--data", data, "--max-steps", 1, "--out", out, *flags)
    assert done.code == 2
    assert all(word in done.error for word in (f"'{out}'", named, f"--out {out / 'run'}")), done.error
    assert "--overwrite" not in done.error
    assert contents(out) == before


def test_a_model_folder_is_not_overwritten_by_the_run_that_trains_it(data: Path, tmp_path: Path) -> None:
    model = model_folder(tmp_path / "m", TINY_DISTILBERT)
    before = contents(model)
    done = effcli("train", model, "--data", data, "--max-steps", 1, "--out", model, "--overwrite")
    assert done.code == 2
    assert "config.json" in done.error
    assert contents(model) == before


@pytest.mark.parametrize("flags", [(), ("--lora-r", 2)], ids=["whole", "lora"])
@pytest.mark.parametrize("place", ["direct", "linked model", "linked out"])
def test_the_model_of_the_run_that_would_be_overwritten_is_not_lost(
    place: str, flags: tuple[object, ...], run: Path, data: Path, tmp_path: Path
) -> None:
    link = tmp_path / "link"
    link.symlink_to(run if place == "linked out" else run / "model")
    model = link if place == "linked model" else run / "model"
    out = link if place == "linked out" else run
    before = contents(run)
    done = effcli("train", model, "--data", data, "--max-steps", 1, *flags, "--out", out, "--overwrite")
    assert done.code == 2
    assert all(word in done.error for word in (f"--model '{model}'", f"--out '{out}'")), done.error
    assert contents(run) == before


@pytest.mark.parametrize("flag", ["--data", "--eval-data"])
def test_data_inside_the_run_that_would_be_overwritten_is_not_lost(
    flag: str, run: Path, distilbert: Path, data: Path
) -> None:
    inside = csv_file(run / "model" / "rows.csv")
    before = contents(run)
    given = {"--data": data, flag: inside}
    arguments = [part for pair in given.items() for part in pair]
    done = effcli("train", distilbert, *arguments, "--max-steps", 1, "--out", run, "--overwrite")
    assert done.code == 2
    assert all(word in done.error for word in (f"{flag} '{inside}'", f"--out '{run}'")), done.error
    assert contents(run) == before


def test_the_model_of_another_run_may_be_trained_into_a_run_that_is_overwritten(run: Path, data: Path) -> None:
    other = run.with_name("ab")
    shutil.copytree(run, other)
    done = effcli("train", other / "model", "--data", data, "--max-steps", 1, "--out", run, "--overwrite")
    assert done.code == 0, done.stderr
