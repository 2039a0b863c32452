"""The file of the history bears writers side by side, kills, damage, and any number of runs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from effcli.history.file import LARGEST_BYTES, append, read_lines
from effcli.history.read import read_history
from tests import histories

APPENDING = """
import sys
from pathlib import Path
from effcli.history import file
if len(sys.argv) > 4:
    file.LARGEST_BYTES = int(sys.argv[4])
numbers = iter(int, 1) if sys.argv[3] == "forever" else range(int(sys.argv[3]))
for number, _ in enumerate(numbers):
    file.append(Path(sys.argv[1]), f"{sys.argv[2]} {number} {'x' * (number % 900)}.".encode())
"""


def appending(path: Path, name: str, *numbers: object) -> subprocess.Popen[bytes]:
    """Return a process that appends lines, each with its name, a number, and a point at its end."""
    return subprocess.Popen([sys.executable, "-c", APPENDING, str(path), name, *map(str, numbers)])


def is_whole(line: bytes) -> bool:
    return line.endswith(b".") and line.count(b" ") == 2 and b"." not in line[:-1]


def test_two_processes_that_write_at_once_lose_no_line(tmp_path: Path) -> None:
    path = tmp_path / "h.jsonl"
    writers = [appending(path, name, 200) for name in ("one", "two")]
    assert [writer.wait(60) for writer in writers] == [0, 0]
    lines = [line.decode().split() for line in read_lines(path)]
    for name in ("one", "two"):
        assert [int(number) for who, number, _ in lines if who == name] == list(range(200))


def test_processes_that_set_the_file_aside_at_once_keep_it_small_and_its_lines_whole(tmp_path: Path) -> None:
    path, largest = tmp_path / "h.jsonl", 8000
    writers = [appending(path, name, 400, largest) for name in ("one", "two", "three")]
    assert [writer.wait(60) for writer in writers] == [0, 0, 0]
    assert sorted(file.name for file in tmp_path.iterdir()) == ["h.jsonl", "h.jsonl.1"]
    assert all(file.stat().st_size < largest + 3 * 1000 for file in tmp_path.iterdir())
    lines = read_lines(path)
    assert all(is_whole(line) for line in lines)
    assert sum(map(len, lines)) > largest / 2
    last = max(int(line.split()[1]) for line in lines)
    assert last == 399
    for name in ("one", "two", "three"):
        numbers = [int(line.split()[1]) for line in lines if line.startswith(name.encode())]
        assert numbers == sorted(numbers)


def test_a_kill_at_any_moment_costs_a_line_at_most(tmp_path: Path) -> None:
    path = tmp_path / "h.jsonl"
    for _ in range(3):
        writer = appending(path, "one", "forever")
        size = path.stat().st_size if path.exists() else 0
        while not path.exists() or path.stat().st_size < size + 5000:
            assert writer.poll() is None
            time.sleep(0.001)
        writer.send_signal(signal.SIGKILL)
        writer.wait()
    append(path, b"two 0 .")
    lines = read_lines(path)
    assert lines[-1] == b"two 0 ."
    assert sum(not is_whole(line) for line in lines) <= 3


def test_a_line_that_was_cut_off_is_left_out_and_the_next_one_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = histories.write(tmp_path / "h.jsonl", histories.line())
    text = json.dumps(histories.line(optimizer="adafactor")).encode()
    with path.open("ab") as file:
        file.write(text[: len(text) // 2])
    append(path, text)
    monkeypatch.setenv("EFFCLI_HISTORY", str(path))
    history = read_history()
    assert [run.optimizer for run in history.runs] == ["adam8bit", "adafactor"]
    assert history.num_damaged == 1


DAMAGE = {
    "no JSON": b"rubbish",
    "half a line": b'{"schema_version": 1, "date": "2030-01-3',
    "a list": b"[1, 2]",
    "nothing in it": b"{}",
    "zeros, as after a loss of power": bytes(4096),
    "no text": b"\xff\xfe\x00\x80",
    "too deep": b"[" * 100_000,
    "another version": json.dumps(histories.line(schema_version=2)).encode(),
    "a version of text": json.dumps(histories.line(schema_version="one")).encode(),
    "no date": json.dumps(histories.line(date="yesterday")).encode(),
    "bytes that are a text": json.dumps(histories.line(pairs={"context": histories.pair(None, "many")})).encode(),  # type: ignore[arg-type]
    "bytes that are true": json.dumps(histories.line(pairs={"context": histories.pair(None, True)})).encode(),
    "negative bytes": json.dumps(histories.line(pairs={"context": histories.pair(None, -1)})).encode(),
    "the driver's sentinel": json.dumps(histories.line(pairs={"context": histories.pair(None, 2**64 - 1)})).encode(),
    "a number of 10,000 digits": b'{"schema_version": 1' + b"0" * 9999 + b"}",
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_line_is_left_out_and_counted(damage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good = json.dumps(histories.line()).encode()
    path = tmp_path / "h.jsonl"
    path.write_bytes(b"\n".join([good, DAMAGE[damage], b"", good]) + b"\n")
    monkeypatch.setenv("EFFCLI_HISTORY", str(path))
    history = read_history()
    assert (len(history.runs), history.num_damaged, history.reason) == (2, 1, None)


def test_keys_of_a_newer_effcli_are_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EFFCLI_HISTORY", str(histories.write(tmp_path / "h", histories.line(colour="blue"))))
    assert (len(read_history().runs), read_history().num_damaged) == (1, 0)


def test_of_a_file_that_is_far_too_large_only_the_end_is_read(tmp_path: Path) -> None:
    path = tmp_path / "h.jsonl"
    with path.open("wb") as file:
        file.truncate(2**36)  # sparse
        file.seek(0, os.SEEK_END)
        file.write(b"\none\ntwo\n")
    assert read_lines(path)[-2:] == [b"one", b"two"]
    assert sum(map(len, read_lines(path))) <= 4 * LARGEST_BYTES
    append(path, b"three")
    assert path.stat().st_size == len(b"three\n")
    assert read_lines(path)[-1] == b"three"


def test_a_history_that_cannot_be_read_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    link = tmp_path / "link"
    link.symlink_to(histories.write(tmp_path / "h.jsonl", histories.line()))
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path, why in ((tmp_path, "it is no file"), (link, "it is a symbolic link"), (pipe, "it is no file")):
        monkeypatch.setenv("EFFCLI_HISTORY", str(path))
        assert (read_history().runs, read_history().reason) == ((), why)
    monkeypatch.setenv("EFFCLI_HISTORY", str(tmp_path / "none"))
    assert (read_history().runs, read_history().reason) == ((), None)
