"""What each process of a run really held: measured in whole runs, beside what was predicted for it."""

from __future__ import annotations

import json
import signal
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from effcli.data.batches import EpochBatchSampler, Part
from effcli.engines.window import windows
from effcli.engines.window_schedule import WindowSchedule
from effcli.errors import PredictionError
from effcli.history.context import ASSUMED, context_for
from effcli.history.file import VARIABLE
from effcli.history.remember import remember
from effcli.measure.optimizer_size import inspect_optimizer, state_notes
from effcli.measure.peak import StepProbe
from effcli.measure.rank_record import DistributionFacts, RankAmounts, RankMeasured
from effcli.measure.throughput import ThroughputMeter
from effcli.optim import registry
from effcli.pipeline import check_prediction
from effcli.pipeline.running.profiled_window import choose_window
from effcli.ranks import group
from effcli.ranks.launch import Launch
from tests import cuda_records, histories, records
from tests.commands import TINY_DISTILBERT, csv_file, effcli, model_folder
from tests.launched import LaunchServer
from tests.tiny_models import tiny_distilbert

ODD = {"vocab_size": 1001, "dim": 33, "n_heads": 3, "hidden_dim": 99, "max_position_embeddings": 61}
"""Sizes that neither 2 nor 3 divide; with biases of 33 and 99, a classifier of 2 rows and one of 2 elements."""

NUM_PARAMETERS = (1001 + 61) * 33 + 2 * 33 + 2 * (4 * (33 * 33 + 33) + 2 * 33 * 99 + 99 + 33 + 4 * 33) + 1190
"""Embeddings and their norm; two layers (attention, feed-forward, two norms); the head: 33 x 33 + 33 + 2 x 33 + 2."""

ROWS, EPOCHS = 21, 2
"""21 rows in windows of 8 end with one of 5: a micro-batch of 4 and one of a single row, which rank 1 alone has."""

AMOUNTS = ("weights_bytes", "gradients_bytes", "optimizer_state_bytes", "optimizer_state_elements")

SHARDED = [entry.name for entry in registry.entries() if entry.shard_fault(registry.default_hyper(entry)) is None]


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> tuple[object, ...]:
    """Return the arguments that all runs share but for the size of their batches."""
    folder = tmp_path_factory.mktemp("given")
    model = model_folder(folder / "odd", TINY_DISTILBERT, **ODD)
    data = csv_file(folder / "rows.csv", ROWS)
    return ("train", model, "--data", data, "--device", "cpu", "--epochs", EPOCHS, "--lr", 0.01, "--json")


