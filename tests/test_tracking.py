"""`--track`: what services are told, read back by their own readers, and that nothing they do changes a run."""

from __future__ import annotations

import os
import random
import signal
import statistics
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate.state import PartialState
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker

from effcli import pipeline
from effcli.engines.process_state import forget_states
from effcli.errors import InterruptedRunError
from effcli.measure.reading import read_record
from effcli.measure.record import RunRecord
from effcli.report.progress import QuietProgress
from effcli.tracking import tracking
from effcli.tracking.services import SERVICES, Service
from effcli.tracking.values import config_values
from tests.commands import Result, effcli, same_weights, saved_weights
from tests.jobs import ENGINES
from tests.stopped_runs import settings

pytestmark = pytest.mark.usefixtures("without_plan")

WORDS = ("--batch-size", 2, "--accum", 2, "--epochs", 2, "--lr", 1e-3, "--json")
"""Ten updates on 20 rows of two words and more, with dropout, evaluated after the fifth and the last."""
MEMORY = ("weights_bytes", "gradients_bytes", "optimizer_state_bytes")


def train(folder: Path, out: str, *flags: object, **changes: Any) -> Result:
    """Return what the command says that trains ten updates."""
    made = settings(folder, out, {}, **changes)
    where = ("--data", made["data"]["train"], "--eval-data", made["data"]["eval"], "--out", folder / out)
    return effcli("train", made["model"]["name"], *where, *WORDS, *flags)


def told(folder: Path) -> dict[str, dict[int, list[float]]]:
    """Return what TensorBoard's own reader finds in a run folder: values by step, by name."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tracking/tensorboard"))
    events.Reload()
    found: dict[str, dict[int, list[float]]] = {}
    for name in events.Tags()["scalars"]:
        for event in events.Scalars(name):
            found.setdefault(name, {}).setdefault(event.step, []).append(event.value)
    return found


def in_32_bit(values: dict[int, float]) -> dict[int, list[float]]:
    """Return values by step as TensorBoard keeps them."""
    return {step: [float(np.float32(value))] for step, value in values.items()}


class Heard(GeneralTracker):
    """A tracker that keeps what it is told, and at a step does what the test wants."""

    name = "wandb"
    requires_logging_directory = False
    tracker = None

    def __init__(self, run_name: str) -> None:
        super().__init__()
        self.calls: list[tuple[Any, ...]] = [("made", run_name)]
        self.status: str | None = None
        self.at_step: tuple[int, Callable[[], object]] = (0, lambda: None)

    def start(self) -> None:
        assert PartialState().num_processes == 1
        self.calls.append(("start",))

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.calls.append(("config", values))

    def log(self, values: dict[str, Any], step: int | None = None, **ignored: Any) -> None:
        self.calls.append(("log", step, values))
        due, do = self.at_step
        if step == due:
            self.at_step = (0, do)
            do()

    def finish(self) -> None:
        self.calls.append(("finish", self.status))

    @property
    def steps(self) -> list[int]:
        """Return the updates that losses came with."""
        return [step for _, step, values in (call for call in self.calls if call[0] == "log") if "train/loss" in values]


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch) -> Heard:
    """Return a tracker that stands in for wandb's."""
    tracker = Heard("a run")

    def end(same: Heard, status: str) -> None:
        same.status = status

    service = Service(package="json", arguments=lambda place: {"run_name": place.name}, end=end)
    monkeypatch.setitem(SERVICES, "wandb", service)

    def make(run_name: str) -> Heard:
        tracker.calls.append(("made", run_name))
        return tracker

    monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, "wandb", make)
    return tracker


