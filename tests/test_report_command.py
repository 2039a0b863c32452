"""`effcli report`: saved runs and comparisons, alone and together, and what is neither."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from effcli.measure.comparison_record import ComparisonRecord
from effcli.measure.record import RunRecord
from effcli.report.number_text import ratio
from tests import comparisons, plans, records
from tests.commands import effcli

Changes = dict[str, Any]


def saved(folder: Path, record: RunRecord | ComparisonRecord) -> Path:
    """Return a folder that holds a record as a run or a comparison leaves it."""
    folder.mkdir(parents=True)
    name = "record.json" if isinstance(record, RunRecord) else "comparison.json"
    (folder / name).write_text(record.model_dump_json())
    return folder


def changed(record: RunRecord, section: str, **values: object) -> RunRecord:
    spec = {**record.spec, section: {**record.spec[section], **values}}
    return record.model_copy(update={"spec": spec})


def names_of(*paths: Path) -> list[str]:
    return [line["name"] for line in effcli("report", *paths, "--json").record["summary"]]


def test_one_run_is_told_as_it_was_when_it_ended(tmp_path: Path) -> None:
    folder = saved(tmp_path / "run", records.completed())
    told = effcli("report", folder)
    assert told.stdout == effcli("report", folder / "record.json").stdout
    assert told.stdout.startswith("effcli train: completed, 1,377 updates\n")
    assert "To the byte" in told.stdout
    assert told.stderr == ""


def test_one_run_as_json_is_a_comparison_of_one_as_several_are(tmp_path: Path) -> None:
    record = records.completed()
    document = ComparisonRecord.model_validate(effcli("report", saved(tmp_path / "run", record), "--json").record)
    assert document.runs == (record,)
    (line,) = document.summary
    assert line.name == record.optimizer.name
    assert line.predicted_state_bytes == record.optimizer.state_bytes


def test_several_runs_are_a_comparison_in_the_order_given(tmp_path: Path) -> None:
    paths = [saved(tmp_path / name, comparisons.run(name)) for name in ("adam8bit", "adamw")]
    text = effcli("report", *paths).stdout
    assert text.startswith("effcli report: completed, 2 runs\n")
    assert "to adam8bit, the first" in text
    document = effcli("report", *paths, "--json").record
    comparison = ComparisonRecord.model_validate(document)
    assert [run.optimizer.name for run in comparison.runs] == ["adam8bit", "adamw"]
    assert [attempt.folder for attempt in comparison.attempts] == [str(path) for path in paths]
    assert comparison.summary[1].ratios["measured_state_bytes"] == pytest.approx(526_264_752 / 134_004_336)


def test_a_comparison_is_told_as_it_was_saved(tmp_path: Path) -> None:
    record = comparisons.one_failed()
    folder = saved(tmp_path / "comparison", record)
    for path in (folder, folder / "comparison.json"):
        assert ComparisonRecord.model_validate(effcli("report", path, "--json").record) == record
    text = effcli("report", folder).stdout
    assert text.startswith("effcli compare: failed, 1 of 4 runs completed\n")
    assert "Not completed" in text


def test_runs_and_comparisons_mix(tmp_path: Path) -> None:
    one = saved(tmp_path / "one", comparisons.one_failed())
    lion = comparisons.run("adamw").optimizer.model_copy(update={"name": "lion"})
    other = saved(tmp_path / "other", comparisons.run("adamw").model_copy(update={"optimizer": lion}))
    document = ComparisonRecord.model_validate(effcli("report", other, one, "--json").record)
    assert [line.name for line in document.summary] == ["lion", "adamw", "adafactor", "adam8bit", "lion8bit"]
    assert document.status == "failed"
    assert [document.record_of(attempt) is None for attempt in document.attempts] == [False] * 4 + [True]
    for attempt in document.attempts[:4]:
        run = document.record_of(attempt)
        assert run is not None
        assert run.optimizer.name == attempt.name


def test_runs_that_differ_in_their_seed_alone_are_one_name(tmp_path: Path) -> None:
    paths = [saved(tmp_path / str(seed), comparisons.run("adamw", seed)) for seed in (1, 2, 3)]
    document = effcli("report", *paths, "--json").record
    (line,) = document["summary"]
    assert line["name"] == "adamw"
    assert line["seeds"] == [1, 2, 3]
    assert line["spread"]["final_loss"]["deviation"] > 0


@pytest.mark.parametrize(
    ("changes", "labels"),
    [
        ([("optim", {"lr": 1e-4}), ("optim", {"lr": 5e-4})], ["lr=0.0001", "lr=0.0005"]),
        ([("optim", {"args": {"amsgrad": True}}), ("optim", {})], ["amsgrad=on", "amsgrad=default"]),
        (
            [("loop", {"precision": "bf16", "batch_size": 4}), ("loop", {})],
            ["precision=bf16 batch_size=4", "precision=fp32 batch_size=8"],
        ),
        ([("model", {"lora_targets": ["q", "v"]}), ("model", {})], ["lora_targets=q, v", "lora_targets=default"]),
        ([("loop", {"compile": False}), ("loop", {"compile": True})], ["compile=off", "compile=on"]),
    ],
)
def test_the_same_optimizer_twice_is_told_apart_by_the_settings_that_differ(
    changes: list[tuple[str, Changes]], labels: list[str], tmp_path: Path
) -> None:
    paths = [
        saved(tmp_path / str(number), changed(comparisons.run("adamw"), section, **values))
        for number, (section, values) in enumerate(changes)
    ]
    paths.append(saved(tmp_path / "other", comparisons.run("adafactor")))
    assert names_of(*paths) == [*(f"adamw {label}" for label in labels), "adafactor"]


def test_numbers_that_differ_in_their_last_digits_are_other_settings(tmp_path: Path) -> None:
    rates = (0.00012345678, 0.00012345679)
    paths = [saved(tmp_path / str(lr), changed(comparisons.run("adamw"), "optim", lr=lr)) for lr in rates]
    assert names_of(*paths) == [f"adamw lr={lr}" for lr in rates]


def test_the_same_settings_twice_are_told_apart_by_folder(tmp_path: Path) -> None:
    record = comparisons.run("adamw")
    one, two, three = (saved(tmp_path / name, record) for name in ("a/first", "a/second", "b/first"))
    assert names_of(one, two) == ["adamw (first)", "adamw (second)"]
    assert names_of(one, three) == [f"adamw ({one})", f"adamw ({three})"]
    assert names_of(one, one) == ["adamw", "adamw (2)"]


def test_what_is_watched_makes_no_other_run(tmp_path: Path) -> None:
    watched = changed(comparisons.run("adamw", 43), "loop", profile_memory=True, device="cpu")
    paths = [saved(tmp_path / "one", comparisons.run("adamw", 42)), saved(tmp_path / "two", watched)]
    assert names_of(*paths) == ["adamw"]
    assert "Differs" not in effcli("report", *paths).stdout


def test_many_settings_are_no_name(tmp_path: Path) -> None:
    other = changed(comparisons.run("adamw"), "loop", batch_size=1, accum=2, precision="bf16", engine="trainer")
    paths = [saved(tmp_path / "one", comparisons.run("adamw")), saved(tmp_path / "two", other)]
    assert names_of(*paths) == ["adamw (one)", "adamw (two)"]


def test_another_machine_or_version_is_no_other_seed(tmp_path: Path) -> None:
    record = comparisons.run("adamw", 43)
    environment = {**record.environment, "packages": {**record.environment["packages"], "torch": "2.9.1"}}
    other = record.model_copy(update={"environment": environment})
    paths = [saved(tmp_path / "one", comparisons.run("adamw", 42)), saved(tmp_path / "two", other)]
    assert names_of(*paths) == ["adamw torch=2.13.0+cpu", "adamw torch=2.9.1"]
    text = effcli("report", *paths).stdout
    assert "they differ in torch: the tables compare more than optimizers" in text


def test_records_of_different_models_and_data_say_so(tmp_path: Path) -> None:
    other = changed(comparisons.run("adafactor"), "data", train="other.csv")
    other = other.model_copy(update={"model": records.model("bert-base-cased")})
    text = effcli("report", saved(tmp_path / "one", comparisons.run("adamw")), saved(tmp_path / "two", other)).stdout
    assert "model       distilbert-base-cased: adamw; bert-base-cased: adafactor" in text
    assert "data        pairs.csv: adamw; other.csv: adafactor" in text
    assert "they differ in model, data: the tables compare more than optimizers" in text


def test_a_record_from_before_times_of_updates_is_still_read(tmp_path: Path) -> None:
    document = json.loads(records.completed().model_dump_json())
    for update in document["history"]:
        del update["training_s"]
    del document["measured"]["profiled"]
    (tmp_path / "record.json").write_text(json.dumps(document))
    assert "completed" in effcli("report", tmp_path).stdout
    text = effcli("report", tmp_path, saved(tmp_path / "new", comparisons.run("adafactor"))).stdout
    assert "adamw" in text


def document(**changes: object) -> str:
    return json.dumps({**json.loads(records.completed().model_dump_json()), **changes})


BROKEN = {
    "another version": (document(schema_version=2), "is of schema version 2, and this effcli reads 1"),
    "no version": (json.dumps({"command": "train", "spec": {}}), "its schema version is null, no whole number"),
    "cut off": (document()[:1000], "is cut off or no JSON"),
    "empty": ("", "is cut off or no JSON"),
    "no object": ("[1, 2]", "holds no JSON object"),
    "foreign": ('{"model_type": "bert"}', "names no command"),
    "deep": ("[" * 100_000, "is cut off or no JSON"),
    "binary": (b"\x80\x02\xff\x00" * 1000, "is cut off or no JSON"),
    "an estimate": (plans.estimate(plans.plan()).model_dump_json(), "what `effcli estimate` says, which is no run"),
    "wrong fields": (document(batch={"micro": "many"}), "4 of its fields do not fit, such as batch.micro"),
    "hostile": (document(schema_version="\x1b[31m<script>" * 100), "no whole number"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_what_is_no_record_is_refused_in_one_line(kind: str, tmp_path: Path) -> None:
    content, expected = BROKEN[kind]
    path = tmp_path / "record.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    result = effcli("report", path)
    assert result.code == 2
    assert result.stdout == ""
    assert expected in result.error
    assert len(result.stderr.splitlines()) == 1
    assert len(result.stderr) < 1000
    assert "\x1b" not in result.stderr


def test_what_is_not_there_or_no_file_is_refused_in_one_line(tmp_path: Path) -> None:
    assert "No such file or directory; give record.json of a run" in effcli("report", tmp_path / "nowhere.json").error
    holds = "holds neither record.json nor comparison.json; give the folder of a run"
    assert holds in effcli("report", tmp_path).error
    run = saved(tmp_path / "inside" / "run", records.completed())
    assert f"there are runs inside it: {run}" in effcli("report", run.parent).error
    assert "is neither a file nor a folder" in effcli("report", "/dev/null").error
    with (tmp_path / "huge.json").open("wb") as file:
        file.truncate(2**40)
    assert "it is 1,024.00 GiB large" in effcli("report", tmp_path / "huge.json").error


def test_a_comparison_whose_runs_are_not_there_is_damaged(tmp_path: Path) -> None:
    record = comparisons.three()
    folder = saved(tmp_path / "c", record.model_copy(update={"runs": record.runs[:1]}))
    assert "is damaged: 'adafactor' is said to be run 1 of 1" in effcli("report", folder).error


@pytest.mark.parametrize("kind", ["lists", "spec", "environment"])
def test_edited_settings_of_other_kinds_break_no_report(kind: str, tmp_path: Path) -> None:
    odd: dict[str, Changes] = {
        "lists": {"spec": {"loop": [1], "optim": [], "data": [{}], "model": [[]]}},
        "spec": {"spec": {"loop": 3, "optim": {"lr": "fast"}, "data": {"max_length": "long"}, "model": None}},
        "environment": {"environment": {"packages": "none", "torch_threads": "two", "out": 5, "device": None}},
    }
    one = comparisons.run("adamw").model_copy(update=odd[kind])
    paths = [saved(tmp_path / "one", one), saved(tmp_path / "two", comparisons.run("adafactor"))]
    page = tmp_path / "page.html"
    for given in (paths, paths[:1]):
        result = effcli("report", *given, "--csv", tmp_path / "rows.csv", "--html", page)
        assert result.code == 0, result.stderr


def test_exports_are_written_and_named_below_the_tables(tmp_path: Path) -> None:
    paths = [saved(tmp_path / name, comparisons.run(name)) for name in ("adamw", "adafactor")]
    out = tmp_path / "new" / "x.csv"
    text = effcli("report", *paths, "--csv", out).stdout
    assert re.sub(r"\s", "", text).endswith(f"csv{out}")
    assert out.read_text().startswith("name,seed,status,")
    assert "csv" not in effcli("report", *paths, "--csv", out, "--json").record


def test_nothing_is_read_where_an_export_could_not_be_written(tmp_path: Path) -> None:
    result = effcli("report", tmp_path / "nowhere", "--html", tmp_path / "page.pdf")
    assert result.code == 2
    assert "must end in .html or .htm" in result.error


def test_no_torch_is_needed_for_tables_and_rows_nor_for_page_and_plot(tmp_path: Path) -> None:
    paths = [saved(tmp_path / name, comparisons.run(name)) for name in comparisons.KINDS]
    program = (
        "import sys\n"
        "class Blocked:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.partition('.')[0] in ('torch', 'transformers', 'accelerate', 'datasets', 'bitsandbytes'):\n"
        "            raise ImportError(name)\n"
        "sys.meta_path.insert(0, Blocked())\n"
        "from effcli.cli.app import main\n"
        "main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, "report", *paths, "--csv", "x.csv", "--html", "x.html", "--plot", "x.svg"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "adam8bit" in (tmp_path / "x.csv").read_text()
    assert "adam8bit" in (tmp_path / "x.html").read_text()
    assert (tmp_path / "x.svg").read_text().startswith("<svg")


def test_numbers_keep_three_digits_also_where_rounding_makes_another() -> None:
    assert [ratio(value) for value in (1.0, 0.9996, 0.99949, 9.996, 0.00099996)] == [
        "1.00", "1.00", "0.999", "10.0", "0.00100",
    ]  # fmt: skip