@pytest.fixture(scope="module")
def sharded(launches: LaunchServer, given: tuple[object, ...], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return the record of two processes that sharded AdamW, and what they said."""
    out = tmp_path_factory.mktemp("sharded") / "out"
    launched = launches.run(
        *given, "--batch-size", 2, "--accum", 2, "--shard", "fsdp", "--percentile-clipping", 50, "--tolerance", 0,
        "--out", out,
    )  # fmt: skip
    return launched.record, launched.stderr[0]


@pytest.fixture(scope="module")
def alone(given: tuple[object, ...], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return the record of one process with the same rows in each update."""
    out = tmp_path_factory.mktemp("alone") / "out"
    return effcli(*given, "--batch-size", 4, "--accum", 2, "--percentile-clipping", 50, "--out", out).record


def assert_as_predicted(record: dict[str, Any]) -> None:
    """Check that each rank holds what was predicted for it, to the byte."""
    predicted, measured = record["optimizer"]["per_rank"], record["measured"]["per_rank"]
    assert [rank["rank"] for rank in measured] == list(range(record["distribution"]["world_size"]))
    for one, two in zip(predicted, measured, strict=True):
        assert {name: one[name] for name in AMOUNTS} == {name: two[name] for name in AMOUNTS}


def test_each_rank_holds_what_was_predicted_for_it_to_the_byte(sharded: Any) -> None:
    record, said = sharded
    assert_as_predicted(record)
    assert "As predicted, to the byte: optimizer state, weights" in said
    assert "gradients of every rank" in said


def test_the_shards_of_all_ranks_are_the_whole_model(sharded: Any, alone: Any) -> None:
    record, _ = sharded
    assert record["model"]["num_parameters"] == NUM_PARAMETERS
    num_tensors, ranks = record["model"]["num_parameter_tensors"], record["measured"]["per_rank"]
    # Two statistics of each element, and a step for each tensor on each rank, also where no row of it lies there.
    assert sum(rank["optimizer_state_elements"] for rank in ranks) == 2 * NUM_PARAMETERS + 2 * num_tensors
    assert ranks[0]["optimizer_state_elements"] > ranks[1]["optimizer_state_elements"]
    assert alone["measured"]["optimizer_state_elements"] == 2 * NUM_PARAMETERS + num_tensors
    assert alone["measured"]["per_rank"] == []


def test_amounts_beside_those_of_each_rank_are_those_of_rank_0(sharded: Any) -> None:
    measured = sharded[0]["measured"]
    first = measured["per_rank"][0]
    for name in (*AMOUNTS, "peak_allocated_bytes", "peak_rss_bytes"):
        assert measured[name] == first[name]
    assert sum(amount["elements"] for amount in measured["tensors"].values()) == first["optimizer_state_elements"]
    assert all(rank["device"] == "cpu" and rank["peak_rss_bytes"] > 2**26 for rank in measured["per_rank"])


def test_rows_and_tokens_are_counted_on_all_ranks_and_stand_ins_on_none(sharded: Any, alone: Any) -> None:
    for record in (sharded[0], alone):
        rates, num_updates = record["throughput"], record["total_updates"]
        seconds = num_updates / rates["updates_per_second"]
        assert rates["samples_per_second"] * seconds == pytest.approx(ROWS * EPOCHS)
    tokens = [record["throughput"]["tokens_per_second"] for record in (sharded[0], alone)]
    rows = [record["throughput"]["samples_per_second"] for record in (sharded[0], alone)]
    assert tokens[0] / rows[0] == pytest.approx(tokens[1] / rows[1])


def test_shards_are_clipped_to_the_norms_of_the_whole_gradients(sharded: Any, alone: Any) -> None:
    lines = zip(sharded[0]["history"], alone["history"], strict=True)
    assert all(one["clip_norm"] == pytest.approx(two["clip_norm"], rel=1e-4) for one, two in lines)
    assert any(line["clip_norm"] < line["grad_norm"] for line in alone["history"])


def test_replicas_profile_the_same_update_each_its_own_part(
    launches: LaunchServer, given: tuple[object, ...], tmp_path: Path
) -> None:
    record = launches.run(
        *given, "--batch-size", 2, "--accum", 2, "--precision", "bf16-pure", "--profile-memory", "--out", tmp_path / "o"
    ).record
    assert_as_predicted(record)
    measured = record["measured"]
    assert all(rank["gradients_bytes"] == 2 * NUM_PARAMETERS for rank in measured["per_rank"])
    assert measured["weight_changes"]["num_weights"] == NUM_PARAMETERS
    profiled, peaks = measured["profiled"], [rank["peak_allocated_bytes"] for rank in measured["per_rank"]]
    assert profiled["update"] > 2  # DDP lays out its buckets anew in the second
    assert measured["peak_allocated_bytes"] == peaks[0] == profiled["peak_allocated_bytes"]
    # Weights, two statistics and the buckets are there all the time, in 2 bytes each.
    assert min(peaks) > 4 * 2 * NUM_PARAMETERS


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("name", SHARDED)
def test_every_optimizer_that_runs_on_shards_holds_what_was_predicted(
    name: str, ranks: int, launches: LaunchServer, given: tuple[object, ...], tmp_path: Path
) -> None:
    # What torchao compiles takes as much state uncompiled, and a minute less.
    record = launches.run(
        *given, "--optim", name, "--batch-size", 2, "--shard", "fsdp", "--max-steps", 2, "--tolerance", 0,
        "--out", tmp_path / "out", ranks=ranks, environment={"TORCHDYNAMO_DISABLE": "1"},
    ).record  # fmt: skip
    assert_as_predicted(record)


@pytest.mark.slow
def test_the_weights_that_16_bit_left_alone_are_counted_on_all_shards(
    launches: LaunchServer, given: tuple[object, ...], tmp_path: Path
) -> None:
    record = launches.run(
        *given, "--batch-size", 4, "--precision", "bf16-pure", "--shard", "fsdp", "--out", tmp_path / "out"
    ).record
    changes = record["measured"]["weight_changes"]
    assert changes["num_weights"] == changes["num_compared"] == NUM_PARAMETERS
    assert 0 < changes["num_changed"] <= changes["num_with_gradient"] < NUM_PARAMETERS  # not all tokens occur
    alone = effcli(*given, "--batch-size", 8, "--precision", "bf16-pure", "--out", tmp_path / "alone").record
    of_one = alone["measured"]["weight_changes"]
    assert changes["num_with_gradient"] == pytest.approx(of_one["num_with_gradient"], rel=0.01)
    assert changes["num_changed"] == pytest.approx(of_one["num_changed"], rel=0.05)


@pytest.mark.slow
def test_where_a_run_fails_nobody_waits_for_what_others_held(
    launches: LaunchServer, given: tuple[object, ...], tmp_path: Path
) -> None:
    failing = {1: [("raising", {"update": 2, "kind": "ValueError", "text": "no more"})]}
    launched = launches.run(*given, "--batch-size", 4, "--out", tmp_path / "out", faults=failing)
    assert "no more" in launched.error
    record = json.loads((tmp_path / "out" / "record.json").read_text())
    assert record["status"] == "failed"
    assert record["measured"]["per_rank"] == []


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["accelerate", "trainer"])
def test_a_run_that_all_stop_together_has_what_each_held_whichever_engine_runs_it(
    engine: str, launches: LaunchServer, given: tuple[object, ...], tmp_path: Path
) -> None:
    told = {1: [("killed", {"update": 2, "number": int(signal.SIGTERM)})]}
    launches.run(*given, "--batch-size", 2, "--accum", 2, "--engine", engine, "--out", tmp_path / "out", faults=told)
    record = json.loads((tmp_path / "out" / "record.json").read_text())
    assert (record["status"], record["history"][-1]["update"]) == ("interrupted", 2)
    assert_as_predicted(record)
    assert record["throughput"]["samples_per_second"] == pytest.approx(8 * record["throughput"]["updates_per_second"])