@pytest.mark.parametrize("engine", ENGINES)
def test_tensorboard_reads_the_losses_rates_scores_and_bytes_of_the_record(engine: str, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    flags = ("--engine", engine, "--logging-steps", 3)
    record = RunRecord.model_validate(train(tmp_path, "tracked", *flags, "--track", "tensorboard").record)
    found = told(tmp_path / "tracked")

    lines = {line.update: line for line in record.history}
    due = {3: (1, 2, 3), 6: (4, 5, 6), 9: (7, 8, 9), 10: (10,)}
    means = {step: statistics.fmean(lines[update].loss for update in updates) for step, updates in due.items()}
    assert found["train/loss"] == in_32_bit(means)
    assert found["train/learning_rate"] == in_32_bit({step: lines[step].lr for step in due})
    assert found["train/grad_norm"] == in_32_bit({step: lines[step].grad_norm for step in due})
    assert found["train/epoch"] == in_32_bit({step: lines[step].epoch for step in due})
    for name in ("loss", "accuracy", "f1"):
        scores = {line.update: getattr(line, f"eval_{name}") for line in record.eval}
        assert found[f"eval/{name}"] == in_32_bit(scores)
    assert "eval/perplexity" not in found
    sizes = {"predicted": {**record.model.model_dump(), "optimizer_state_bytes": record.optimizer.state_bytes},
        "measured": record.measured.model_dump()}  # fmt: skip
    for name in MEMORY:
        for kind, amounts in sizes.items():
            assert found[f"memory/{name}/{kind}"] == in_32_bit({10: amounts[name]})
    assert found["throughput/samples_per_second"] == in_32_bit({10: record.throughput.samples_per_second})

    plain = RunRecord.model_validate(train(tmp_path, "plain", *flags).record)
    assert [line.loss for line in plain.history] == [line.loss for line in record.history]
    assert same_weights(saved_weights(tmp_path / "plain"), saved_weights(tmp_path / "tracked"))


def test_tensorboard_shows_each_update_once_where_a_run_goes_on(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    made = settings(tmp_path, "parts", {})
    made["output"] |= {"track": "tensorboard", "logging_steps": 1, "save_every": 2}
    with pytest.raises(InterruptedRunError):
        pipeline.train(pipeline.resolve_spec(made), progress=QuietProgress(), stop_after_updates=5)
    newest = max((tmp_path / "parts/checkpoints").iterdir())
    (newest / "model.safetensors").write_bytes(b"")  # as a kill leaves it: update 5 is made once more
    resumed = pipeline.train(
        pipeline.resolve_spec({}, resume_from=str(tmp_path / "parts")), progress=QuietProgress(), resume=True
    )
    assert any("damaged" in note for note in resumed.notes)
    assert told(tmp_path / "parts")["train/loss"] == in_32_bit({line.update: line.loss for line in resumed.history})


def test_a_run_whose_folder_was_renamed_goes_on_under_the_name_it_began_with(heard: Heard, tmp_path: Path) -> None:
    made = settings(tmp_path, "first", {})
    made["output"] |= {"track": "wandb", "save_every": 2}
    with pytest.raises(InterruptedRunError):
        pipeline.train(pipeline.resolve_spec(made), progress=QuietProgress(), stop_after_updates=2)
    moved = (tmp_path / "first").rename(tmp_path / "second")
    pipeline.train(pipeline.resolve_spec({}, resume_from=str(moved)), progress=QuietProgress(), resume=True)
    assert [call[1] for call in heard.calls if call[0] == "made"] == ["a run", "first", "first"]


def test_a_run_that_replaces_another_leaves_nothing_of_what_was_told_of_it(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    for max_steps in (4, 2):
        flags = ("--max-steps", max_steps, "--track", "tensorboard", "--logging-steps", 1, "--overwrite")
        assert train(tmp_path, "out", *flags).code == 0
    assert sorted(told(tmp_path / "out")["train/loss"]) == [1, 2]


def test_without_the_flag_no_package_is_asked_for_and_no_folder_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("effcli.tracking.services.require_package", pytest.fail)
    assert train(tmp_path, "out", "--max-steps", 1).code == 0
    assert not (tmp_path / "out/tracking").exists()


@pytest.mark.parametrize("name", ["mlflow", "tensorboard", "trackio", "wandb"])
def test_a_package_that_is_missing_is_named_before_anything_is_read(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    result = effcli("train", "--data", "no-such-file.csv", "--track", name)
    assert result.code == 3
    assert result.error.endswith(f"type: pip install 'effcli[{name}]'")


def test_an_unknown_service_is_refused_with_the_nearest_one() -> None:
    result = effcli("train", "--track", "tensorbord")
    assert result.code == 2
    assert "--track" in result.error
    assert "Did you mean 'tensorboard'?" in result.error


def test_a_run_is_named_after_its_folder_and_ends_as_completed(heard: Heard, tmp_path: Path) -> None:
    forget_states()
    assert train(tmp_path, "out", "--track", "wandb", "--logging-steps", 4).code == 0
    assert heard.calls[1] == ("made", "out")
    assert heard.calls[2] == ("start",)
    kind, config = heard.calls[3]
    assert kind == "config"
    assert config["loop.accum"] == 2
    assert config["optim.lr"] == 1e-3
    assert all(isinstance(value, bool | int | float | str) for value in config.values())
    assert heard.steps == [4, 8, 10]
    assert heard.calls[-1] == ("finish", "completed")
    assert PartialState._shared_state == {}, "the next run in the process would take this one's device"


@pytest.mark.parametrize(
    ("flags", "code", "status"), [(("--lr", "1e30"), 7, "failed"), (("--max-steps", "3"), 0, "completed")]
)
def test_a_run_ends_with_the_status_of_its_record(
    flags: tuple[str, ...], code: int, status: str, heard: Heard, tmp_path: Path
) -> None:
    assert train(tmp_path, "out", "--track", "wandb", *flags).code == code
    assert heard.calls[-1] == ("finish", status)
    assert read_record(tmp_path / "out/record.json").status == status


def test_a_signal_ends_the_run_as_interrupted(heard: Heard, tmp_path: Path) -> None:
    heard.at_step = (4, lambda: os.kill(os.getpid(), signal.SIGTERM))
    assert train(tmp_path, "out", "--track", "wandb", "--logging-steps", 2).code == 143
    assert heard.calls[-1] == ("finish", "interrupted")
    assert heard.steps == [2, 4]


@pytest.mark.parametrize("during", ["start", "log"])
def test_a_second_signal_waits_for_no_service(
    during: str, heard: Heard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stuck = threading.Event()

    def interrupt_twice() -> None:
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
            stuck.wait(0.2)
        stuck.wait(60)

    if during == "start":
        monkeypatch.setattr(heard, "start", interrupt_twice)
    heard.at_step = (2, interrupt_twice)
    monkeypatch.setattr(tracking, "FINISH_S", -1.0)  # a wait for the end would fail, and be told
    result = train(tmp_path, "out", "--track", "wandb", "--logging-steps", 2)
    stuck.set()
    assert result.code == 130
    assert "stopped at once" in result.error
    assert "failed" not in result.stderr
    assert heard.calls[-1][0] == {"start": "made", "log": "log"}[during]


@pytest.mark.parametrize("failure", ["raises", "exits", "hangs"])
def test_a_service_that_fails_on_the_way_is_told_no_more_and_the_run_goes_on(
    failure: str, heard: Heard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stuck = threading.Event()

    def raises() -> None:
        raise ConnectionError("no route to https://user:pass-word@host")

    fail = {"raises": raises, "exits": lambda: sys.exit(1), "hangs": lambda: stuck.wait(60)}[failure]

    def fail_next() -> None:
        heard.at_step = (4, fail)
        if failure == "hangs":  # only from here on, since a busy machine takes its time for the calls that end
            monkeypatch.setattr(tracking, "LOG_S", 0.3)

    heard.at_step = (2, fail_next)
    result = train(tmp_path, "out", "--track", "wandb", "--logging-steps", 2)
    stuck.set()
    assert result.record["status"] == "completed"
    assert heard.steps == [2, 4]
    (note,) = [note for note in result.record["notes"] if "wandb" in note]
    assert note in result.stderr
    assert "the run goes on without it" in note
    assert "pass-word" not in result.stderr + result.stdout


def test_a_service_that_fails_when_the_run_ends_is_noted_in_the_record(
    heard: Heard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails() -> None:
        raise ConnectionError("connection reset")

    monkeypatch.setattr(heard, "finish", fails)
    result = train(tmp_path, "out", "--track", "wandb")
    (note,) = [note for note in result.record["notes"] if "wandb" in note]
    assert "connection reset" in note
    assert result.stderr.count(note) == 1
    assert note in read_record(tmp_path / "out/record.json").notes


def test_a_service_that_does_not_begin_stops_the_run_in_one_line(
    heard: Heard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> None:
        raise ConnectionError("connection refused\nand a second line")

    monkeypatch.setattr(heard, "start", refuse)
    result = train(tmp_path, "out", "--track", "wandb")
    assert result.code == 8
    assert result.error == "--track wandb did not begin: ConnectionError: connection refused; leave it out to train"
    assert read_record(tmp_path / "out/record.json").status == "failed"
    assert heard.steps == []


def test_a_service_that_cannot_work_is_refused_before_anything_is_read(
    heard: Heard, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nobody() -> None:
        raise RuntimeError("nobody is logged in")

    monkeypatch.setitem(SERVICES, "wandb", replace(SERVICES["wandb"], check=nobody))
    result = effcli("train", "--data", "no-such-file.csv", "--track", "wandb")
    assert result.code == 2
    assert result.error == "--track wandb: nobody is logged in"


@pytest.mark.parametrize("engine", ENGINES)
def test_a_service_that_draws_from_the_generators_and_prints_changes_nothing(
    engine: str, heard: Heard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def meddle() -> None:
        random.seed(1)
        np.random.seed(1)
        torch.manual_seed(1)
        print("this would spoil a JSON document")

    flags = ("--engine", engine, "--logging-steps", 1, "--max-steps", 4)
    plain = train(tmp_path, "plain", *flags).record
    monkeypatch.setattr(heard, "start", meddle)
    heard.at_step = (2, meddle)
    tracked = train(tmp_path, "tracked", *flags, "--track", "wandb").record
    assert [line["loss"] for line in tracked["history"]] == [line["loss"] for line in plain["history"]]
    assert same_weights(saved_weights(tmp_path / "plain"), saved_weights(tmp_path / "tracked"))


def test_the_configuration_is_told_without_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATA_TOKEN", "very-secret-token")
    values = config_values(
        {
            "data": {"train": "https://user:pass-word@host/x.csv", "eval": None, "text_columns": ["a", "b"]},
            "model": {"name": "org/very-secret-token"},
            "optim": {"args": {"momentum": 0.9}, "overrides": {"embed": {"lr": 1e-5}}, "keep_32bit": []},
        }
    )
    assert values == {
        "data.train": "https://***@host/x.csv",
        "data.text_columns": "a, b",
        "model.name": "org/***",
        "optim.args.momentum": 0.9,
        "optim.overrides": '{"embed": {"lr": 1e-05}}',
    }


@pytest.mark.filterwarnings("default")
def test_wandb_keeps_a_run_offline_in_the_run_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setattr(sys, "argv", ["effcli", "--data", "https://user:pass-word@host/x"])
    assert train(tmp_path, "out", "--track", "wandb").code == 0
    (run,) = (tmp_path / "out/tracking/wandb").glob("offline-run-*/run-*.wandb")
    kept = run.read_bytes()
    assert b"memory/optimizer_state_bytes/measured" in kept
    assert b"pass-word" not in kept


@pytest.mark.filterwarnings("default")
def test_mlflow_keeps_a_run_in_a_database_in_the_run_folder(tmp_path: Path) -> None:
    pytest.importorskip("mlflow")
    record = train(tmp_path, "out", "--track", "mlflow", "--logging-steps", 5).record
    assert "MLFLOW_TRACKING_URI" not in os.environ
    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"sqlite:///{tmp_path / 'out/tracking/mlflow.db'}")
    (run,) = client.search_runs([client.get_experiment_by_name("effcli").experiment_id])
    assert run.info.run_name == "out"
    assert run.info.status == "FINISHED"
    assert run.data.params["loop.accum"] == "2"
    losses = {metric.step: metric.value for metric in client.get_metric_history(run.info.run_id, "train/loss")}
    means = (statistics.fmean(line["loss"] for line in record["history"][start : start + 5]) for start in (0, 5))
    assert losses == dict(zip((5, 10), means, strict=True))
    measured = record["measured"]["optimizer_state_bytes"]
    assert run.data.metrics["memory/optimizer_state_bytes/measured"] == measured


@pytest.mark.filterwarnings("default")
def test_trackio_keeps_a_run_where_it_keeps_all(tmp_path: Path) -> None:
    trackio = pytest.importorskip("trackio")
    record = train(tmp_path, "out", "--track", "trackio", "--logging-steps", 10).record
    (run,) = trackio.Api().runs("effcli")
    assert run.name.startswith("out-")
    assert run.config["loop.accum"] == 2
    from trackio.sqlite_storage import SQLiteStorage

    (loss,) = [line["train/loss"] for line in SQLiteStorage.get_logs("effcli", run.name) if "train/loss" in line]
    assert loss == pytest.approx(statistics.fmean(line["loss"] for line in record["history"]))
