"""The processes of a comparison: signals at every stage, a parent that is gone, and what runs tell it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from effcli.engines.base import EvalResult
from effcli.pipeline.comparing.fresh_process import PassedSignals
from effcli.pipeline.comparing.processor_times import ProcessorTimes, others_share, read_processor_times
from effcli.pipeline.comparing.run_events import EventPlayer, EventWriter, SaidOnce, read_event
from effcli.report.progress import QuietProgress
from tests.fake_runs import LONG, SLOW, WAYS, attempts, saved


@contextmanager
def comparing(
    folder: Path, *arguments: object, ways: Mapping[str, str]
) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """Start a comparison in `folder`/c; the second value is the file of what it says."""
    log = folder / "log"
    command = [sys.executable, "-c", "from tests.fake_runs import compare; compare()", "compare"]
    command += [*map(str, arguments), "--out", str(folder / "c"), "--logging-steps", "1"]
    with log.open("wb") as said, subprocess.Popen(
        command, stdout=said, stderr=said, env={**os.environ, WAYS: json.dumps(ways)}, process_group=0
    ) as process:  # fmt: skip
        yield process, log
        process.kill()


def wait_for(words: str, log: Path) -> None:
    deadline = time.monotonic() + 60
    while words not in log.read_text():
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.01)


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def child_of(process: subprocess.Popen[bytes]) -> int:
    """Return the id of the one process that another has started."""
    (child,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return int(child)


def state_of(pid: int) -> str:
    """Return the letter that the system has for the state of a process, T for one that is stopped."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def is_alive(pid: int) -> bool:
    try:
        return state_of(pid) != "Z"
    except OSError:
        return False


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.slow)]
)
def test_a_signal_stops_the_run_after_its_update_and_starts_no_other(number: int, code: int, tmp_path: Path) -> None:
    out = tmp_path / "c"
    with comparing(tmp_path, "adamw", "adam8bit", "adafactor", ways={"adam8bit": "wait"}) as (process, log):
        wait_for(f"update 2/{LONG}", log)
        process.send_signal(number)
        assert process.wait(timeout=60) == code
        text = log.read_text()
    assert "Run 3 of 3" not in text
    assert text.count("stopping after this update; press again to stop at once") == 1
    last = text.splitlines()[-1]
    assert last.startswith("effcli: error: 1 of 3 runs are complete; adam8bit: stopped after update ")
    assert last.endswith(f"; the state is saved; to complete them: effcli compare --resume --out {out}")
    document = saved(out)
    assert document["status"] == "interrupted"
    assert attempts(document) == [
        ("adamw", "completed", 0), ("adam8bit", "interrupted", code), ("adafactor", "missing", code),
    ]  # fmt: skip
    assert len(list((out / "adam8bit" / "checkpoints").iterdir())) == 1

    with comparing(tmp_path, "--resume", ways={"adam8bit": "wait"}) as (process, log):
        assert process.wait(timeout=60) == 0
        assert "Run 1 of 3" not in log.read_text()
    assert attempts(saved(out)) == [(name, "completed", 0) for name in ("adamw", "adam8bit", "adafactor")]
    assert saved(out)["runs"][1]["spec"]["output"]["out"] == str(out / "adam8bit")


def test_a_signal_to_the_whole_group_counts_once_and_a_second_one_stops_at_once(tmp_path: Path) -> None:
    with comparing(tmp_path, "adamw", ways={"adamw": "wait"}) as (process, log):
        wait_for(f"update {SLOW}/{LONG}", log)
        assert os.getpgid(child_of(process)) != process.pid  # so that the signal comes once
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        wait_for("stopping after this update", log)
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(timeout=60) == 130
        last = log.read_text().splitlines()[-1]
    assert f"adamw: stopped at once after update {SLOW} of {LONG}; no state was saved before" in last
    assert attempts(saved(tmp_path / "c"))[0] == ("adamw", "interrupted", 130)


def test_a_signal_before_training_ends_the_run_there(tmp_path: Path) -> None:
    with comparing(tmp_path, "adamw", ways={"adamw": "wait before training"}) as (process, log):
        wait_for("waiting", log)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 130
        assert "adamw: stopped before training" in log.read_text().splitlines()[-1]
    assert attempts(saved(tmp_path / "c"))[0] == ("adamw", "interrupted", 130)


def test_signals_that_a_run_does_not_listen_to_end_it(tmp_path: Path) -> None:
    with comparing(tmp_path, "adamw", ways={"adamw": "deaf"}) as (process, log):
        wait_for("deaf", log)
        run = child_of(process)
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGTERM)
        while is_alive(run):
            process.send_signal(signal.SIGINT)  # counts as one with the first where that was not seen yet
            deadline = time.monotonic() + 1
            while is_alive(run) and time.monotonic() < deadline:
                time.sleep(0.01)
        assert process.wait(timeout=60) == 130
        assert "adamw: killed, since it did not stop" in log.read_text().splitlines()[-1]
    assert attempts(saved(tmp_path / "c")) == [("adamw", "interrupted", 130)]


class Sent:
    """Stands for the process of a run, and keeps the signals that it is sent."""

    def __init__(self) -> None:
        self.numbers: list[int] = []

    def send_signal(self, number: int) -> None:
        self.numbers.append(number)