def test_processes_meet_on_their_own_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    class MetError(Exception):
        pass

    def meet(backend: str, *, device_id: torch.device, **others: object) -> None:
        assert (backend, device_id, current) == ("nccl", torch.device("cuda", 1), [device_id])
        raise MetError

    current: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    monkeypatch.setattr(dist, "is_backend_available", lambda backend: True)
    monkeypatch.setattr(dist, "init_process_group", meet)
    monkeypatch.setattr(group, "agree", lambda *arguments: None)
    monkeypatch.setattr(dist, "PrefixStore", lambda prefix, store: store)
    launch = Launch(world_size=2, rank=1, local_rank=1, local_world_size=2)
    with pytest.raises(MetError), group.joined(launch, torch.device("cuda", 1), object()):
        pass


LENGTHS = np.random.default_rng(3).integers(2, 40, 22)


@pytest.mark.parametrize("accum", [1, 2])
@pytest.mark.parametrize("world_size", [2, 3])
def test_all_processes_choose_the_update_with_the_largest_part_of_any(world_size: int, accum: int) -> None:
    schedule = WindowSchedule(num_rows=22, batch_size=3, accum=accum, world_size=world_size)
    total = schedule.total_updates(2)
    samplers = [EpochBatchSampler(22, 3, 42, part=Part(rank=rank, world_size=world_size)) for rank in range(world_size)]
    chosen = [
        choose_window(sampler, [LENGTHS], schedule, start_update=0, total_updates=total, num_cold=2)
        for sampler in samplers
    ]
    made = [_made(sampler, schedule, total) for sampler in samplers]
    sizes = {
        update: max(len(rows) * max(LENGTHS[rows]) for parts in made for rows in parts[update] if rows)
        for update in range(3, total + 1)
    }
    assert {window.update for window in chosen if window} <= {
        u for u, size in sizes.items() if size == max(sizes.values())
    }
    for window, parts in zip(chosen, made, strict=True):
        assert window is not None
        assert window.update == chosen[0].update
        assert [(batch.rows, batch.tokens) for batch in window.batches] == [
            (len(rows), max(LENGTHS[rows])) if rows else (1, LENGTHS[0]) for rows in parts[window.update]
        ]
        assert list(window.example) in parts[window.update]


def _made(sampler: EpochBatchSampler, schedule: WindowSchedule, total: int) -> dict[int, list[list[int]]]:
    """Return the rows of each micro-batch of each update, as a loop takes them."""
    made: dict[int, list[list[int]]] = {}
    while len(made) < total:
        sampler.set_epoch(schedule.position(len(made)).epoch)
        for window in islice(windows(sampler, schedule.accum), total - len(made)):
            made[len(made) + 1] = window
    return made


