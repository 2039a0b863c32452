"""Several processes, each engine: the same run as one process with the same effective batch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_simple_launcher_cmd_env
from transformers import AutoConfig, AutoModel

from effcli.errors import UsageError
from effcli.ranks.launch import ALONE, read_launch
from tests.commands import TINY_DISTILBERT, csv_file, effcli, model_folder, saved_weights
from tests.jobs import ENGINES, run_job
from tests.launched import LaunchServer
from tests.ranked_jobs import adagrad, adamw, outcomes_of, whole_run
from tests.test_engines import assert_same_run, largest_difference

NUM_UPDATES = 4


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Return what two processes did, in one launch."""
    return outcomes_of(("replicas", "shards", "unsynchronised"), tmp_path_factory.mktemp("two"), ranks=2)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("task", ["classification", "causal-lm"])
def test_two_replicas_train_as_one_process_with_the_same_effective_batch(two, engine: str, task: str) -> None:
    alone = whole_run(task)
    assert len(alone.losses) == NUM_UPDATES
    for rank in two:
        assert_same_run(alone, rank["replicas"][f"{engine} {task}"], weights=1e-6)


@pytest.mark.parametrize("engine", ENGINES)
def test_replicas_exchange_their_gradients_once_in_each_update(two, engine: str) -> None:
    # 8 rows for 2 processes in micro-batches of one row: 4 of them in one window, one exchange of all gradients.
    alone = run_job("pytorch", "classification", num_rows=8, batch_size=8, accum=1)
    num_parameters = sum(weight.numel() for weight in alone.weights.values())
    for rank in two:
        assert_same_run(alone, rank["replicas"][f"{engine} eight"], weights=1e-6)
        assert rank["replicas"][f"{engine} eight exchanges"] == [num_parameters]
        assert rank["replicas"][f"{engine} causal-lm exchanges"] == NUM_UPDATES


@pytest.mark.parametrize("engine", ENGINES)
def test_two_replicas_go_on_from_the_middle_of_an_epoch(two, engine: str) -> None:
    alone = whole_run("classification", scheduler="constant")
    for rank in two:
        rest = rank["replicas"][f"{engine} rest"]
        assert rest.losses == pytest.approx(alone.losses[1:], rel=1e-6)
        assert largest_difference(alone, rest) <= 1e-6


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("task", "optimizer"), [("classification", adagrad), ("causal-lm", adamw)])
def test_two_shards_train_as_one_process_whichever_engine_steps_them(two, engine: str, task: str, optimizer) -> None:
    alone = whole_run(task, optimizer)
    for rank in two:
        assert_same_run(alone, rank["shards"][f"{engine} {task}"], weights=0.01 * 1e-3 * NUM_UPDATES)
        assert rank["shards"][f"{engine} {task} state"] == rank["shards"][f"pytorch {task} state"]


@pytest.mark.parametrize("engine", ENGINES[1:])
def test_shards_compute_in_bf16_as_the_plain_loop_does(two, engine: str) -> None:
    for rank in two:
        assert_same_run(rank["shards"]["pytorch bf16"], rank["shards"][f"{engine} bf16"], weights=1e-6)


@pytest.mark.parametrize("engine", ENGINES[1:])
def test_copies_that_would_not_be_synchronised_are_never_trained(two, engine: str) -> None:
    for rank in two:
        error = rank["unsynchronised"][engine]
        assert error.startswith("2 processes were launched and accelerate knows of 1, which would train copies")


def environment_of_accelerate_launch(*arguments: str) -> dict[str, str]:
    """Return the environment that `accelerate launch` gives the one process that it starts without `--multi_gpu`."""
    command = ("--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no", *arguments, "script.py")
    settled, _, _ = _validate_launch_command(launch_command_parser().parse_args(command))
    return prepare_simple_launcher_cmd_env(settled)[1]


def test_one_process_that_accelerate_starts_for_several_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    for arguments in (("--cpu", "--num_processes", "2"), ("--num_processes", "2")):
        with pytest.raises(UsageError, match="asked for several processes and started one; give it --multi_gpu"):
            read_launch(environment_of_accelerate_launch(*arguments))
    assert read_launch(environment_of_accelerate_launch("--cpu", "--num_processes", "1")) == ALONE


@pytest.fixture
def update(tmp_path: Path) -> list[object]:
    """Return the command of one update of a model whose file has no head."""
    model = model_folder(tmp_path / "body", TINY_DISTILBERT)
    AutoModel.from_config(AutoConfig.from_pretrained(model)).save_pretrained(model)
    flags = ("--lr", "0.01", "--max-steps", "1", "--limit-rows", "8", "--optim", "sgd", "--device", "cpu")
    return ["train", "--model", model, "--data", csv_file(tmp_path / "rows.csv"), *flags]


def assert_same_model(one: Path, other: Path) -> None:
    weights, others = saved_weights(one), saved_weights(other)
    assert weights.keys() == others.keys()
    assert max((weight - others[name]).abs().max().item() for name, weight in weights.items()) <= 1e-6


@pytest.mark.usefixtures("without_plan")
def test_each_process_has_the_weights_whatever_accelerate_launch_says_of_loading(
    update: list[object], launches: LaunchServer, tmp_path: Path
) -> None:
    assert effcli(*update, "--batch-size", 8, "--out", tmp_path / "alone").code == 0
    done = launches.run(
        *update, "--batch-size", 4, "--shard", "fsdp", "--engine", "accelerate", "--out", tmp_path / "two",
        environment={"ACCELERATE_USE_FSDP": "true", "FSDP_CPU_RAM_EFFICIENT_LOADING": "true", "FSDP_VERSION": "2"},
    )  # fmt: skip
    assert set(done.codes.values()) == {0}, done.stderr
    assert_same_model(tmp_path / "alone", tmp_path / "two")


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_accelerate_launch_starts_two_processes_on_a_cpu(update: list[object], engine: str, tmp_path: Path) -> None:
    assert effcli(*update, "--batch-size", 8, "--out", tmp_path / "alone").code == 0
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"]
    flags = [*update, "--batch-size", 4, "--engine", engine, "--out", tmp_path / "two"]
    port = ["--main_process_port", "0", "--num_machines", "1", "--mixed_precision", "bf16", "-m", "effcli"]
    subprocess.run([*launcher, *port, *map(str, flags)], check=True, capture_output=True)
    assert_same_model(tmp_path / "alone", tmp_path / "two")


@pytest.mark.slow
def test_four_processes_train_as_one(tmp_path: Path) -> None:
    ranks = outcomes_of(("replicas", "shards"), tmp_path, ranks=4)
    for task, optimizer in (("classification", adagrad), ("causal-lm", adamw)):
        alone, alone_with_state = whole_run(task), whole_run(task, optimizer)
        for rank in ranks:
            for engine in ENGINES:
                assert_same_run(alone, rank["replicas"][f"{engine} {task}"], weights=1e-6)
                of_shards = rank["shards"][f"{engine} {task}"]
                assert_same_run(alone_with_state, of_shards, weights=0.01 * 1e-3 * NUM_UPDATES)
