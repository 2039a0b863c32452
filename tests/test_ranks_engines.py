"""Several processes, each engine: the same run as one process with the same effective batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.jobs import ENGINES, run_job
from tests.ranked_jobs import adagrad, adamw, outcomes_of, whole_run
from tests.test_engines import assert_same_run

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
