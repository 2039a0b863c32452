"""`effcli compare` around its runs: what is asked of each, how they end, the folder, and going on."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from effcli import pipeline
from effcli.engines.base import Progress
from effcli.errors import DeviceError
from effcli.measure.record import RunRecord
from effcli.run_lock import LOCK
from effcli.spec import RunSpec
from tests import comparisons
from tests.commands import Result, effcli
from tests.fake_runs import attempts, fake_processes, fake_runs, saved

THREE = ("adamw", "adafactor", "adam8bit")
_HOLDER = """
import fcntl, sys
file = open(sys.argv[1], "w")
fcntl.lockf(file, fcntl.LOCK_EX)
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "c"


def compare(*arguments: object) -> Result:
    return effcli("compare", *arguments)


def specs(*optimizers: str, **flags: dict[str, object]) -> list[dict[str, object]]:
    """Return what is asked of the optimizer of each run, of its fields that were set."""
    comparison = pipeline.resolve_comparison(optimizers, flags)
    return [run.spec.optim.model_dump(exclude_unset=True) for run in comparison.runs]


def test_three_optimizers_are_compared_by_default_in_one_document(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_processes(monkeypatch)
    done = compare("--out", out, "--json")
    document = done.record
    assert attempts(document) == [(name, "completed", 0) for name in THREE]
    assert document["status"] == "completed"
    assert [line["name"] for line in document["summary"]] == list(THREE)
    assert document == saved(out)
    assert {path.name for path in out.iterdir()} == {*THREE, "comparison.json", "compare.html"}
    assert done.stderr.count("A sentence of every run.") == 1
    assert done.stderr.count("Run 2 of 3: adafactor, seed 42.") == 1


def test_every_run_profiles_memory_and_leaves_its_checkpoints_only_where_they_are_asked_for(
    out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_runs(monkeypatch)
    document = compare("adamw", "--out", out, "--json").record
    assert document["runs"][0]["spec"]["loop"]["profile_memory"] is True
    assert document["runs"][0]["spec"]["output"]["keep"] == 1
    assert not (out / "adamw" / "checkpoints").exists()
    document = compare("adamw", "--out", out, "--keep", 3, "--overwrite", "--json").record
    assert document["runs"][0]["spec"]["output"]["keep"] == 3
    assert len(list((out / "adamw" / "checkpoints").iterdir())) == 4


def test_a_run_that_fails_leaves_the_rows_of_the_others_and_resume_makes_it_alone(
    out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_runs(monkeypatch, {"adafactor": "fail"})
    done = compare("--out", out, "--json")
    assert done.code == 7
    assert done.error == (
        "2 of 3 runs are complete; adafactor: update 2: the loss is nan; "
        f"to complete them: effcli compare --resume --out {out}"
    )
    document = json.loads(done.stdout)
    assert document["status"] == "failed"
    assert attempts(document) == [("adamw", "completed", 0), ("adafactor", "failed", 7), ("adam8bit", "completed", 0)]
    assert [line["failure"] for line in document["summary"]] == [None, "update 2: the loss is nan", None]

    (out / "adamw" / "mark").touch()
    fake_runs(monkeypatch)
    again = compare("--resume", "--out", out, "--json")
    assert attempts(again.record) == [(name, "completed", 0) for name in THREE]
    assert [line for line in again.stderr.splitlines() if line.startswith("Run ")] == [
        "Run 2 of 3: adafactor, seed 42."
    ]
    assert (out / "adamw" / "mark").exists()


def test_what_ended_a_run_stays_said_until_it_is_made_again(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_runs(monkeypatch, {"adamw": "refuse", "adafactor": "fail", "adam8bit": "refuse"})
    assert compare("--out", out).code == 2
    before = saved(out)
    fake_runs(monkeypatch, {"adamw": "out of memory", "adafactor": "fail", "adam8bit": "refuse"})
    assert compare("--resume", "--out", out).code == 5
    after = saved(out)
    assert attempts(after) == [("adamw", "failed", 5), ("adafactor", "failed", 7), ("adam8bit", "failed", 2)]
    assert after["runs"] == before["runs"]
    assert after["attempts"][0]["failure"] != before["attempts"][0]["failure"] == "nothing to train on"
    assert after["attempts"][2]["failure"] == "nothing to train on"
    fake_runs(monkeypatch)
    assert compare("--resume", "--out", out).code == 0


@pytest.mark.parametrize(
    ("way", "code", "words"),
    [
        ("die", 5, "killed by signal 9 (SIGKILL), often because the machine ran out of memory"),
        ("fault", 1, "unexpected fault, KeyError: 'no such thing' (a bug of effcli; --verbose shows where)"),
        ("refuse", 2, "nothing to train on"),
    ],
)
def test_whatever_ends_a_run_is_one_sentence_and_a_code(
    way: str, code: int, words: str, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_processes(monkeypatch, {"adam8bit": way})
    monkeypatch.setattr("effcli.report.exports.unasked_page", lambda path, quiet: None)
    done = compare("adam8bit", "--out", out)
    assert done.code == code
    assert words in done.error
    assert attempts(saved(out)) == [("adam8bit", "failed", code)]


def test_what_two_optimizers_are_refused_for_is_not_tried_with_a_third(
    out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_runs(monkeypatch, dict.fromkeys(THREE, "refuse"))
    done = compare("--out", out)
    assert done.code == 2
    assert done.error.startswith("0 of 3 runs are complete; adamw: nothing to train on;")
    assert attempts(saved(out)) == [("adamw", "failed", 2), ("adafactor", "failed", 2), ("adam8bit", "missing", 1)]


def test_what_memory_ran_out_for_twice_is_tried_with_a_third(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_runs(monkeypatch, {"adamw": "out of memory", "adam8bit": "out of memory"})
    assert compare("adamw", "adam8bit", "adafactor", "--out", out).code == 5
    assert attempts(saved(out)) == [("adamw", "failed", 5), ("adam8bit", "failed", 5), ("adafactor", "completed", 0)]


def test_seeds_share_a_name_and_make_a_mean(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_runs(monkeypatch)
    document = compare("adamw", "adam8bit", "--seeds", 2, "--seed", 7, "--out", out, "--json").record
    assert [(attempt["name"], attempt["seed"]) for attempt in document["attempts"]] == [
        ("adamw", 7), ("adam8bit", 7), ("adamw", 8), ("adam8bit", 8),
    ]  # fmt: skip
    assert [run["spec"]["loop"]["seed"] for run in document["runs"]] == [7, 7, 8, 8]
    assert {attempt["folder"] for attempt in document["attempts"]} == {
        f"{name}-seed-{seed}" for name in ("adamw", "adam8bit") for seed in (7, 8)
    }
    assert document["summary"][1]["seeds"] == [7, 8]
    assert document["summary"][1]["spread"]["seconds_per_update"]["deviation"] > 0


def test_the_same_optimizer_twice_is_two_columns(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_runs(monkeypatch)
    document = compare("adamw", "AdamW", "adamw,lr=1e-3", "--out", out, "--json").record
    assert [line["name"] for line in document["summary"]] == ["adamw", "adamw (2)", "adamw,lr=1e-3"]
    assert [attempt["folder"] for attempt in document["attempts"]] == ["adamw", "adamw-2", "adamw-lr=1e-3"]
    assert [run["spec"]["optim"].get("lr") for run in document["runs"]][2] == 1e-3


def test_an_optimizer_carries_settings_of_its_own_above_those_of_all() -> None:
    optim = {"lr": "1e-4", "eps": "1e-7", "args": {"momentum": "0.5"}}
    asked = specs(
        "adamw,weight-decay=0.1", "sgd,momentum=0.9,lr=0.1", "adam8bit,keep_32bit=a,keep_32bit=b", optim=optim
    )
    assert asked == [
        {"name": "adamw", "lr": 1e-4, "eps": 1e-7, "weight_decay": 0.1},
        {"name": "sgd", "lr": 0.1, "args": {"momentum": 0.9}},
        {"name": "adam8bit", "lr": 1e-4, "eps": 1e-7, "keep_32bit": ("a", "b")},
    ]


def test_a_setting_goes_to_those_that_have_it_and_the_others_are_named() -> None:
    flags = {"optim": {"args": {"momentum": "0.9"}}, "loop": {"scheduler": "cosine"}}
    comparison = pipeline.resolve_comparison(("adamw", "sgd", "schedulefree-adamw"), flags)
    assert comparison.notes == (
        "--optim-arg momentum=0.9 is not for adamw, schedulefree-adamw.",
        "--scheduler cosine is not for schedulefree-adamw.",
    )
    assert [run.spec.loop.scheduler for run in comparison.runs][:2] == ["cosine"] * 2
    assert "scheduler" not in comparison.runs[2].spec.loop.model_fields_set


def test_layers_lie_above_each_other_as_in_a_training_run(tmp_path: Path) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text(
        "model: {name: m}\ndata: {train: d}\noptim: {name: lion, lr: 1e-2, eps: null, keep_32bit: []}\n"
        "loop: {batch_size: 2, accum: 3}\n"
    )
    comparison = pipeline.resolve_comparison(
        ("adamw", "sgd,lr=3"), {"loop": {"accum": "5"}}, recipe=str(recipe), sets=["optim.lr=2", "loop.epochs=7"]
    )
    loops = {(run.spec.loop.batch_size, run.spec.loop.epochs, run.spec.loop.accum) for run in comparison.runs}
    assert loops == {(2, 7, 5)}
    assert [(run.spec.optim.name, run.spec.optim.lr) for run in comparison.runs] == [("adamw", 2), ("sgd", 3)]
    assert comparison.notes == ()
    assert specs("adamw", "sgd")[0]["lr"] == pipeline.resolve_spec({}).optim.lr  # the demonstration's
    assert "lr" not in specs("adamw", "sgd")[1]


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("adamm",), 2, "unknown optimizer 'adamm'. Did you mean 'adam'?"),
        (("adamw", "adamw,lrr=3"), 2, "optimizer 'adamw' takes no 'lrr'"),
        (("adamw,lr=x",), 2, "--lr (optim.lr): 'x' is not a number"),
        (("adamw,lr",), 2, "'lr' is no setting with a value of one optimizer; write KEY=VALUE, as in adamw,lr=1e-4"),
        (("adamw,lr=1,lr=2",), 2, "'lr' is given twice"),
        (("adamw,beta1=1.5",), 2, "--beta1 (optim.beta1): 1.5 is not below 1"),
        (("--batch-size", "0"), 2, "--batch-size"),
        (("--optim-arg", "momentum=1"), 2, "takes no 'momentum'"),
        (("--set", "optim.name=sgd"), 2, "name the optimizers as arguments"),
        (("--seed", 2**32 - 1, "--seeds", 2), 2, "--seed (loop.seed)"),
        (("--csv", "table.txt"), 2, "must end in .csv"),
        (("--resume",), 2, "--resume needs --out"),
        (("--seeds", 0), 2, "--seeds: 0 is not between 1 and 1000"),
        (("--seeds", 10**9), 2, "--seeds: 1000000000 is not between 1 and 1000"),
        (("--data", "none.csv"), 2, "no such file or folder: 'none.csv'"),
        (("--model", "./none"), 2, "there is no such folder"),
        (("no_such_package.optim:Adam",), 3, "pip install no_such_package"),
    ],
)
def test_what_can_be_refused_is_refused_before_the_first_run(
    arguments: tuple[object, ...], code: int, words: str, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("effcli.pipeline.comparing.runs.train_in_fresh_process", None)
    done = compare(*arguments, *(() if "--resume" in arguments else ("--out", out)))
    assert done.code == code
    assert words in done.error
    assert not out.exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("adamw", "adam8bit"), "pip install bitsandbytes"),
        (("adamw", "--track", "tensorboard"), "pip install 'effcli[tensorboard]'"),
    ],
)
def test_what_needs_a_missing_package_is_refused_before_the_first_run(
    arguments: tuple[object, ...], words: str, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("effcli.pipeline.comparing.runs.train_in_fresh_process", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    done = compare(*arguments, "--out", out)
    assert done.code == 3
    assert words in done.error
    assert not out.exists()


def test_a_comparison_that_left_nothing_is_replaced_unasked(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_runs(monkeypatch, dict.fromkeys(THREE, "refuse"))
    assert compare("--out", out).code == 2
    fake_runs(monkeypatch)
    assert compare("adamw", "--out", out).code == 0
    assert {path.name for path in out.iterdir()} == {"adamw", "comparison.json"}


@pytest.mark.parametrize(
    ("way", "goes_on", "failure"),
    [
        ("fail", False, "update 2: the loss is nan"),
        ("full", True, "could not write; 'update-1' is intact: make room"),
        ("die", True, "its process was killed by signal 9"),
    ],
)
def test_a_run_goes_on_from_its_checkpoint_unless_its_training_failed(
    way: str, goes_on: bool, failure: str, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (fake_processes if way == "die" else fake_runs)(monkeypatch, {"adamw": way})
    page = ("--html", out / "page.html") if way == "die" else ()
    compare("adamw", "--out", out, "--keep", 3, *page)
    (attempt,) = saved(out)["attempts"]
    assert attempt["failure"].startswith(failure)
    assert "--resume" not in attempt["failure"]
    mark = out / "adamw" / "checkpoints" / "update-1" / "mark"
    mark.touch()
    fake_runs(monkeypatch)
    assert compare("--resume", "--out", out, "--keep", 3).code == 0
    assert mark.exists() == goes_on


def test_files_that_cannot_be_written_do_not_hide_that_runs_failed(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_runs(monkeypatch, {"adam8bit": "fail"})
    (out.parent / "file").touch()
    done = compare("adamw", "adam8bit", "--out", out, "--csv", out.parent / "file" / "t.csv")
    assert done.code == 7
    assert "could not write" in done.error
    assert "1 of 2 runs are complete; adam8bit: update 2: the loss is nan" in done.error


def test_a_record_that_cannot_be_written_loses_no_run(
    half_done: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_runs(monkeypatch)
    out = shutil.copytree(half_done, tmp_path / "c")
    before = (out / "comparison.json").read_bytes()
    (out / ".writing-comparison.json").mkdir()
    done = compare("--resume", "--out", out)
    assert done.code == 9
    assert done.error.endswith(f"then type: effcli compare --resume --out {out}")
    assert (out / "comparison.json").read_bytes() == before


@pytest.mark.parametrize("flags", [("--resume",), ("adamw", "--overwrite"), ("adamw",)])
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda text: text[:100], "is cut off or no JSON"),
        (lambda text: text.replace('"schema_version": 1', '"schema_version": 2', 1), "is of schema version 2"),
        (lambda text: text.replace('"command": "compare"', '"command": "report"', 1), "no record of effcli compare"),
    ],
    ids=["damaged", "of another version", "of a report"],
)
def test_a_record_that_is_not_read_is_neither_gone_on_with_nor_replaced(
    change: Callable[[str], str], words: str, flags: tuple[str, ...], half_done: Path, tmp_path: Path
) -> None:
    out = shutil.copytree(half_done, tmp_path / "c")
    record = out / "comparison.json"
    record.write_text(change(record.read_text()))
    before = record.read_bytes()
    done = compare(*flags, "--out", out)
    assert done.code == 2
    assert words in done.error
    assert record.read_bytes() == before
    assert (out / "adamw" / "model").is_dir()


def test_a_complete_run_of_another_version_is_not_taken_for_ones_own(
    half_done: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_runs(monkeypatch)
    out = shutil.copytree(half_done, tmp_path / "c")
    record = out / "adamw" / "record.json"
    record.write_text(record.read_text().replace('"schema_version":1', '"schema_version":2'))
    assert "is of schema version 2" in compare("--resume", "--out", out).error


def test_a_comparison_is_replaced_only_when_asked_and_nothing_else_is(
    out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_runs(monkeypatch)
    assert compare("adamw", "adam8bit", "--out", out).code == 0
    (out / "mine.txt").write_text("keep")
    (out / "adam8bit" / "tracking").mkdir()
    done = compare("adamw", "--out", out)
    assert done.code == 2
    assert "--resume" in done.error
    assert "--overwrite" in done.error
    fake_runs(monkeypatch, {"adamw": "refuse"})
    assert compare("adamw", "--out", out, "--overwrite").code == 2
    document = saved(out)
    assert attempts(document) == [("adamw", "failed", 2)]
    assert document["runs"] == []  # that of the earlier comparison is not taken for its own
    assert (out / "mine.txt").read_text() == "keep"
    assert not (out / "adam8bit").exists()

    foreign = out.parent / "foreign"
    foreign.mkdir()
    (foreign / "comparison.json").write_text('{"command": "something else"}')
    for flags in (("--overwrite",), ()):
        done = compare("adamw", "--out", foreign, *flags)
        assert f"'{foreign / 'comparison.json'}' is not a record of effcli" in done.error
        assert "compare in another folder" in done.error
    assert [path.name for path in foreign.iterdir()] == ["comparison.json"]


def test_a_comparison_does_not_replace_what_it_reads(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_runs(monkeypatch)
    assert compare("adamw", "--out", out).code == 0
    done = compare("adamw", "--model", out / "adamw" / "model", "--out", out, "--overwrite")
    assert done.code == 2
    assert "lies inside --out" in done.error
    assert (out / "adamw" / "model").is_dir()


def test_a_record_names_no_folder_outside_its_own(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_runs(monkeypatch)
    assert compare("adamw", "--out", out).code == 0
    other = shutil.copytree(out / "adamw", out.parent / "other")
    text = (out / "comparison.json").read_text().replace('"folder": "adamw"', '"folder": "../other"')
    (out / "comparison.json").write_text(text)
    assert compare("--resume", "--out", out).code == 2
    assert compare("adamw", "--out", out, "--overwrite").code == 0
    assert (other / "model").is_dir()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("adamw",), "has optimizers adamw, adam8bit, not adamw;"),
        (("--seeds", 2), "has --seeds 1, not 2"),
        (("--seed", 1), "has --seed 42, not 1"),
        (("--max-steps", 9), "other values of --max-steps (loop.max_steps)"),
        (("--lr", 1), "other values of --lr (optim.lr)"),
        (("adamw,lr=3", "adam8bit"), "has optimizers adamw, adam8bit, not adamw,lr=3, adam8bit"),
        (("--overwrite",), "exclude each other"),
    ],
)
def test_other_settings_are_refused_where_a_comparison_goes_on(
    arguments: tuple[object, ...], words: str, tmp_path_factory: pytest.TempPathFactory, half_done: Path
) -> None:
    done = compare("--resume", "--out", half_done, *arguments)
    assert done.code == 2
    assert words in done.error


@pytest.fixture(scope="module")
def half_done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a comparison one of whose two runs failed."""
    out = tmp_path_factory.mktemp("half") / "c"
    with pytest.MonkeyPatch.context() as patch:
        fake_runs(patch, {"adam8bit": "fail"})
        assert compare("adamw", "adam8bit", "--max-steps", 5, "--seed", 42, "--out", out).code == 7
    return out


def test_settings_may_be_repeated_where_a_comparison_goes_on(
    half_done: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_runs(monkeypatch)
    out = shutil.copytree(half_done, tmp_path / "c")
    flags = ("--max-steps", 5, "--seed", 42, "--seeds", 1, "--logging-steps", 3)
    document = compare("--resume", "adamw", "adam8bit", *flags, "--out", out, "--json").record
    assert attempts(document) == [("adamw", "completed", 0), ("adam8bit", "completed", 0)]
    assert document["runs"][1]["spec"]["output"]["logging_steps"] == 3


def test_a_complete_run_whose_folder_is_gone_is_made_again(
    half_done: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_runs(monkeypatch)
    out = shutil.copytree(half_done, tmp_path / "c")
    shutil.rmtree(out / "adamw")
    document = compare("--resume", "--out", out, "--json").record
    assert attempts(document) == [("adamw", "completed", 0), ("adam8bit", "completed", 0)]
    assert [run["optimizer"]["name"] for run in document["runs"]] == ["adamw", "adam8bit"]


def test_a_complete_comparison_is_shown_again_though_its_data_is_gone(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_runs(monkeypatch)
    out, rows = tmp_path / "c", Path(shutil.copy(data, tmp_path / "rows.csv"))
    assert compare("adamw", "--data", rows, "--out", out).code == 0
    rows.unlink()
    assert compare("--resume", "--out", out).code == 0
    shutil.rmtree(out / "adamw" / "model")
    done = compare("--resume", "--out", out)
    assert done.code == 2
    assert "no such file or folder" in done.error


def test_one_process_compares_in_a_folder(half_done: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_runs(monkeypatch)
    before = (half_done / "comparison.json").read_bytes()
    with subprocess.Popen(
        [sys.executable, "-c", _HOLDER, half_done / LOCK], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout.readline() == b"held\n"
        done = compare("--resume", "--out", half_done)
    (half_done / LOCK).unlink(missing_ok=True)
    assert done.code == 2
    assert "another process" in done.error
    assert (half_done / "comparison.json").read_bytes() == before


def test_an_estimate_alone_writes_nothing_else_and_plans_each_optimizer(
    distilbert: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    flags = ("--model", distilbert, "--data", data, "--estimate-only", "--seeds", 3)
    document = compare("adamw", "sgd,momentum=0.9", *flags, "--csv", "t.csv", "--json").record
    assert sorted(tmp_path.rglob("*")) == [*before, tmp_path / "t.csv"]
    assert (tmp_path / "t.csv").read_text().count("\nadamw,") == 1
    assert (document["status"], document["command"]) == ("planned", "compare")
    assert attempts(document) == [("adamw", "planned", None), ("sgd,momentum=0.9", "planned", None)]
    adamw, sgd = document["summary"]
    assert adamw["predicted_state_bytes"] == 2 * sgd["predicted_state_bytes"] + 4 * 40  # moments, and 40 steps
    assert adamw["predicted_peak_allocated_bytes"] > sgd["predicted_peak_allocated_bytes"] > 0
    assert adamw["measured_state_bytes"] is None


def test_an_estimate_that_fails_for_all_says_why(distilbert: Path, data: Path) -> None:
    done = compare("--model", distilbert, "--data", data.parent / "none.csv", "--estimate-only")
    assert done.code == 2
    assert done.stdout == ""
    assert "none.csv" in done.error


def test_an_estimate_that_fails_for_one_shows_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def plan(spec: RunSpec, *, progress: Progress) -> RunRecord:
        if spec.optim.name == "sgd":
            raise DeviceError("does not run here")
        return comparisons.planned(spec.optim.name)

    monkeypatch.setattr(pipeline, "plan", plan)
    done = compare("adamw", "sgd", "--estimate-only", "--json")
    assert done.code == 4
    assert done.error == "1 of 2 runs are planned; sgd: does not run here"
    assert attempts(json.loads(done.stdout)) == [("adamw", "planned", None), ("sgd", "failed", 4)]
