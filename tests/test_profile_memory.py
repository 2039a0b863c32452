"""The profiled update: predicted and measured peak agree, the measured one is true, and nothing else changes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from itertools import islice, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from effcli import pipeline
from effcli.data.batches import EpochBatchSampler
from effcli.engines.window import windows
from effcli.engines.window_schedule import Position, WindowSchedule
from effcli.measure.profiled import NUM_POINTS, NotRecordedError, UpdateProfiler
from effcli.optim import registry
from effcli.optim.groups import decay_groups
from effcli.pipeline.running.profiled_window import MicroBatch, batch_bytes, choose_window
from effcli.report.progress import QuietProgress
from tests.commands import csv_file, data_flags, effcli, same_weights, saved_weights, untimed
from tests.full_memory import no_memory_in
from tests.jobs import ENGINES
from tests.profiled import live_bytes, profiled_peak
from tests.stopped_runs import settings, train_and_stop

TASKS = ("classification", "causal-lm")
OPTIMIZERS = ("adamw", "adafactor", "adam8bit")
EVERY = list(product(TASKS, OPTIMIZERS, (1, 2), ENGINES))
SOME = {(task, optim, 1 + (place + number) % 2, ENGINES[(place + 2 * number) % 3])
        for number, task in enumerate(TASKS) for place, optim in enumerate(OPTIMIZERS)}  # fmt: skip
"""Each engine with each task, each optimizer with and without accumulation."""


def profiled(folder: Path, task: str, *flags: object, model: Path) -> dict[str, Any]:
    """Return the record of seven updates of two or four rows, one of them profiled."""
    data = csv_file(folder / "d.csv", 30)
    common = ("--batch-size", 2, "--max-steps", 7, "--profile-memory", "--json", "--out", folder / "o")
    return effcli("train", model, *data_flags(task, data), *common, *flags).record


@pytest.mark.parametrize(
    ("task", "optim", "accum", "engine"),
    [pytest.param(*case, marks=() if case in SOME else pytest.mark.slow) for case in EVERY],
)
def test_the_planned_peak_is_the_measured_one(
    task: str, optim: str, accum: int, engine: str, tmp_path: Path, distilbert: Path, gpt2: Path
) -> None:
    model = distilbert if task == "classification" else gpt2
    record = profiled(tmp_path, task, "--optim", optim, "--accum", accum, "--engine", engine, model=model)
    facts = record["measured"]["profiled"]
    assert facts["planned_peak_allocated_bytes"] == pytest.approx(facts["peak_allocated_bytes"], rel=1e-3)
    assert facts["peak_allocated_bytes"] == record["measured"]["peak_allocated_bytes"]
    assert max(facts["timeline_bytes"]) == facts["peak_allocated_bytes"]
    assert len(facts["timeline_bytes"]) <= NUM_POINTS
    assert (facts["update"] > 1, facts["rows"]) == (True, 2)


@pytest.mark.parametrize(("task", "optim", "accum"), [("classification", "adamw", 2), ("causal-lm", "adafactor", 1)])
def test_the_measured_peak_is_that_of_such_an_update_made_by_hand(
    task: str, optim: str, accum: int, tmp_path: Path, distilbert: Path, gpt2: Path
) -> None:
    folder = distilbert if task == "classification" else gpt2
    record = profiled(tmp_path, task, "--optim", optim, "--accum", accum, model=folder)
    facts = record["measured"]["profiled"]
    auto = AutoModelForSequenceClassification if task == "classification" else AutoModelForCausalLM
    model = auto.from_config(AutoConfig.from_pretrained(folder)).train()
    model.config.use_cache = False
    entry = registry.find(optim)
    hyper = registry.default_hyper(entry)
    optimizer = entry.build(decay_groups(model, 0.01), hyper)

    def update() -> None:
        mask = torch.ones(facts["rows"], facts["tokens"], dtype=torch.int64)
        mask[0, -1] = 0
        batches = [{"input_ids": torch.full_like(mask, 5), "attention_mask": mask.clone()} for _ in range(accum)]
        held = [torch.ones_like(mask if task == "causal-lm" else mask[:, 0]) for _ in range(accum)]
        for batch, labels in zip(batches, held, strict=True):
            if task == "causal-lm":
                logits = model(**batch).logits.flatten(0, 1)
                loss = torch.nn.functional.cross_entropy(logits, labels.flatten(), reduction="sum") / labels.numel()
                del logits
            else:
                loss = torch.nn.functional.cross_entropy(model(**batch).logits, labels)
            loss.backward()
            del loss
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    update()
    by_hand = live_bytes(model, optimizer) + profiled_peak(update)
    assert facts["peak_allocated_bytes"] == pytest.approx(by_hand, rel=1e-3)


@pytest.mark.usefixtures("without_plan")
@pytest.mark.parametrize("engine", ENGINES)
def test_nothing_that_is_learnt_changes(engine: str, tmp_path: Path) -> None:
    records = []
    for out, asked in (("plain", False), ("profiled", True)):
        flags = settings(tmp_path, out, {"name": "adamw"}, engine=engine, profile_memory=asked)
        records.append(pipeline.train(pipeline.resolve_spec(flags), progress=QuietProgress()))
    plain, profiled = records
    assert (plain.measured.profiled, plain.measured.peak_allocated_bytes) == (None, None)
    assert profiled.measured.profiled.peak_allocated_bytes > profiled.measured.optimizer_state_bytes
    assert untimed(plain.history) == untimed(profiled.history)
    assert plain.eval == profiled.eval
    assert same_weights(saved_weights(tmp_path / "plain"), saved_weights(tmp_path / "profiled"))
    number = profiled.measured.profiled.update
    seconds = [0.0, *(line.training_s for line in profiled.history)]
    assert [update for update in range(1, 11) if seconds[update] == seconds[update - 1]] == [number]
    assert profiled.throughput.updates_per_second == pytest.approx(9 / seconds[-1])


def test_a_run_of_one_update_has_no_warm_one(tmp_path: Path, distilbert: Path, data: Path) -> None:
    flags = ("--data", data, "--max-steps", 1, "--profile-memory", "--out", tmp_path / "o", "--json")
    record = effcli("train", distilbert, *flags).record
    assert (record["measured"]["profiled"], record["measured"]["peak_allocated_bytes"]) == (None, None)
    assert "--profile-memory: n/a, the first update is made cold, and there is no other." in record["notes"]


def test_batches_of_worker_processes_are_counted_or_nothing_is(tmp_path: Path, distilbert: Path) -> None:
    workers = ("--num-workers", 1, "--accum", 2)
    facts = profiled(tmp_path, "classification", *workers, model=distilbert)["measured"]["profiled"]
    assert facts["planned_peak_allocated_bytes"] == pytest.approx(facts["peak_allocated_bytes"], rel=1e-3)
    more = ("--engine", "accelerate", "--overwrite")
    record = profiled(tmp_path, "classification", *workers, *more, model=distilbert)
    assert record["measured"]["profiled"] is None
    assert any("n/a, with --num-workers accelerate holds a batch" in note for note in record["notes"])


@pytest.mark.usefixtures("without_plan")
def test_a_resumed_run_keeps_the_higher_peak(tmp_path: Path) -> None:
    flags = settings(tmp_path, "run", {"name": "adamw"}, profile_memory=True)
    train_and_stop(flags, after=9)
    before = json.loads((tmp_path / "run" / "record.json").read_text())["measured"]["profiled"]
    assert before["update"] in range(2, 10)
    spec = pipeline.resolve_spec({}, resume_from=str(tmp_path / "run"))
    rest = pipeline.train(spec, progress=QuietProgress(), resume=True)  # its only update is the first of this process
    assert rest.measured.profiled.model_dump(mode="json") == before
    more = pipeline.resolve_spec({"loop": {"epochs": 5, "batch_size": 20}}, resume_from=str(tmp_path / "run"))
    larger = pipeline.train(more, progress=QuietProgress(), resume=True).measured.profiled
    assert (larger.update, larger.rows) == (12, 20)
    assert larger.peak_allocated_bytes > before["peak_allocated_bytes"]


@pytest.mark.usefixtures("without_plan")
def test_a_resumed_run_may_begin_to_profile(tmp_path: Path) -> None:
    train_and_stop(settings(tmp_path, "run", {"name": "adamw"}), after=3)
    spec = pipeline.resolve_spec({"loop": {"profile_memory": True}}, resume_from=str(tmp_path / "run"))
    rest = pipeline.train(spec, progress=QuietProgress(), resume=True)
    assert rest.measured.profiled.update in range(5, 11)


@pytest.mark.usefixtures("without_plan")
def test_a_run_that_fails_in_the_profiled_update_stops_the_profiler(
    tmp_path: Path, distilbert: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    hold = UpdateProfiler.start

    def start(profiler: UpdateProfiler) -> None:
        hold(profiler)
        no_memory_in(monkeypatch, "backward")
        seen.append(torch.autograd._profiler_enabled())

    monkeypatch.setattr(UpdateProfiler, "start", start)
    flags = ("--data", data, "--batch-size", 2, "--epochs", 1, "--profile-memory", "--out", tmp_path / "o", "--json")
    failed = effcli("train", distilbert, *flags)
    assert (failed.code, seen, torch.autograd._profiler_enabled()) == (5, [True], False)
    record = json.loads((tmp_path / "o" / "record.json").read_text())
    assert (record["status"], record["measured"]["profiled"]) == ("failed", None)
    assert any("--profile-memory: n/a, the run ended before" in note for note in record["notes"])


@pytest.mark.usefixtures("without_plan")
def test_a_profiler_of_the_caller_goes_on(tmp_path: Path) -> None:
    flags = settings(tmp_path, "run", {"name": "adamw"}, profile_memory=True, max_steps=2)
    with torch.profiler.profile() as own:
        record = pipeline.train(pipeline.resolve_spec(flags), progress=QuietProgress())
    assert "--profile-memory: n/a, another profiler is running." in record.notes
    assert sum("AdamW" in event.key for event in own.key_averages())


@pytest.mark.slow
def test_torch_prints_nothing_about_it(tmp_path: Path) -> None:
    command = (sys.executable, "-m", "effcli", "train", "--max-steps", "7", "--limit-rows", "200", "--out", "o")
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "profiled; 16 rows x" in done.stdout
    assert not [line for line in done.stderr.splitlines() if "profil" in line or "Memory block" in line]


def test_live_bytes_are_counted_from_what_was_there() -> None:
    model = torch.nn.Linear(1000, 10, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    profiler = UpdateProfiler(model, optimizer)
    collate = profiler.watching(lambda rows: {"x": torch.zeros(rows, 50)})
    gone, waiting = collate(3), collate(5)
    with torch.no_grad():
        profiler.start()
        gone.clear()  # as the batch of the update before: freed unseen
        model(torch.zeros(2, 1000))
        kept = torch.zeros(7000)
        found = profiler.stop()
    held = 4 * (1000 * 10 + 5 * 50)
    assert found.peak_allocated_bytes == held + 4 * 7000
    assert held + 4 * 2 * (1000 + 10) in found.timeline_bytes
    assert (found.rows, found.tokens) == (2, 1000)
    assert len(kept) + len(waiting) == 7001


def test_a_long_timeline_keeps_its_highest_moments() -> None:
    model = torch.nn.Linear(10, 10)
    profiler = UpdateProfiler(model, torch.optim.SGD(model.parameters()))
    profiler.start()
    model(torch.zeros(1, 10))
    for size in (*range(1, 900), 100_000, *range(1, 900)):
        torch.zeros(size)
    found = profiler.stop()
    assert len(found.timeline_bytes) <= NUM_POINTS
    assert sum(amount > 400_000 for amount in found.timeline_bytes) == 1
    assert max(found.timeline_bytes) == found.peak_allocated_bytes


def replace_state(optimizer: torch.optim.Optimizer, parameter: torch.nn.Parameter) -> None:
    optimizer.state[parameter]["momentum_buffer"] = optimizer.state[parameter]["momentum_buffer"].clone()


def replace_weights(optimizer: torch.optim.Optimizer, parameter: torch.nn.Parameter) -> None:
    parameter.data = parameter.data.clone()


@pytest.mark.parametrize("replace", [replace_state, replace_weights])
def test_state_that_is_freed_unseen_is_no_measurement(replace: Callable[..., None]) -> None:
    """What is freed where an earlier recording saw something allocated is seen (torch 2.13): models elsewhere, then."""
    models = [torch.nn.Linear(1000, 10, bias=False) for _ in range(10)]
    said = {refusal(model, replace) for model in models}
    assert said - {""} == {
        "39.06 KiB of weights and optimizer state were replaced in the update, and torch's profiler does not see when "
        "the former ones are freed"
    }


def refusal(model: torch.nn.Module, replace: Callable[..., None]) -> str:
    """Return why an update in which something is replaced is no measurement; empty where it is one."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.zeros(2, 1000)).sum().backward()
    optimizer.step()
    profiler = UpdateProfiler(model, optimizer)
    profiler.start()
    model(torch.zeros(2, 1000))
    replace(optimizer, model.weight)
    try:
        profiler.stop()
    except NotRecordedError as error:
        return str(error)
    return ""