def test_a_stretch_counts_as_many_batches_as_it_is_told_to() -> None:
    model = tiny_distilbert()
    ticks = iter(range(100))
    meter = ThroughputMeter(model, clock=lambda: float(next(ticks)))
    for num_batches in (1, 2, None, 0):
        meter.start(num_batches)
        for rows in (4, 1):
            model(input_ids=torch.ones(rows, 3, dtype=torch.int64))
        meter.pause()
    assert meter.rows_since_last() == 4 + 5 + 5
    speed = meter.result(4)
    assert speed is not None
    assert (speed.samples_per_second, speed.tokens_per_second) == (14 / 4, 3 * 14 / 4)


def test_gradients_that_are_kept_elsewhere_are_not_taken_for_none() -> None:
    model = tiny_distilbert()
    elsewhere = torch.nn.Parameter(torch.ones(7))
    elsewhere.grad = torch.ones(7)
    optimizer = torch.optim.SGD([elsewhere], lr=0.1)
    probe = StepProbe(model, optimizer, lambda optimizer: 0.1)
    optimizer.step()
    assert (probe.weights_bytes, probe.gradients_bytes, probe.without_gradient) == (557_832, None, ())


def test_a_parameter_without_gradient_is_said_to_have_its_place_in_a_bucket() -> None:
    size = inspect_optimizer(torch.optim.SGD([torch.nn.Parameter(torch.ones(3))], lr=0.1))
    (alone,) = state_notes(size, without_gradient=("pooler.bias",), predicted_bytes=0)
    (among_others,) = state_notes(size, without_gradient=("pooler.bias",), predicted_bytes=0, in_buckets=True)
    assert alone.endswith("pooler.bias. The estimate counts them.")
    assert among_others.endswith("counts them, and a bucket of DDP keeps a place for each gradient.")


def test_no_context_is_learnt_from_a_run_of_several_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "history.jsonl"))
    spread = DistributionFacts(world_size=4, shard="fsdp")
    assert remember(cuda_records.completed().model_copy(update={"distribution": spread})) is None
    (line,) = histories.read(tmp_path / "history.jsonl")
    assert line["batch"].endswith(" x 4 fsdp")
    assert line["context_how"] == "with what 4 processes exchange through"
    assert context_for("NVIDIA GeForce RTX 4090") == ASSUMED
    assert remember(cuda_records.completed()) is None
    assert context_for("NVIDIA GeForce RTX 4090").basis == "learnt"


@pytest.mark.parametrize("off", ["weights_bytes", "gradients_bytes", "optimizer_state_bytes"])
def test_a_rank_beyond_the_first_that_holds_more_than_predicted_fails_the_tolerance(off: str) -> None:
    record = records.planned()
    amounts = {
        "weights_bytes": record.model.weights_bytes,
        "gradients_bytes": record.model.gradients_bytes,
        "optimizer_state_bytes": record.optimizer.state_bytes,
        "optimizer_state_elements": record.optimizer.state_elements,
    }
    predicted = [
        RankAmounts(rank=rank, communication_bytes=0, total_before_activations_bytes=0, **amounts) for rank in range(2)
    ]
    wrong = [amounts, {**amounts, off: 2 * amounts[off]}]
    held = [
        RankMeasured(rank=rank, device="cpu", peak_allocated_bytes=None, peak_rss_bytes=0, **of_one)
        for rank, of_one in enumerate(wrong)
    ]
    record = record.model_copy(
        update={
            "distribution": DistributionFacts(world_size=2, shard="ddp"),
            "optimizer": record.optimizer.model_copy(update={"per_rank": tuple(predicted)}),
        }
    )
    done = records.completed(record, measured=records.measured(record, per_rank=tuple(held)))
    assert "Within 100 %" in check_prediction(done, 100)
    with pytest.raises(PredictionError, match=r"of other ranks: predicted .* measured .*100\.0 % off; allowed 99 %"):
        check_prediction(done, 99)
    # Nobody was asked in a run that failed: that is said, and rank 0 is compared alone.
    alone = records.completed(record, measured=records.measured(record))
    assert "Not compared: optimizer state of other ranks, weights of other ranks" in check_prediction(alone, 0)