def test_a_process_gets_signals_once_it_is_ready_and_the_third_cannot_be_left_unheard() -> None:
    sent = Sent()
    with PassedSignals() as signals:
        os.kill(os.getpid(), signal.SIGTERM)
        signals.attach(sent)
        assert sent.numbers == []
        signals.ready()
        assert sent.numbers == [signal.SIGTERM]
        os.kill(os.getpid(), signal.SIGINT)
        assert not signals.has_killed
        os.kill(os.getpid(), signal.SIGINT)
        assert signals.has_killed
    assert sent.numbers == [signal.SIGTERM, signal.SIGINT, signal.SIGKILL]
    assert signals.number == signal.SIGTERM


def test_a_run_whose_parent_is_killed_saves_its_state_and_goes_on_later(tmp_path: Path) -> None:
    out = tmp_path / "c"
    with comparing(tmp_path, "adamw", ways={"adamw": "wait"}) as (process, log):
        wait_for(f"update 2/{LONG}", log)
        process.kill()
        process.wait(timeout=60)
    record = out / "adamw" / "record.json"
    wait_until(record.is_file)
    assert json.loads(record.read_text())["status"] == "interrupted"
    assert len(list((out / "adamw" / "checkpoints").iterdir())) == 1
    assert attempts(saved(out)) == [("adamw", "missing", None)]
    wait_until(lambda: not list((out / "adamw").glob(".writing-*")))
    with comparing(tmp_path, "--resume", ways={"adamw": "wait"}) as (process, log):
        assert process.wait(timeout=60) == 0
        assert f"update 1/{LONG}" not in log.read_text()
    assert attempts(saved(out)) == [("adamw", "completed", 0)]


def test_what_a_terminal_suspends_stops_with_its_run(tmp_path: Path) -> None:
    with comparing(tmp_path, "adamw", ways={"adamw": "wait"}) as (process, log):
        wait_for(f"update 2/{LONG}", log)
        process.send_signal(signal.SIGTSTP)
        wait_until(lambda: state_of(process.pid) == "T")
        wait_until(lambda: state_of(child_of(process)) == "T")
        before = log.read_text()
        process.send_signal(signal.SIGCONT)
        wait_until(lambda: log.read_text() != before)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 130


class Told(QuietProgress):
    """Keeps the calls that it gets."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []

    def note(self, text: str) -> None:
        self.calls.append(("note", text))

    @contextmanager
    def rows(self, what: str, num_rows: int) -> Iterator[Callable[[int], None]]:
        self.calls.append(("rows", (what, num_rows)))
        yield lambda num_done: self.calls.append(("done", num_done))
        self.calls.append(("rows end", None))

    def start(self, **given: Any) -> None:
        self.calls.append(("start", given))

    def update(self, **given: Any) -> None:
        self.calls.append(("update", given))

    def evaluation(self, **given: Any) -> None:
        self.calls.append(("evaluation", given))

    def stop(self) -> None:
        self.calls.append(("stop", None))


def tell(progress: Any) -> None:
    """Make every call of `Progress`."""
    with progress.rows("Text is read", 9) as done:
        done(3)
    progress.note('A "note" of several\nlines, \u2603.')
    progress.start(first_update=1, total_updates=2)
    progress.update(update=2, epoch=0.1, loss=1 / 3, lr=1e-5, num_samples=8)
    progress.evaluation(epoch=1.0, result=EvalResult(loss=0.1, accuracy=0.5))
    progress.stop()


def test_a_run_in_another_process_looks_like_one_in_this() -> None:
    read, write = os.pipe()
    tell(EventWriter(write, lost=lambda: None))
    os.close(write)
    here, there = Told(), Told()
    player = EventPlayer(there)
    with open(read, encoding="utf-8") as lines:
        for line in lines:
            player.play(read_event(line))
    tell(here)
    assert there.calls == here.calls


def test_an_event_whose_writing_a_signal_stopped_spoils_no_other() -> None:
    assert read_event('{"event": "upd') == {}
    assert read_event("\n") == {}
    assert read_event("[1]") == {}
    assert read_event('{"event": "note", "text": "x"}') == {"event": "note", "text": "x"}
    read, write = os.pipe()
    os.write(write, b'\n{"event": "upda')
    EventWriter(write, lost=lambda: None).note("whole")
    os.close(write)
    with open(read) as lines:
        assert [event for line in lines if (event := read_event(line))] == [{"event": "note", "text": "whole"}]


def test_a_sentence_is_said_once_and_a_lost_reader_told_of_once() -> None:
    told, lost = Told(), []
    said: set[str] = set()
    for progress in (SaidOnce(told, said), SaidOnce(told, said)):
        progress.note("one")
        progress.note("two")
    assert told.calls == [("note", "one"), ("note", "two")]
    read, write = os.pipe()
    os.close(read)
    events = EventWriter(write, lost=lambda: lost.append(1))
    tell(events)
    os.close(write)
    assert lost == [1]


def test_the_share_of_others_is_what_neither_idles_nor_is_ones_own() -> None:
    before = ProcessorTimes(total_s=100.0, busy_s=40.0, own_s=10.0)
    assert others_share(before, ProcessorTimes(total_s=200.0, busy_s=120.0, own_s=60.0)) == pytest.approx(0.3)
    assert others_share(before, ProcessorTimes(total_s=200.0, busy_s=90.0, own_s=60.1)) == 0.0
    assert others_share(before, before) is None


def test_times_of_the_processors_hold_those_of_this_process() -> None:
    before = read_processor_times()
    while (after := read_processor_times()).own_s - before.own_s < 0.05:
        sum(range(10_000))
    share = others_share(before, after)
    assert share is None or 0.0 <= share <= 1.0
    assert 0 < after.own_s <= after.busy_s + 1 < after.total_s + 1