ROWS = np.random.default_rng(5).integers(2, 30, 23)


@pytest.mark.parametrize("size", [(1, 1), (2, 3), (4, 2), (23, 1), (5, 5)])
@pytest.mark.parametrize(("start", "total"), [(0, 40), (0, 2), (3, 9), (7, 8), (0, 1)])
def test_the_largest_micro_batch_to_come_is_chosen(size: tuple[int, int], start: int, total: int) -> None:
    batch_size, accum = size
    schedule = WindowSchedule(num_rows=23, batch_size=batch_size, accum=accum)
    if start and schedule.updates_per_epoch < 3:
        schedule = WindowSchedule(num_rows=23, batch_size=batch_size, accum=accum, origin=Position(update=3, rows=4))
    sampler = EpochBatchSampler(23, batch_size, 42, torch.tensor([4, 5, 6]))
    made: dict[int, list[list[int]]] = {}
    update = start
    while update < total:
        position = schedule.position(update)
        sampler.set_epoch(position.epoch)
        sampler.skip_next(position.rows)
        for window in islice(windows(sampler, accum), total - update):
            update += 1
            made[update] = window

    chosen = choose_window(sampler, [ROWS], schedule, start_update=start, total_updates=total)

    def sizes(window: list[list[int]]) -> list[int]:
        return [len(rows) * max(ROWS[rows]) for rows in window]

    candidates = {number: sizes(window) for number, window in made.items() if number > start + 1}
    assert (chosen is None) == (not candidates)
    if chosen is not None:
        window = made[chosen.update]
        assert max(candidates[chosen.update]) == max(map(max, candidates.values()))
        assert [(batch.rows, batch.tokens, batch.padded) for batch in chosen.batches] == [
            (len(rows), max(ROWS[rows]), min(ROWS[rows]) < max(ROWS[rows])) for rows in window
        ]
        assert list(chosen.example) in window
        assert (chosen.following is None) == (chosen.update + schedule.offset in ends_of_epochs(schedule, total))


def ends_of_epochs(schedule: WindowSchedule, total: int) -> list[int]:
    """Return the numbers, counted as in a run that never changed its window, of updates that end an epoch."""
    return [number * schedule.updates_per_epoch for number in range(1, total + 1)]


def test_a_seq2seq_batch_takes_what_its_sources_and_targets_take() -> None:
    def made(rows: int, tokens: int, targets: int) -> dict[str, torch.Tensor]:
        source, target = torch.ones(rows, tokens, dtype=torch.int64), torch.ones(rows, targets, dtype=torch.int64)
        return {"input_ids": source, "attention_mask": source, "labels": target, "decoder_input_ids": target}

    shapes = [(2, 7, 3), (3, 4, 4), (1, 2, 2)]
    batches = [MicroBatch(rows=r, tokens=t, target_tokens=k, padded=True) for r, t, k in shapes]
    expected = sum(tensor.nbytes for shape in shapes for tensor in made(*shape).values())
    assert batch_bytes(batches, made(5, 6, 7)) == expected
