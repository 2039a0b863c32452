"""Who a process is among those of its launch, and what is refused before anything is read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from effcli.errors import UsageError
from effcli.pipeline.launching import check_restart
from effcli.ranks.launch import ALONE, Launch, read_launch, timeout_s
from tests.commands import csv_file
from tests.launched import LaunchServer

TORCHRUN = {
    "WORLD_SIZE": "4", "RANK": "3", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500",
}  # fmt: skip


def test_a_process_knows_its_place_by_what_the_launcher_says() -> None:
    assert read_launch(TORCHRUN) == Launch(world_size=4, rank=3, local_rank=1, local_world_size=2)
    assert read_launch({}) == ALONE
    assert read_launch(TORCHRUN | {"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0"}) == ALONE


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"RANK": ""}, "WORLD_SIZE is 4, but RANK is not set; start with torchrun --nproc-per-node 4 -m effcli"),
        ({"MASTER_PORT": "", "MASTER_ADDR": ""}, "MASTER_ADDR, MASTER_PORT are not set"),
        ({"RANK": "4"}, "RANK is '4', which launchers set to a whole number, from 0 to 3"),
        ({"LOCAL_RANK": "2"}, "LOCAL_RANK is '2', which launchers set to a whole number, from 0 to 1"),
        ({"WORLD_SIZE": "many"}, "WORLD_SIZE is 'many', which launchers set to a whole number, 1 or more; unset it"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE is '0'"),
        ({"WORLD_SIZE": "-2"}, "WORLD_SIZE is '-2'"),
        ({"RANK": "1.0"}, "RANK is '1.0'"),
    ],
)
def test_variables_that_no_launcher_sets_are_refused(changes: dict[str, str], said: str) -> None:
    with pytest.raises(UsageError) as raised:
        read_launch(TORCHRUN | changes)
    assert said in str(raised.value)


@pytest.mark.parametrize("name", ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE"])
def test_processes_of_mpi_are_refused_and_one_alone_is_not(name: str) -> None:
    with pytest.raises(UsageError, match=r"would train unsynchronised copies; start them with torchrun"):
        read_launch({name: "2"})
    assert read_launch({name: "1"}) == ALONE


def test_the_time_to_wait_for_others_can_be_set() -> None:
    assert timeout_s({}) == 1800
    assert timeout_s({"EFFCLI_RANK_TIMEOUT": "90"}) == 90
    with pytest.raises(UsageError, match="EFFCLI_RANK_TIMEOUT is 'long'; set it to a whole number of seconds"):
        timeout_s({"EFFCLI_RANK_TIMEOUT": "long"})


def test_processes_that_torchrun_starts_again_on_several_machines_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    check_restart(resume=False)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    with pytest.raises(UsageError, match=r"torchrun has started the processes again .* which needs one machine"):
        check_restart(resume=True)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    check_restart(resume=True)


def test_what_all_come_to_is_said_once(launches: LaunchServer, tmp_path: Path) -> None:
    full = tmp_path / "full"
    full.mkdir()
    (full / "file").write_text("mine")
    for arguments, code, said in (
        (("--batch-sze", 1), 2, "No such option: --batch-sze"),
        (("--batch-size", 0), 2, "--batch-size (loop.batch_size): 0 is below"),
        (("--data", tmp_path / "nothing.csv"), 2, "no such file or folder"),
        (("--optim", "adamww"), 2, "unknown optimizer 'adamww'"),
        (("--out", full), 2, "holds no run"),
        (("--device", "cuda:1"), 2, "--device cuda:1: each of the 2 processes takes a device of its own"),
        (("--auto-batch",), 2, "--auto-batch with 2 processes"),
        (("--optim", "adamw4bit", "--shard", "fsdp", "--precision", "bf16-pure"), 2, "optimizer 'adamw4bit' with"),
    ):
        ended = launches.run("train", "--device", "cpu", *arguments)
        assert ended.codes[0] == code
        assert ended.error.startswith(said) or said in ended.error
        assert "rank " not in ended.error


def test_processes_that_were_started_differently_are_refused(launches: LaunchServer, tmp_path: Path) -> None:
    ended = launches.run("train", "--device", "cpu", more={1: ("--batch-size", 2)})
    assert ended.error.startswith("rank 1 was started with another --batch-size (loop.batch_size) than rank 0, 2 and")
    ended = launches.run("train", "--device", "cpu", more={1: ("--batch-sze", 1)})
    assert ended.error.startswith("rank 1: No such option: --batch-sze")
    assert ended.codes[0] == 2
    ended = launches.run("train", "--device", "cpu", faults={1: [("other_version", {"package": "torch"})]})
    assert ended.error.startswith("rank 1 was started with another version of torch than rank 0, 0.0 and")


def test_processes_that_have_read_other_rows_or_weights_are_refused(
    launches: LaunchServer, tmp_path: Path, distilbert: Path
) -> None:
    data, evaluation = csv_file(tmp_path / "d.csv"), csv_file(tmp_path / "e.csv", 9)
    flags = ("train", distilbert, "--data", data, "--eval-data", evaluation, "--device", "cpu", "--out", tmp_path / "o")
    for name, path, kind in (("d", data, "training"), ("e", evaluation, "evaluation")):
        other = csv_file(tmp_path / f"{name}-other.csv", 13)
        ended = launches.run(*flags, faults={1: [("other_file", {"path": str(path), "other": str(other)})]})
        assert f"rank 1 has read other {kind} rows than rank 0 (13 and" in ended.error
    ended = launches.run(*flags, faults={0: [("planless", {})], 1: [("planless", {}), ("other_weights", {})]})
    assert ended.error.startswith(
        "rank 1 has loaded other weights than rank 0 of distilbert.embeddings.word_embeddings"
    )
    assert not (tmp_path / "o").exists()


def test_commands_of_one_process_refuse_several(launches: LaunchServer) -> None:
    for command in (("compare",), ("estimate", "distilbert-base-cased")):
        ended = launches.run(*command)
        assert ended.error.startswith(f"2 processes were launched, and {command[0]} needs one")
        assert ended.codes[0] == 2


def test_a_launch_of_one_process_is_an_ordinary_run(
    launches: LaunchServer, tmp_path: Path, distilbert: Path, data: Path
) -> None:
    launcher = {"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    ended = launches.run(
        "train", distilbert, "--data", data, "--device", "cpu", "--max-steps", 1, "--json", "--out", tmp_path / "o",
        ranks=1, environment=launcher, faults=[("planless", {})],
    )  # fmt: skip
    assert ended.record["status"] == "completed"
    assert ended.record["batch"]["world_size"] == 1
    assert ended.record["distribution"] is None
    assert json.loads((tmp_path / "o" / "record.json").read_text())["status"] == "completed"
