"""SIGINT and SIGTERM at every stage of a run: the exit code, what is saved, what is said, and the run that goes on."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_pre_hook

from effcli import pipeline
from effcli.cli.boundary import interrupt_on_signals
from effcli.errors import InterruptedRunError
from effcli.files import DRAFT
from effcli.interruption import forget_interruption
from effcli.report.progress import QuietProgress
from tests.commands import saved_weights
from tests.jobs import ENGINES
from tests.stopped_runs import settings

pytestmark = pytest.mark.usefixtures("without_plan")


class Told(QuietProgress):
    """Keeps what is said; sends `at_start` when training starts, `at_step` signals in the middle of that update, and
    `in_evaluation` ones in the first forward pass of an evaluation."""

    def __init__(
        self,
        *,
        at_start: Sequence[int] = (),
        at_step: tuple[int, Sequence[int]] = (0, ()),
        in_evaluation: Sequence[int] = (),
    ) -> None:
        self.notes: list[str] = []
        self._at_start, self._in_evaluation, self._at_step = at_start, list(in_evaluation), at_step
        self._steps = 0
        self._handles: list[Any] = []

    def note(self, text: str) -> None:
        self.notes.append(text)

    def start(self, *, first_update: int, total_updates: int) -> None:
        self._handles.append(register_optimizer_step_pre_hook(self._step))
        self._handles.append(register_module_forward_pre_hook(self._forward))
        send(*self._at_start)

    def stop(self) -> None:
        while self._handles:
            self._handles.pop().remove()

    def _step(self, *ignored: Any) -> None:
        self._steps += 1
        if self._steps == self._at_step[0]:
            send(*self._at_step[1])

    def _forward(self, module: torch.nn.Module, given: Any) -> None:
        if not module.training:
            numbers, self._in_evaluation = self._in_evaluation, []
            send(*numbers)


def send(*numbers: int) -> None:
    for number in numbers:
        os.kill(os.getpid(), number)


def stopped(flags: dict[str, Any], progress: Told, **more: Any) -> InterruptedRunError:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with pytest.raises(InterruptedRunError) as raised:
        pipeline.train(pipeline.resolve_spec(flags), progress=progress, **more)
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
    assert "\n" not in str(raised.value)
    return raised.value


def record_of(flags: dict[str, Any]) -> dict[str, Any]:
    return json.loads((Path(flags["output"]["out"]) / "record.json").read_text())


def updates_saved(flags: dict[str, Any]) -> list[int]:
    folder = Path(flags["output"]["out"])
    assert not list(folder.rglob(f"{DRAFT}*"))
    return [int(path.name.removeprefix("update-")) for path in sorted(folder.glob("checkpoints/*"))]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.slow)]
)
def test_a_signal_during_update_3_stops_after_it_with_its_state_saved(
    engine: str, number: int, code: int, tmp_path: Path
) -> None:
    flags, progress = settings(tmp_path, "o", {}, engine=engine), Told(at_step=(3, [number]))
    error = stopped(flags, progress)
    assert error.exit_code == code
    assert "stopped after update 3 of 10; the state is saved" in str(error)
    assert progress.notes.count("stopping after this update; press again to stop at once") == 1
    assert updates_saved(flags) == [3]
    record = record_of(flags)
    assert (record["status"], len(record["history"])) == ("interrupted", 3)


def test_a_second_signal_stops_at_once_and_says_what_is_lost(tmp_path: Path) -> None:
    flags = settings(tmp_path, "o", {})
    error = stopped(flags, Told(at_step=(3, [signal.SIGINT, signal.SIGINT])))
    assert error.exit_code == 130
    assert "stopped at once after update 2 of 10; no state was saved before" in str(error)
    assert updates_saved(flags) == []
    flags["output"]["save_every"] = 2
    error = stopped(flags, Told(at_step=(8, [signal.SIGTERM, signal.SIGINT])), resume=True)
    assert "after update 7 of 10; the state after update 6 is saved; 1 later update is lost" in str(error)
    assert updates_saved(flags) == [4, 6]
    assert [line["update"] for line in record_of(flags)["history"]] == list(range(1, 8))


def test_a_signal_during_evaluation_or_saving_stops_at_that_update(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = settings(tmp_path, "evaluating", {})
    error = stopped(flags, Told(in_evaluation=[signal.SIGINT]))
    assert "stopped after update 5 of 10" in str(error)
    assert updates_saved(flags) == [5]
    assert len(record_of(flags)["eval"]) == 1

    flags = settings(tmp_path, "saving", {}) | {"output": {"out": str(tmp_path / "saving"), "save_every": 4}}
    save = torch.save
    numbers = [signal.SIGTERM]
    monkeypatch.setattr(torch, "save", lambda *given: (send(*numbers), numbers.clear(), save(*given)))
    error = stopped(flags, Told())
    assert error.exit_code == 143
    assert "stopped after update 5 of 10" in str(error)
    assert updates_saved(flags) == [4, 5]


def test_two_signals_while_saving_leave_the_checkpoint_before_and_nothing_half_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = settings(tmp_path, "o", {})
    flags["output"]["save_every"] = 3
    save = torch.save
    made: list[int] = []

    def interrupted(*given: Any) -> None:
        save(*given)
        made.append(1)
        if len(made) == 2:
            send(signal.SIGINT, signal.SIGINT)

    monkeypatch.setattr(torch, "save", interrupted)
    error = stopped(flags, Told())
    assert "after update 6 of 10; the state after update 3 is saved; 3 later updates are lost" in str(error)
    assert updates_saved(flags) == [3]


def test_a_signal_before_the_first_update_lets_one_be_made_and_a_second_one_none(tmp_path: Path) -> None:
    flags = settings(tmp_path, "one", {})
    error = stopped(flags, Told(at_start=[signal.SIGINT]))
    assert "stopped after update 1 of 10" in str(error)
    assert updates_saved(flags) == [1]

    flags = settings(tmp_path, "none", {})
    error = stopped(flags, Told(at_start=[signal.SIGINT, signal.SIGINT]))
    assert "stopped at once after update 0 of 10; no state was saved" in str(error)
    record = record_of(flags)
    assert (record["status"], record["history"], record["measured"]) == ("interrupted", [], None)
    whole = pipeline.train(pipeline.resolve_spec(flags), progress=QuietProgress(), resume=True)
    assert whole.status == "completed"
    assert len(whole.history) == 10


def test_a_signal_after_the_last_update_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flags, progress = settings(tmp_path, "o", {}), Told()
    from effcli.pipeline.running import saving

    save = saving.save_model
    monkeypatch.setattr(saving, "save_model", lambda *given, **more: (send(signal.SIGTERM), save(*given, **more)))
    record = pipeline.train(pipeline.resolve_spec(flags), progress=progress)
    assert record.status == record_of(flags)["status"] == "completed"
    assert saved_weights(tmp_path / "o")
    assert "the last update is done, saving what it learnt; press again to stop at once" in progress.notes


def test_a_run_that_was_stopped_while_its_model_was_saved_is_completed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = settings(tmp_path, "o", {})
    from effcli.pipeline.running import saving

    with monkeypatch.context() as patch:
        patch.setattr(saving, "save_model", lambda *given, **more: send(signal.SIGINT, signal.SIGINT))
        error = stopped(flags, Told())
    assert "stopped at once after update 10 of 10; the state after update 10 is saved, continue" in str(error)
    assert not (tmp_path / "o" / "model").exists()
    record = pipeline.train(pipeline.resolve_spec(flags), progress=QuietProgress(), resume=True)
    assert record.status == "completed"
    assert len(record.history) == 10
    assert saved_weights(tmp_path / "o")


@pytest.mark.parametrize("stage", ["data", "weights"])
def test_a_signal_before_training_stops_the_run_also_where_a_library_catches_what_it_raises(
    stage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = {"data": "effcli.pipeline.prepare.load_tables", "weights": "effcli.pipeline.running.training.build"}[stage]
    module, _, function = name.rpartition(".")
    real = getattr(import_module(module), function)

    def caught(*given: Any, **settings: Any) -> Any:
        with contextlib.suppress(BaseException):  # as datasets does while it hashes a function
            send(signal.SIGINT)
        return real(*given, **settings)

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    monkeypatch.setattr(name, caught)
    try:
        interrupt_on_signals()
        with pytest.raises(SystemExit) as stop:
            pipeline.train(pipeline.resolve_spec(settings(tmp_path, "o", {})), progress=Told())
    finally:
        forget_interruption()
        for number, handler in before.items():
            signal.signal(number, handler)
    assert stop.value.code == 130
    assert not (tmp_path / "o" / "record.json").exists()
